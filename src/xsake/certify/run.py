"""Runs cases through the compilers of targets and keeps the certificates as it goes."""

import datetime
import hashlib
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import xsake
from xsake._provenance import cpu_model, environment, own_checkout
from xsake.certify import bound, cases, environments, record
from xsake.certify.case import Case
from xsake.certify.family import FAMILIES, Family, Target, load
from xsake.certify.process import Setting, Worker
from xsake.certify.record import Answer, Certificate, Outcome

PACKAGE = Path(xsake.__file__).parent
# What decides the outcome of a case, beside its own fields and its family.
SOURCES = (
    "certify/build.py",
    "certify/build_selected.py",
    "kernels",
    "layout",
    "masks",
)
CASE_SECONDS = 300.0


@dataclass(frozen=True)
class Plan:
    """What to do, and where to keep it.

    Args:
        selection: "smoke", "all", or a pattern on case names.
        out: folder of the certificates.
        environments: folder of the environments.
        fresh: compile again what is already certified.
        figures: ask for memory, spills and schedule as well, which takes longer.
        command: what the user typed, for the record.
        time_limit: seconds that a case may take.
    """

    selection: str
    out: Path
    environments: Path
    fresh: bool = False
    figures: bool = True
    command: str = "xsake certify"
    time_limit: float = CASE_SECONDS


@dataclass(frozen=True)
class Progress:
    """One line for whoever watches: a case was answered, or was known already."""

    target: str
    done: int
    total: int
    outcome: Outcome
    is_new: bool
    elapsed_seconds: float
    remaining_seconds: float | None


@dataclass(frozen=True)
class Watcher:
    """Who is told what happens; both do nothing unless given."""

    progress: Callable[[Progress], None] = lambda _: None
    announce: Callable[[str], None] = lambda _: None


def certify(
    target: Target, plan: Plan, watcher: Watcher | None = None, families: dict[str, str] = FAMILIES
) -> tuple[Certificate, list[Outcome]]:
    """Compile the selected cases for a target, in its own process; the file is always up to date.

    Args:
        target: what to compile for.
        plan: which cases, and where to keep what comes out.
        watcher: told about progress.
        families: modules by family name.

    Returns:
        The certificate with everything that is known about the target, what older sources gave for
        cases that were not selected included, and the outcomes of the selected cases.
    """
    watcher = watcher or Watcher()
    module = families[target.family]
    family = load(module)
    chosen = cases.select(plan.selection, family)
    python = environments.interpreter(family, plan.environments, watcher.announce)
    setting = Setting(python, module, family, target, plan.time_limit, plan.figures)
    with Worker(setting) as worker:
        origin = _origin(module)
        certificate = _begin(target, worker, plan)
        known = _known(certificate, family, plan)
        holds = {name for name, outcome in known.items() if outcome.source == origin.source}
        clock = _Clock(sum(case.name not in holds for case in chosen))
        selected: dict[str, Outcome] = {}
        for done, case in enumerate(chosen, start=1):
            is_new = case.name not in holds
            if is_new:
                known[case.name] = _outcome(case, worker.ask(case), target, origin)
                clock.tick()
            selected[case.name] = known[case.name]
            certificate = _with(certificate, known)
            if is_new or done == len(chosen):
                record.write(certificate, plan.out)
            outcome = selected[case.name]
            times = clock.elapsed, clock.remaining
            watcher.progress(Progress(target.name, done, len(chosen), outcome, is_new, *times))
    return certificate, list(selected.values())


def source_digest(module: str) -> str:
    """A digest of the sources that decide an outcome; the family's own modules are among them."""
    family = importlib.import_module(module)
    own = [family, *(x for x in vars(family).values() if isinstance(x, ModuleType))]
    folder = family.__name__.rpartition(".")[0]
    files = [Path(x.__file__ or "") for x in own if x.__name__.startswith(f"{folder}.")]
    for name in SOURCES:
        place = PACKAGE / name
        files += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


class _Clock:
    """Seconds so far and, once a case was compiled, seconds to go."""

    def __init__(self, new: int):
        self._start, self._new, self._ticks = time.monotonic(), new, 0

    def tick(self) -> None:
        self._ticks += 1

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float | None:
        left = self._new - self._ticks
        return self.elapsed / self._ticks * left if self._ticks else None


class _Origin(NamedTuple):
    """The sources that outcomes come from."""

    commit: str | None
    dirty: bool | None
    source: str


def _origin(module: str) -> _Origin:
    here = environment(own_checkout())
    return _Origin(here.commit, here.dirty, source_digest(module))


def _begin(target: Target, worker: Worker, plan: Plan) -> Certificate:
    return Certificate(
        family=target.family,
        target=target.name,
        topology=target.topology,
        device_kind=worker.device_kind,
        made_at=_now(),
        command=plan.command,
        figures=plan.figures,
        versions=worker.versions,
        host_processor=cpu_model(),
    )


def _known(certificate: Certificate, family: Family, plan: Plan) -> dict[str, Outcome]:
    """Outcomes in the file that belong here: same versions and case, and not a crash."""
    path = plan.out / certificate.file_name
    if plan.fresh or not path.exists():
        return {}
    before = record.read(path)
    if not certificate.continues(before):
        return {}
    current = {case.name: case for case in cases.select("all", family)}
    return {
        outcome.case.name: outcome
        for outcome in before.outcomes
        if outcome.verdict != "crashed" and current.get(outcome.case.name) == outcome.case
    }


def _with(certificate: Certificate, known: dict[str, Outcome]) -> Certificate:
    outcomes: Sequence[Outcome] = sorted(known.values(), key=lambda outcome: outcome.case.name)
    newest = max(outcome.made_at for outcome in outcomes)
    return certificate.model_copy(update={"outcomes": list(outcomes), "made_at": newest})


def _outcome(case: Case, answer: Answer, target: Target, origin: _Origin) -> Outcome:
    cost = answer.cost if answer.verdict == "compiled" else None
    return Outcome(
        case=case,
        as_expected=record.is_as_expected(case, answer),
        bound=None if cost is None else bound.lower_bound(cost, target.peak),
        made_at=_now(),
        **origin._asdict(),
        **{name: getattr(answer, name) for name in Answer.model_fields},
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
