"""How good a model is with an attention: perplexity, divergence from dense, and far copies."""

from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Document, Texts, read_texts
from xsake.evaluation.identity import identify
from xsake.evaluation.journal import Journal
from xsake.evaluation.plot import draw
from xsake.evaluation.record import ModelIdentity, Report, read, write
from xsake.evaluation.run import Progress, Settings, Subject, evaluate
from xsake.evaluation.score import Scorer, Scores
from xsake.evaluation.table import report_view

__all__ = [
    "Candidate",
    "Document",
    "Journal",
    "ModelIdentity",
    "Progress",
    "Report",
    "Scorer",
    "Scores",
    "Settings",
    "Subject",
    "Texts",
    "draw",
    "evaluate",
    "identify",
    "read",
    "read_texts",
    "report_view",
    "write",
]
