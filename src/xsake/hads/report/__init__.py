"""The report of a plan: one page that a model's owner reads, and the figures behind it."""

from xsake.hads.report.bounds import Bounds, read_bounds
from xsake.hads.report.figures import Figures
from xsake.hads.report.ladder import TARGET_KL, Comparison, read_ladder
from xsake.hads.report.page import MOST_PAGE_BYTES, page, write
from xsake.hads.report.pictures import draw

__all__ = [
    "MOST_PAGE_BYTES",
    "TARGET_KL",
    "Bounds",
    "Comparison",
    "Figures",
    "draw",
    "page",
    "read_bounds",
    "read_ladder",
    "write",
]
