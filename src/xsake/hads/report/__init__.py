"""HTML report of a plan, its figures as JSON and its plots."""

from xsake.hads.report.bounds import BoundFigures, read_bounds
from xsake.hads.report.figures import ReportData
from xsake.hads.report.ladder import TARGET_KL, RuleComparison, read_comparisons
from xsake.hads.report.page import MAX_PAGE_BYTES, page, write
from xsake.hads.report.pictures import draw

__all__ = [
    "MAX_PAGE_BYTES",
    "TARGET_KL",
    "BoundFigures",
    "RuleComparison",
    "ReportData",
    "draw",
    "page",
    "read_bounds",
    "read_comparisons",
    "write",
]
