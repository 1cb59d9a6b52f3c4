"""Report of `xsake evaluate --tasks` and its JSON file."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from xsake._schema import Frozen
from xsake.errors import ArgumentError
from xsake.evaluation.record import (
    CandidateIdentity,
    Count,
    Estimate,
    ModelIdentity,
    Seconds,
    Share,
    TextFile,
)


class PairedScore(Frozen):
    """Mean over prompts, and the difference on the same prompts; intervals are over prompts."""

    dense: Estimate
    candidate: Estimate | None
    difference: Estimate | None = Field(description="candidate - dense")


class TaskScores(Frozen):
    """Scores over prompts; the answer of a prompt is given token by token (teacher forcing)."""

    samples: Count
    nll: PairedScore = Field(description="nats per token of the answer")
    exact: PairedScore = Field(
        description="share of prompts with every token of the answer the most likely one"
    )
    strings: PairedScore = Field(
        description="share of expected strings with every token the most likely one"
    )
    greedy_samples: Count
    greedy: PairedScore | None = Field(
        description="share of expected strings in the text of greedy decoding"
    )


class TaskCell(TaskScores):
    """One task at one length."""

    task: str
    context: Count = Field(description="tokens of prompt and answer")
    is_excluded: bool = Field(description="dense attention fails: not in averages")


class TaskAverage(TaskScores):
    """Mean over tasks, without the cells where dense attention fails."""

    context: Count | None = Field(description="None: all")
    tasks: tuple[str, ...] = Field(description="in at least one context")
    excluded: Count = Field(description="number of excluded cells")


class PromptScore(Frozen):
    """Scores of one prompt with one attention."""

    nll: float
    exact: bool
    strings: Share
    greedy: Share | None = None
    output: str | None = Field(default=None, description="text of greedy decoding")


class PromptResult(Frozen):
    """One prompt."""

    task: str
    context: Count
    sample: Count
    depth: Share | None = Field(description="of the needle: 0 start, 1 end of the haystack")
    answers: tuple[str, ...] = Field(description="expected strings")
    dense: PromptScore
    candidate: PromptScore | None


class TaskReport(Frozen):
    """Report of `xsake evaluate --tasks` with everything that the results depend on."""

    schema_version: Literal[1] = 1
    made_at: str = Field(description="UTC")
    model: ModelIdentity
    texts: tuple[TextFile, ...]
    code: tuple[TextFile, ...] = Field(description="source code of find_definition")
    dtype: str = Field(description="of weights and activations")
    seed: int
    samples: Count = Field(description="prompts per task and context")
    is_chat: bool = Field(description="prompts are messages of the model's chat template")
    candidate: CandidateIdentity | None
    page_budget: Share | None = Field(
        description="share of the pages that greedy decoding reads with the candidate; None: all"
    )
    min_exact: Share = Field(description="dense attention fails below this share of exact answers")
    cells: tuple[TaskCell, ...]
    averages: tuple[TaskAverage, ...] = Field(
        description="of each context, and of all if there are several"
    )
    prompts: tuple[PromptResult, ...]
    notes: tuple[str, ...] = Field(description="skipped parts and warnings")
    seconds: Seconds = Field(description="of scoring, including cached results")
    versions: dict[str, str]
    source: str = Field(description="digest of the source code that determines the results")
    commit: str | None
    dirty: bool | None
    processor: str


def read_task_report(path: Path) -> TaskReport:
    """Read and validate a report."""
    try:
        return TaskReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise ArgumentError(
            "task-report",
            "invalid task report",
            got=f"{path.name}: {str(error).splitlines()[0]}",
            expected="JSON that matches schemas/task_report.schema.json",
        ) from error
