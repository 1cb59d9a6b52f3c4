"""Timing that can be trusted: interleaved runs, one JSON row per measurement, tables and plots.

sides = [Side("new", run_new), Side("old", run_old)]     # each returns its own seconds
times = interleave(sides, rounds=15)
ratio = pair_ratio(times["new"], times["old"])            # per round, then median and quartiles
print(ratio.describe())                                   # says so when the spread hides the ratio
"""

from xsake.bench.claims import Claim, Verdict, judge
from xsake.bench.rows import BenchmarkRow, Ratio, Shape, append_rows, read_rows
from xsake.bench.runner import Side, Spread, interleave, pair_ratio, time_call
from xsake.bench.shapes import HEADS, shape_of
from xsake.bench.table import claims_table, rows_table

__all__ = [
    "HEADS",
    "BenchmarkRow",
    "Claim",
    "Ratio",
    "Shape",
    "Side",
    "Spread",
    "Verdict",
    "append_rows",
    "claims_table",
    "interleave",
    "judge",
    "pair_ratio",
    "read_rows",
    "rows_table",
    "shape_of",
    "time_call",
]
