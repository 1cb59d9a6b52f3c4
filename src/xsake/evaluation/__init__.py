"""Model evaluation: perplexity, KL from dense attention, far copies, tasks, audits of pages."""

from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import TextDocument, Texts, read_code, read_texts
from xsake.evaluation.page_audit import (
    PageAudit,
    PageAuditSettings,
    UniformPages,
    audit_pages,
)
from xsake.evaluation.plot import draw, draw_tasks
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
from xsake.evaluation.table import audit_view, report_view, task_view
from xsake.evaluation.tasks.record import TaskReport, read_task_report
from xsake.evaluation.tasks.registry import parse_tasks
from xsake.evaluation.tasks.run import TaskSettings, evaluate_tasks

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
    "PageAudit",
    "PageAuditSettings",
    "Texts",
    "UniformPages",
    "audit_pages",
    "audit_view",
    "draw",
    "evaluate",
    "identify",
    "read_report",
    "read_texts",
    "report_view",
    "draw_tasks",
    "evaluate_tasks",
    "parse_tasks",
    "read_code",
    "read_task_report",
    "task_view",
    "TaskReport",
    "TaskSettings",
    "write_report",
]
