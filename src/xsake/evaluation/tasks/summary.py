"""Results of prompts, cells and averages, from the sums of measurements."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from xsake.evaluation.record import CachedResult
from xsake.evaluation.summary import estimate
from xsake.evaluation.tasks.prompt import TaskPrompt
from xsake.evaluation.tasks.record import (
    PairedScore,
    PromptResult,
    PromptScore,
    TaskAverage,
    TaskCell,
    TaskReport,
)

MIN_EXACT = 0.5  # share of exact answers below which dense attention fails at a task


def score_prompt(
    prompt: TaskPrompt, answer: CachedResult, generated: CachedResult | None
) -> PromptScore:
    """Return the scores of a prompt with one attention."""
    top, sizes = answer.sums["top"], [b - a for a, b in (prompt.answer, *prompt.answer_spans)]
    is_top = [number == size for number, size in zip(top, sizes, strict=True)]
    return PromptScore(
        nll=answer.sums["nll"][0] / sizes[0],
        exact=is_top[0],
        strings=sum(is_top[1:]) / len(is_top[1:]),
        greedy=None if generated is None else generated.sums["strings"][0],
        output=None if generated is None else generated.text,
    )


def cell(results: Sequence[PromptResult], seed: int) -> TaskCell:
    """Summarize the prompts of one task and context."""
    scores = _scores(results, seed)
    return TaskCell(
        task=results[0].task, context=results[0].context,
        is_excluded=scores["exact"].dense.value < MIN_EXACT, **scores,
    )  # fmt: skip


def averages(
    cells: Sequence[TaskCell], results: Sequence[PromptResult], seed: int
) -> list[TaskAverage]:
    """Average over the cells where dense attention does not fail: by context, and of several all.

    All cells have the same number of prompts, so the mean over prompts is that over cells.
    """
    averaged = []
    contexts = tuple(dict.fromkeys(cell.context for cell in cells))
    for context in (*contexts, None) if len(contexts) > 1 else contexts:
        chosen = [cell for cell in cells if context in (cell.context, None)]
        kept = [cell for cell in chosen if not cell.is_excluded]
        places = {(cell.task, cell.context) for cell in kept}
        rows = [result for result in results if (result.task, result.context) in places]
        if rows:
            averaged.append(
                TaskAverage(
                    context=context, tasks=tuple(dict.fromkeys(cell.task for cell in kept)),
                    excluded=len(chosen) - len(kept), **_scores(rows, seed),
                )
            )  # fmt: skip
    return averaged


def group_cells(results: Sequence[PromptResult], seed: int) -> list[TaskCell]:
    """Summarize prompts that are in the order of tasks and contexts."""
    groups = itertools.groupby(results, lambda result: (result.task, result.context))
    return [cell(list(group), seed) for _, group in groups]


class DepthShares(NamedTuple):
    """Exact answers by depth of the needle and context, NaN where there are no prompts."""

    depths: tuple[float, ...]
    contexts: tuple[int, ...]
    shares: Float[np.ndarray, "depths contexts"]


def shares_by_depth(report: TaskReport) -> dict[str, DepthShares] | None:
    """Return the shares of exact answers by attention; None if no task with a depth is left.

    Cells where dense attention fails are left out.
    """
    excluded = {(cell.task, cell.context) for cell in report.cells if cell.is_excluded}
    results = [
        result
        for result in report.prompts
        if result.depth is not None and (result.task, result.context) not in excluded
    ]
    if not results:
        return None
    depths = tuple(sorted({result.depth for result in results if result.depth is not None}))
    contexts = tuple(sorted({cell.context for cell in report.cells}))
    counts, sums = np.zeros((len(depths), len(contexts))), {}
    for result in results:
        assert result.depth is not None, "chosen above"
        place = depths.index(result.depth), contexts.index(result.context)
        counts[place] += 1
        for name in ("dense", "candidate"):
            score: PromptScore | None = getattr(result, name)
            if score is not None:
                sums.setdefault(name, np.zeros_like(counts))[place] += score.exact
    shares = np.where(counts > 0, 1.0, np.nan) / np.maximum(counts, 1)
    return {name: DepthShares(depths, contexts, total * shares) for name, total in sums.items()}


def _scores(results: Sequence[PromptResult], seed: int) -> dict:
    """Return the fields of `TaskScores`."""
    generated = [result for result in results if result.dense.greedy is not None]
    return {
        "samples": len(results),
        **{name: _paired(results, name, seed) for name in ("nll", "exact", "strings")},
        "greedy_samples": len(generated),
        "greedy": _paired(generated, "greedy", seed) if generated else None,
    }


def _paired(results: Sequence[PromptResult], name: str, seed: int) -> PairedScore:
    sides = [[x.dense for x in results], [x.candidate for x in results if x.candidate is not None]]
    # A candidate that cannot generate has no score.
    values = [[getattr(score, name) for score in side] for side in sides]
    values = [side for side in values if side and None not in side]
    sums = np.stack([np.ones(len(results)), *np.asarray(values, np.float64)], axis=1)
    mean = lambda i: estimate(lambda x: x[..., i] / x[..., 0], sums, seed)
    if len(values) == 1:
        return PairedScore(dense=mean(1), candidate=None, difference=None)
    difference = estimate(lambda x: (x[..., 2] - x[..., 1]) / x[..., 0], sums, seed)
    return PairedScore(dense=mean(1), candidate=mean(2), difference=difference)
