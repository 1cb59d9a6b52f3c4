"""Conformance report: implementations on this device through all cases, errors included."""

import collections
import dataclasses
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from xsake._progress import Progress, ProgressFn
from xsake._provenance import checkout_root, environment, source_digest
from xsake.certify.record import sanitize
from xsake.errors import UnsupportedError
from xsake.testing.budget import ErrorReport
from xsake.testing.case_table import CASES
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

SCHEMA_VERSION = 1
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables that may change results
VERDICTS = ("passed", "failed", "declined")
_NUMBERS = (
    "max_error", "naive_max_error", "max_ratio", "rms_error", "naive_rms_error", "rms_ratio",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ConformanceRow:
    """Result of one implementation in one case; failed: a rule is broken or an error was raised."""

    implementation: str
    case: str
    dtype: str
    verdict: Literal["passed", "failed", "declined"]
    words: str | None  # broken rules, error message or reason for declining
    seconds: float  # compilation and oracle included; not a speed measurement
    arrays: tuple[dict[str, Any], ...] = ()  # errors of out, lse and every gradient

    @property
    def used(self) -> float | None:
        """Largest ratio of error to allowance over all arrays; the limit is 1."""
        ratios = (array["allowance_used"] for array in self.arrays)
        return max((ratio for ratio in ratios if ratio is not None), default=None)


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Results so far."""

    facts: dict[str, Any]  # device, versions, commit and environment variables
    asked: tuple[str, ...]  # implementations to run
    cases: int  # number of cases per implementation
    rows: tuple[ConformanceRow, ...] = ()
    running: tuple[str, str] | None = None  # current (implementation, case)

    @property
    def complete(self) -> bool:
        """Whether all cases have finished."""
        return len(self.rows) == len(self.asked) * self.cases

    @property
    def healthy(self) -> bool:
        """Whether no case failed and every implementation passed at least one."""
        passed = {row.implementation for row in self.rows if row.verdict == "passed"}
        no_failure = all(row.verdict != "failed" for row in self.rows)
        return self.complete and no_failure and passed == set(self.asked)

    def summary(self) -> dict[str, dict[str, int]]:
        """Count the cases of each implementation by verdict."""
        counts = collections.Counter((row.implementation, row.verdict) for row in self.rows)
        return {name: {x: counts[name, x] for x in VERDICTS} for name in self.asked}

    def to_json(self) -> str:
        """Serialize the report."""
        plain = {
            "schema_version": SCHEMA_VERSION,
            "complete": self.complete,
            "healthy": self.healthy,
            **self.facts,
            "asked": self.asked,
            "cases": self.cases,
            "running": self.running,
            "summary": self.summary(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def run_conformance(
    attention: Callable,
    names: Sequence[str],
    facts: dict[str, Any],
    keep: Callable[[ConformanceReport], None],
    on_progress: ProgressFn,
) -> ConformanceReport:
    """Run implementations through all cases; Ctrl-C returns the finished ones.

    Args:
        attention: the function under test, with the signature of `xsake.attention`.
        names: implementations that can run here.
        facts: of `collect_facts`.
        keep: called with the report before every case and at the end, so that the report survives
            a crash of the process.
        on_progress: called at the start and at the end of every case.
    """
    report = ConformanceReport(facts, tuple(names), len(CASES))
    pairs, start = [(name, case) for name in names for case in CASES], time.perf_counter()
    try:
        for done, (name, case) in enumerate(pairs):
            report = dataclasses.replace(report, running=(name, case.name))
            keep(report)
            label = f"{name} {case.name}"
            on_progress(Progress(done, len(pairs), label))
            row = run_case(attention, name, case)
            report = dataclasses.replace(report, rows=(*report.rows, row), running=None)
            on_progress(Progress(
                done + 1, len(pairs), label, elapsed_seconds=time.perf_counter() - start,
                detail=row.verdict, is_failure=row.verdict == "failed",
            ))  # fmt: skip
    except KeyboardInterrupt:
        pass  # the report is marked as incomplete
    keep(report)
    return report


def run_case(attention: Callable, name: str, case: ConformanceCase) -> ConformanceRow:
    """Run one case; errors become rows."""
    start, checks, verdict, words = time.perf_counter(), [], "passed", None
    try:
        # The error budget assumes float32 products, which accelerators do not use by default.
        with jax.default_matmul_precision("highest"):
            checks = check_case(attention, case, name)
    except UnsupportedError as error:
        verdict, words = "declined", str(error.got or error.what)
    except Exception as error:  # noqa: BLE001 - any error on a new device is a result
        verdict, words = "failed", sanitize(f"{type(error).__name__}: {error}", {})
    if broken := failures(checks):
        verdict, words = "failed", "; ".join(broken)
    seconds = round(time.perf_counter() - start, 3)
    arrays = tuple(map(_array_errors, checks))
    return ConformanceRow(name, case.name, case.dtype, verdict, words, seconds, arrays)


def _array_errors(errors: ErrorReport) -> dict[str, Any]:
    """Return the errors of one array as JSON types."""
    numbers = {name: getattr(errors, name) for name in _NUMBERS} | {"allowance_used": errors.used}
    finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
    return {"array": errors.name, **finite, "failure": errors.failure}


def collect_facts(platform: str, implementations: Mapping[str, str | None]) -> dict[str, Any]:
    """Return software and device information, without host or user names."""
    here, device = environment(checkout_root()), jax.devices()[0]
    packages = ((each.name, each.version) for each in importlib.metadata.distributions())
    related = {name: x for name, x in packages if name and name.startswith(("jax", "libtpu"))}
    settings = {name: sanitize(os.environ[name], {}) for name in VARIABLES if name in os.environ}
    return {
        "made_at": here.utc,
        "commit": here.commit,
        "dirty": here.dirty,
        "source": source_digest(),
        "versions": dict(sorted({**related, **here.versions}.items())),
        "platform": platform,
        "platform_version": sanitize(device.client.platform_version, {}),
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "host_processor": here.cpu,
        "settings": settings,
        "implementations": dict(implementations),
    }
