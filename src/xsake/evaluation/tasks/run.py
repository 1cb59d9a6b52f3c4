"""Evaluation of tasks: build the prompts, score those that are not cached, build the report."""

import dataclasses
import functools
from typing import Any

from xsake._progress import ProgressFn
from xsake._provenance import source_digest
from xsake.errors import ArgumentError
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Texts, read_code
from xsake.evaluation.measure import Measurement, digest_key, forward_cost, measure
from xsake.evaluation.record import CachedResult, ResultCache
from xsake.evaluation.run import (
    SOURCES,
    EvalModel,
    check_minimums,
    describe_run,
    measured_versions,
    validate_evaluation,
)
from xsake.evaluation.tasks.material import TaskMaterial
from xsake.evaluation.tasks.prompt import PromptEncoder, TaskPrompt
from xsake.evaluation.tasks.record import PromptResult, TaskReport
from xsake.evaluation.tasks.registry import RULER, TASKS, build_prompts, check_tasks
from xsake.evaluation.tasks.score import AnswerScorer, generate_answer, match_strings
from xsake.evaluation.tasks.summary import MIN_EXACT, averages, group_cells, score_prompt
from xsake.hads import PlanAttention, PlanDecoding
from xsake.model import AttentionFn, Decoder, DenseAttention, LayoutAttention
from xsake.model.chat import ChatTemplate

