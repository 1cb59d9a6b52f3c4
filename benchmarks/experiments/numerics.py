"""Measured error ratios of every implementation over the conformance table.

    python -m benchmarks.experiments.numerics  measure, write results/numerics.jsonl, print a table
    python -m benchmarks.experiments.numerics --show  print the table of the rows already written

Each row compares one array of one case with the float64 oracle, and naive attention in the same
dtype. The numbers depend on the code and the processor, not on the clock, so a new run replaces
the file.
"""

import argparse
import collections
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

import xsake
from xsake._provenance import Environment, environment
from xsake.kernels.block_sparse.api import OP
from xsake.testing.budget import ErrorReport
from xsake.testing.case_table import CASES
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "numerics.jsonl"


class NumericsRow(BaseModel):
    """One array of one case; a ratio is null where the comparator is exact and we are not."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    implementation: str
    case: str
    array: str
    dtype: str
    q_tokens: int
    kv_tokens: int
    head_dim: int
    max_error: float
    naive_max_error: float
    max_ratio: float | None
    rms_error: float
    naive_rms_error: float
    rms_ratio: float | None
    allowance_used: float
    is_within_budget: bool
    cpu: str
    commit: str | None
    dirty: bool | None
    utc: str
    versions: dict[str, str]


def row_of(
    implementation: str, case: ConformanceCase, report: ErrorReport, where: Environment
) -> NumericsRow:
    """The published form of one verdict."""
    return NumericsRow(
        implementation=implementation,
        case=case.name,
        array=report.name,
        dtype=case.dtype,
        q_tokens=case.q_tokens,
        kv_tokens=case.kv_tokens,
        head_dim=case.head_dim,
        max_error=report.max_error,
        naive_max_error=report.naive_max_error,
        max_ratio=_finite(report.max_ratio),
        rms_error=report.rms_error,
        naive_rms_error=report.naive_rms_error,
        rms_ratio=_finite(report.rms_ratio),
        allowance_used=report.used,
        is_within_budget=report.failure is None,
        **where.fields("cpu", "commit", "dirty", "utc", "versions"),
    )


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def measure(cases: Iterable[ConformanceCase] = CASES) -> list[NumericsRow]:
    """Every implementation that runs here, through every case."""
    where, rows = environment(ROOT), []
    names = [name for name, declined in OP.implementations().items() if declined is None]
    for name in names:
        for case in cases:
            reports = check_case(xsake.attention, case, name)
            rows += [row_of(name, case, report, where) for report in reports]
    return rows


def summary(rows: Iterable[NumericsRow]) -> Table:
    """One line per implementation, dtype and array: typical ratios and the nearest miss."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.implementation, row.dtype, row.array].append(row)
    table = Table(
        title="Error against float64, in units of naive attention's error in the same dtype",
        title_justify="left",
    )
    for name in ("implementation", "dtype", "array", "cases"):
        table.add_column(name)
    for name in ("max ratio, median", "rms ratio, median", "allowance used, worst", "in case"):
        table.add_column(name, justify="right")
    for key, members in groups.items():
        worst = max(members, key=lambda row: row.allowance_used)
        table.add_row(
            *key,
            str(len(members)),
            _median(row.max_ratio for row in members),
            _median(row.rms_ratio for row in members),
            f"{worst.allowance_used:.0%}",
            worst.case,
        )
    return table


def _median(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{statistics.median(known):.2f}" if known else ""


def read(path: Path = RESULTS) -> list[NumericsRow]:
    """The committed rows."""
    return [
        NumericsRow.model_validate_json(line)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def main() -> None:
    """Measure or show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the rows already written")
    if parser.parse_args().show:
        rows = read()
    else:
        rows = measure()
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")
    Console().print(summary(rows))
    if not all(row.is_within_budget for row in rows):
        raise SystemExit("some arrays are outside the error budget")


if __name__ == "__main__":
    main()
