"""Interleaved benchmarks: one JSON row per measurement, tables and plots.

sides = [TimedSide("new", run_new), TimedSide("old", run_old)]  # each returns its seconds
times = interleave(sides, rounds=15)
ratio = pair_ratio(times["new"], times["old"])  # per round, then median and quartiles
print(ratio.describe())  # "unclear" if the spread is too large
"""

from xsake.bench.claims import Claim, Verdict, check_limit
from xsake.bench.rows import BenchmarkRow, Ratio, Shape, append_rows, read_rows
from xsake.bench.runner import Spread, TimedSide, interleave, pair_ratio, time_call
from xsake.bench.shapes import HEADS, model_shape
from xsake.bench.table import claims_table, rows_table

__all__ = [
    "HEADS",
    "BenchmarkRow",
    "Claim",
    "Ratio",
    "Shape",
    "TimedSide",
    "Spread",
    "Verdict",
    "append_rows",
    "claims_table",
    "interleave",
    "check_limit",
    "pair_ratio",
    "read_rows",
    "rows_table",
    "model_shape",
    "time_call",
]