TASK_SOURCES = (*SOURCES, "cache", "evaluation/tasks/score.py", "hads/sparse_decoding.py")
_MINIMUMS = {"contexts": 64, "samples": 1, "greedy": 0, "seed": 0}


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Settings of an evaluation of tasks.

    Args:
        tasks: names.
        contexts: tokens of prompt and answer; one evaluation each.
        samples: prompts per task and context.
        greedy: prompts per task and context whose answer is also generated.
        page_budget: share of the pages that decoding reads by the candidate's plan; None: all.
        seed: of the prompts and of the intervals.
    """

    tasks: tuple[str, ...] = tuple(RULER)
    contexts: tuple[int, ...] = (2048,)
    samples: int = 10
    greedy: int = 2
    page_budget: float | None = None
    seed: int = 0

    def __post_init__(self):
        check_tasks(self.tasks)
        check_minimums(self, _MINIMUMS)
        if not self.tasks or not self.contexts or len(set(self.tasks)) < len(self.tasks):
            raise ArgumentError(
                "task-settings", "invalid tasks or contexts",
                got=f"tasks={self.tasks}, contexts={self.contexts}",
                expected="at least one of each, no duplicates",
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Side:
    """One attention.

    Args:
        name: "dense" or "candidate".
        digest: part of cache keys.
        attend: attention function of prompts.
        score: scorer of answers.
        decode_attend: attention function of decoding; None: as for prompts.
        decode_digest: part of cache keys of generated text.
    """

    name: str
    digest: str
    attend: AttentionFn
    score: AnswerScorer
    decode_attend: AttentionFn | None = None
    decode_digest: str = ""


def evaluate_tasks(
    eval_model: EvalModel,
    texts: Texts,
    settings: TaskSettings,
    *,
    code: Texts | None = None,
    template: ChatTemplate | None = None,
    candidate: Candidate | None = None,
    cache: ResultCache | None = None,
    on_progress: ProgressFn = lambda _: None,
) -> TaskReport:
    """Evaluate tasks with dense and with candidate attention on the same prompts.

    Args:
        eval_model: the model.
        texts: haystacks and words of prompts.
        settings: of the evaluation.
        code: source code of `find_definition`; None: Python's standard library.
        template: makes each prompt the message of a user; None: prompts are plain text.
        candidate: attention to compare with dense attention; None: dense only.
        cache: of results, for resuming. Results of dense attention serve every candidate.
        on_progress: called after each prompt of each attention.
    """
    cache, config = ResultCache() if cache is None else cache, eval_model.model.config
    notes = validate_evaluation(eval_model, settings.contexts, candidate)
    sides = _make_sides(eval_model.model, candidate, settings.page_budget)
    if not any(TASKS[name].needs_code for name in settings.tasks):
        code = None
    elif code is None:
        code = read_code()
    opening = () if template is not None else eval_model.opening
    encoder = PromptEncoder(eval_model.encode, config.vocab_size, opening, template)
    material = TaskMaterial(texts.documents, code.documents if code is not None else ())
    prompts = build_prompts(
        settings.tasks, material, encoder, contexts=settings.contexts, samples=settings.samples,
        seed=settings.seed,
    )  # fmt: skip
    base = {
        "model": eval_model.identity.digest, "dtype": eval_model.dtype,
        "versions": measured_versions(), "source": source_digest(*TASK_SOURCES),
    }  # fmt: skip
    items: dict[tuple, Measurement] = {}
    for prompt in prompts:
        items |= _answer_items(eval_model, prompt, sides, base)
        if prompt.sample < settings.greedy:
            items |= _greedy_items(eval_model, prompt, sides, base, notes)
    entries = dict(zip(items, measure(list(items.values()), cache, on_progress), strict=True))
    results = [_prompt_result(prompt, sides, entries) for prompt in prompts]
    cells = group_cells(results, settings.seed)
    return TaskReport(
        **describe_run(eval_model, texts, base["versions"], base["source"]),
        code=() if code is None else code.files,
        seed=settings.seed,
        samples=settings.samples,
        is_chat=template is not None,
        candidate=None if candidate is None else candidate.identity,
        page_budget=settings.page_budget,
        min_exact=MIN_EXACT,
        cells=tuple(cells),
        averages=tuple(averages(cells, results, settings.seed)),
        prompts=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
        seconds=sum(entry.seconds for entry in entries.values()),
    )


def _make_sides(
    model: Decoder, candidate: Candidate | None, page_budget: float | None
) -> list[_Side]:
    decode_attend, attend = None, None if candidate is None else candidate.attend
    if page_budget is not None:
        if not isinstance(attend, PlanAttention):
            raise ArgumentError(
                "task-page-budget", "a budget of pages needs a plan", got=f"{page_budget:.0%}",
                expected="a plan as the candidate",
            )  # fmt: skip
        decode_attend = PlanDecoding(attend.plan, page_budget)
    dense = DenseAttention()
    sides = [_Side("dense", "dense", dense, AnswerScorer(model, dense))]
    if candidate is not None and attend is not None:
        score = AnswerScorer(model, attend)
        sides.append(
            _Side("candidate", candidate.digest, attend, score, decode_attend, str(page_budget))
        )
    return sides


def _answer_items(
    eval_model: EvalModel, prompt: TaskPrompt, sides: list[_Side], base: dict[str, Any]
) -> dict[tuple, Measurement]:
    """Return the measurement of the answer by each side."""
    return {
        (prompt, side.name, "answer"): Measurement(
            key=digest_key(base | {"prompt": prompt.digest, "attention": side.digest}),
            label=_label(prompt, side),
            cost=forward_cost(eval_model.model, prompt.context),
            compute=lambda score=side.score: {"sums": score(prompt)},
            describe=functools.partial(_describe_answer, prompt),
        )
        for side in sides
    }


def _greedy_items(
    eval_model: EvalModel, prompt: TaskPrompt, sides: list[_Side], base: dict[str, Any],
    notes: list[str],
) -> dict[tuple, Measurement]:  # fmt: skip
    """Return the measurement of generated text by each side that can generate."""
    model, items = eval_model.model, {}
    if eval_model.tokenizer is None or prompt.context > model.config.context:
        limit = model.config.context
        why = "without a tokenizer" if eval_model.tokenizer is None else f"above {limit} tokens"
        notes.append(f"greedy decoding: skipped {why}")
        return {}
    for side in sides:
        if isinstance(side.attend, LayoutAttention):
            notes.append("greedy decoding: skipped with a layout, which has one length")
            continue
        parts = {"prompt": prompt.digest, "attention": side.digest, "decoding": side.decode_digest}
        items[prompt, side.name, "greedy"] = Measurement(
            key=digest_key(base | parts),
            label=f"{_label(prompt, side)}, greedy",
            cost=forward_cost(model, prompt.context, prompt.context - prompt.answer.start),
            compute=functools.partial(_generate, eval_model, prompt, side),
            describe=lambda entry: f"{entry.sums['strings'][0]:.0%} of strings",
        )
    return items


def _generate(eval_model: EvalModel, prompt: TaskPrompt, side: _Side) -> dict[str, Any]:
    model, tokenizer = eval_model.model, eval_model.tokenizer
    assert tokenizer is not None, "checked before"
    text = generate_answer(model, tokenizer, prompt, side.attend, side.decode_attend)
    return {"sums": {"strings": [match_strings(text, prompt.answers)]}, "text": text}


def _label(prompt: TaskPrompt, side: _Side) -> str:
    return f"{prompt.context} tokens, {prompt.task}, sample {prompt.sample + 1}, {side.name}"


def _describe_answer(prompt: TaskPrompt, entry: CachedResult) -> str:
    score = score_prompt(prompt, entry, None)
    return f"NLL {score.nll:.3f}, {score.strings:.0%} of strings"


def _prompt_result(
    prompt: TaskPrompt, sides: list[_Side], entries: dict[tuple, CachedResult]
) -> PromptResult:
    scores = {
        side.name: score_prompt(
            prompt, entries[prompt, side.name, "answer"], entries.get((prompt, side.name, "greedy"))
        )
        for side in sides
    }
    return PromptResult(
        task=prompt.task, context=prompt.context, sample=prompt.sample, depth=prompt.depth,
        answers=prompt.answers, dense=scores["dense"], candidate=scores.get("candidate"),
    )  # fmt: skip
