"""Compile cases for a target and write certificates incrementally."""

import hashlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xsake
from xsake._progress import Progress, ProgressFn
from xsake._provenance import checkout_root, cpu_model, environment, utc_now
from xsake.certify import cases, environments, record
from xsake.certify.family import FAMILIES, Target, TargetFamily, load_family, lower_bound
from xsake.certify.process import Worker
from xsake.certify.record import Certificate, CompileCase, CompileResult, Outcome

PACKAGE = Path(xsake.__file__).parent
# Sources that decide the outcome of a case, in addition to its fields and its family.
SOURCES = ("certify/build.py", "kernels", "layout", "masks")
CASE_SECONDS = 300.0


@dataclass(frozen=True)
class CertifyOptions:
    """Options of a certification."""

    selection: str  # "smoke", "all", or a pattern on case names
    out: Path  # folder of certificates
    environments: Path  # folder of environments
    overwrite: bool = False  # recompile cases that are already certified
    figures: bool = True  # record memory, spills and schedule, which is slower
    command: str = "xsake certify"  # command line, for the record
    time_limit: float = CASE_SECONDS  # timeout per case in seconds


def certify(
    target: Target,
    options: CertifyOptions,
    *,
    on_progress: ProgressFn = lambda _: None,
    announce: Callable[[str], None] = lambda _: None,
    families: dict[str, str] = FAMILIES,
) -> tuple[Certificate, list[Outcome]]:
    """Compile the selected cases for a target in a subprocess; the file is updated after each case.

    Args:
        target: device type.
        options: selection of cases and folders.
        on_progress: called after each case, also if its outcome was cached.
        announce: called with a message before an environment is built.
        families: modules by family name.

    Returns:
        The certificate of the target, including outcomes of older sources for cases that were not
        selected, and the outcomes of the selected cases.
    """
    module = families[target.family]
    family = load_family(module)
    selected_cases = cases.select_cases(options.selection, family)
    python = environments.find_interpreter(family, options.environments, announce)
    limits: dict[str, Any] = {"time_limit": options.time_limit, "figures": options.figures}
    with Worker(python, module, target, **limits) as worker:
        here, source = environment(checkout_root()), source_digest(module)
        origin = here.fields("commit", "dirty") | {"source": source}
        certificate = _new_certificate(target, worker, options)
        outcomes = _load_outcomes(certificate, family, options)
        cached = {name for name, outcome in outcomes.items() if outcome.source == source}
        new = [case.name for case in selected_cases if case.name not in cached]
        started, compiled = time.monotonic(), 0
        for done, case in enumerate(selected_cases, start=1):
            is_new = case.name in new
            if is_new:
                result = worker.compile(case)
                outcomes[case.name] = _make_outcome(case, result, target, origin)
                compiled += 1
            certificate = _replace_outcomes(certificate, outcomes)
            if is_new or done == len(selected_cases):
                record.write_certificate(certificate, options.out)
            elapsed = time.monotonic() - started
            remaining = elapsed / compiled * (len(new) - compiled) if compiled else None
            is_good = outcomes[case.name].as_expected
            verdict = f"{outcomes[case.name].verdict} {'ok' if is_good else 'NOT AS EXPECTED'}"
            label, total = f"{target.name} {case.name}", len(selected_cases)
            on_progress(
                Progress(done, total, label, is_new, elapsed, remaining, verdict, not is_good)
            )
    return certificate, [outcomes[case.name] for case in selected_cases]


def source_digest(module: str) -> str:
    """Return a digest of the sources that decide an outcome, the family's modules included."""
    family = importlib.import_module(module.partition(":")[0])
    modules = [family, *(x for x in vars(family).values() if isinstance(x, ModuleType))]
    folder = family.__name__.rpartition(".")[0]
    files = [Path(x.__file__ or "") for x in modules if x.__name__.startswith(f"{folder}.")]
    for name in SOURCES:
        path = PACKAGE / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _new_certificate(target: Target, worker: Worker, options: CertifyOptions) -> Certificate:
    return Certificate(
        family=target.family, target=target.name, topology=target.topology,
        device_kind=worker.device_kind, made_at=utc_now(), command=options.command,
        figures=options.figures, versions=worker.versions, host_processor=cpu_model(),
    )  # fmt: skip


def _load_outcomes(
    certificate: Certificate, family: TargetFamily, options: CertifyOptions
) -> dict[str, Outcome]:
    """Load reusable outcomes of the file: same versions and case, and not a crash."""
    path = options.out / certificate.file_name
    if options.overwrite or not path.exists():
        return {}
    before = record.read_certificate(path)
    if not certificate.is_compatible(before):
        return {}
    current = {case.name: case for case in cases.select_cases("all", family)}
    return {
        outcome.case.name: outcome
        for outcome in before.outcomes
        if outcome.verdict != "crashed" and current.get(outcome.case.name) == outcome.case
    }


def _replace_outcomes(certificate: Certificate, outcomes: dict[str, Outcome]) -> Certificate:
    by_name = sorted(outcomes.values(), key=lambda outcome: outcome.case.name)
    newest = max(outcome.made_at for outcome in by_name)
    return certificate.model_copy(update={"outcomes": by_name, "made_at": newest})


def _make_outcome(
    case: CompileCase, result: CompileResult, target: Target, origin: dict[str, Any]
) -> Outcome:
    cost = result.cost if result.verdict == "compiled" else None
    return Outcome(
        case=case,
        as_expected=record.is_as_expected(case, result),
        bound=None if cost is None else lower_bound(cost, target.peak),
        made_at=utc_now(),
        **origin,
        **{name: getattr(result, name) for name in CompileResult.model_fields},
    )
