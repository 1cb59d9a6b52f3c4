"""The tasks by name, and the prompts of an evaluation."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from xsake.errors import ArgumentError
from xsake.evaluation.tasks.aggregation import (
    make_common_words,
    make_frequent_words,
    make_variable_tracking,
)
from xsake.evaluation.tasks.material import TaskMaterial
from xsake.evaluation.tasks.prompt import PromptEncoder, PromptParts, TaskPrompt
from xsake.evaluation.tasks.retrieval import (
    make_far_copy,
    make_find_definition,
    make_key_value,
    make_needles,
)

DEPTHS = (0.5, 0.0, 1.0, 0.25, 0.75)  # of the samples, in turn
MAX_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Args:
        make: draws a prompt from material, random generator and depth.
        has_depth: whether there is one needle, at the depth.
        needs_code: whether prompts are made of source code.
    """

    make: Callable[[TaskMaterial, np.random.Generator, float], PromptParts]
    has_depth: bool = True
    needs_code: bool = False


_needles = functools.partial(functools.partial, make_needles)
RULER = {
    "niah_single_1": Task(_needles(haystack="noise")),
    "niah_single_2": Task(_needles()),
    "niah_single_3": Task(_needles(value="uuid")),
    "niah_multikey_1": Task(_needles(num_keys=4)),
    "niah_multikey_2": Task(_needles(haystack="needles")),
    "niah_multikey_3": Task(_needles(haystack="needles", key="uuid", value="uuid")),
    "niah_multivalue": Task(_needles(num_values=4), has_depth=False),
    "niah_multiquery": Task(_needles(num_queries=4), has_depth=False),
    "vt": Task(make_variable_tracking, has_depth=False),
    "cwe": Task(make_common_words, has_depth=False),
    "fwe": Task(make_frequent_words, has_depth=False),
}
TASKS = RULER | {
    "far_copy": Task(make_far_copy),
    "key_value": Task(make_key_value),
    "find_definition": Task(make_find_definition, needs_code=True),
}
GROUPS = {"ruler": tuple(RULER), "all": tuple(TASKS)}


def parse_tasks(text: str) -> tuple[str, ...]:
    """Return the tasks of comma-separated names and groups, each once.

    Example:
        >>> parse_tasks("vt,far_copy,vt"), len(parse_tasks("ruler,key_value"))
        (('vt', 'far_copy'), 12)
    """
    names = [name.strip() for name in text.split(",")]
    check_tasks([name for name in names if name not in GROUPS])
    return tuple(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


def check_tasks(names: Sequence[str]) -> None:
    """Raise if a task is unknown."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ArgumentError(
            "unknown-task", "unknown task", got=", ".join(unknown) or "an empty name",
            expected=f"{', '.join(TASKS)}; or the groups {' and '.join(GROUPS)}",
        )  # fmt: skip


def build_prompt(
    name: str, material: TaskMaterial, encoder: PromptEncoder, context: int, sample: int, seed: int
) -> TaskPrompt:
    """Build a prompt, determined by its arguments.

    Args:
        name: of the task.
        material: texts and code.
        encoder: of the model.
        context: tokens of prompt and answer.
        sample: number of the prompt, which determines the depth of its needle.
        seed: of the random parts.
    """
    task = TASKS[name]
    depth = DEPTHS[sample % len(DEPTHS)]
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), context, sample])
    for _ in range(MAX_ATTEMPTS):
        fields = encoder.build(task.make(material, rng, depth), context)
        if fields is not None:
            depth_or_none = depth if task.has_depth else None
            return TaskPrompt(task=name, sample=sample, depth=depth_or_none, **fields)
    raise ArgumentError(
        "task-answer-in-text",
        "the answer of a task occurs elsewhere in the texts",
        got=f"{name}, in each of {MAX_ATTEMPTS} prompts",
        fix="pass other texts: these repeat themselves",
    )


def build_prompts(
    names: Sequence[str],
    material: TaskMaterial,
    encoder: PromptEncoder,
    *,
    contexts: Sequence[int],
    samples: int,
    seed: int,
) -> list[TaskPrompt]:
    """Build all prompts, by task, context and sample."""
    return [
        build_prompt(name, material, encoder, context, sample, seed)
        for name in names
        for context in contexts
        for sample in range(samples)
    ]
