"""Model evaluation: perplexity, KL from dense attention, and long-range copying."""

from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import TextDocument, Texts, read_texts
from xsake.evaluation.plot import draw
from xsake.evaluation.record import (
    EvaluationReport,
    ModelIdentity,
    ResultCache,
    identify,
    read_report,
    write_report,
)
from xsake.evaluation.run import EvalModel, EvaluationSettings, evaluate
from xsake.evaluation.score import Scorer, Scores
from xsake.evaluation.table import report_view

__all__ = [
    "Candidate",
    "TextDocument",
    "ResultCache",
    "ModelIdentity",
    "EvaluationReport",
    "Scorer",
    "Scores",
    "EvaluationSettings",
    "EvalModel",
    "Texts",
    "draw",
    "evaluate",
    "identify",
    "read_report",
    "read_texts",
    "report_view",
    "write_report",
]
