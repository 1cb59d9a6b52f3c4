"""Interleaved benchmarks: one JSON row per measurement, tables and plots.

sides = [TimedSide("new", run_new), TimedSide("old", run_old)]  # each returns its seconds
times = interleave(sides, rounds=15)
ratio = pair_ratio(times["new"], times["old"])  # per round, then median and quartiles
print(ratio.describe())  # "unclear" if the spread is too large
"""

from xsake.benchmarking.rows import (
    HEADS,
    BenchmarkRow,
    Ratio,
    Shape,
    TimingStats,
    append_rows,
    model_shape,
    read_rows,
)
from xsake.benchmarking.runner import (
    Claim,
    Spread,
    TimedSide,
    Verdict,
    check_limit,
    interleave,
    pair_ratio,
    time_call,
)
from xsake.benchmarking.table import claims_table, rows_table

__all__ = [
    "HEADS",
    "BenchmarkRow",
    "Claim",
    "Ratio",
    "Shape",
    "Spread",
    "TimedSide",
    "TimingStats",
    "Verdict",
    "append_rows",
    "check_limit",
    "claims_table",
    "interleave",
    "model_shape",
    "pair_ratio",
    "read_rows",
    "rows_table",
    "time_call",
]
