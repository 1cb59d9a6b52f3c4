"""Tasks that look something up: needles, pairs of keys and values, copies, functions."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from xsake.errors import ArgumentError
from xsake.evaluation.tasks.material import (
    SourceFunction,
    TaskMaterial,
    draw_distinct,
    draw_number,
    draw_uuid,
    noise,
    shuffle,
)
from xsake.evaluation.tasks.prompt import Needle, PromptParts, take_units

HEX_DIGITS = 8
PASSAGE_WORDS = 24  # of which the second half is the answer


def make_needles(
    material: TaskMaterial,
    rng: np.random.Generator,
    depth: float,
    *,
    haystack: str = "text",
    key: str = "words",
    value: str = "number",
    num_keys: int = 1,
    num_values: int = 1,
    num_queries: int = 1,
) -> PromptParts:
    """Needles in a haystack: sentences that give a secret value to a key.

    Args:
        material: of the prompt.
        rng: random generator.
        depth: of the needle; several needles with an answer are at random depths.
        haystack: "noise", "text", or "needles" of other keys.
        key: "words" or "uuid".
        value: "number" or "uuid".
        num_keys: keys in total; those that are not asked for are distractors.
        num_values: values of a key.
        num_queries: keys that are asked for.
    """
    keys = material.iter_keys(rng) if key == "words" else _iter_uuids(rng)
    draw = {"number": draw_number, "uuid": draw_uuid}[value]
    noun = {"number": "number", "uuid": "code"}[value]
    asked = list(itertools.islice(keys, num_queries))
    others = list(itertools.islice(keys, max(0, num_keys - num_queries)))
    values = draw_distinct(draw, rng, num_queries * num_values + len(others))
    answers, rest = values[: num_queries * num_values], values[num_queries * num_values :]
    sentence = lambda key, value: f" The secret {noun} of {key} is {value}."
    # Needles with equal depths keep their order, which is that of the answers.
    depths = [depth] if len(answers) == 1 else sorted(rng.uniform(size=len(answers)).tolist())
    needles = [Needle(sentence(*x), d) for x, d in zip(_pair(asked, answers), depths, strict=True)]
    if num_queries > 1:  # in the order of the question, not of the text
        needles = [x._replace(depth=d) for x, d in zip(needles, shuffle(rng, depths), strict=True)]
    needles += [
        Needle(sentence(*pair), float(rng.uniform()), has_answer=False)
        for pair in zip(others, rest, strict=True)
    ]
    fills = {
        "noise": noise,
        "text": lambda: material.text(rng),
        "needles": lambda: take_units(sentence(x, draw(rng)) for x in keys),
    }
    plural, verb = ("", "is") if len(answers) == 1 else ("s", "are")
    order = f", in the order of the {'text' if num_values > 1 else 'question'}" if plural else ""
    subject = f"secret {noun}{plural} of {', '.join(asked)}"
    return PromptParts(
        instruction=f"The text hides secret {noun}s. Remember them for the question at the end.\n",
        fill=fills[haystack](),
        needles=tuple(needles),
        question=f"\nQuestion: What {verb} the {subject}{order}?\n",
        prefix=f"Answer: The {subject} {verb}",
        answers=tuple(answers),
    )


def _pair(keys: list[str], values: list[str]) -> list[tuple[str, str]]:
    """Pair every key with its values."""
    repeats = len(values) // len(keys)
    return list(zip((key for key in keys for _ in range(repeats)), values, strict=True))


def _iter_uuids(rng: np.random.Generator) -> Iterator[str]:
    while True:
        yield draw_uuid(rng)


def make_key_value(
    _material: TaskMaterial, rng: np.random.Generator, depth: float
) -> PromptParts:  # fmt: skip
    """Lookup in a long list of keys and values, both hexadecimal."""
    draw: Callable[[np.random.Generator], str] = lambda rng: rng.bytes(HEX_DIGITS // 2).hex()
    key, value = draw_distinct(draw, rng, 2)
    others = ((draw(rng), draw(rng)) for _ in itertools.count())
    lines = (f"{k}: {v}\n" for k, v in others if k != key)
    return PromptParts(
        instruction="Each line has a key and its value.\n",
        fill=take_units(lines),
        needles=(Needle(f"{key}: {value}\n", depth),),
        question=f"Question: What is the value of the key {key}?\n",
        prefix=f"Answer:\n{key}:",
        answers=(value,),
    )


def make_far_copy(
    material: TaskMaterial, rng: np.random.Generator, depth: float
) -> PromptParts:  # fmt: skip
    """Copy of a passage from its middle on, with other text between the copies."""
    words = material.draw_passage(rng, PASSAGE_WORDS)
    half = PASSAGE_WORDS // 2
    first, second = " ".join(words[:half]), " ".join(words[half:])
    return PromptParts(
        instruction="A passage of the text is repeated at the end.\n",
        fill=material.text(rng),
        needles=(Needle(f" {first} {second}", depth),),
        question="\nThe passage again:\n",
        prefix=first,
        answers=(second,),
    )


def make_find_definition(
    material: TaskMaterial, rng: np.random.Generator, depth: float
) -> PromptParts:  # fmt: skip
    """Source code of many files: which file defines a function?"""
    order = iter(shuffle(rng, material.functions))
    asked = next(order, None)
    if asked is None:
        raise ArgumentError(
            "task-code", "the source code has no function for a task", got="no function",
            expected="Python files with functions at the top level", fix="pass other --code",
        )  # fmt: skip

    def others() -> Iterator[str]:
        """Yield one function of every other file."""
        used = {asked.path}
        for function in order:
            if function.path not in used and not _mentions(function, asked):
                used.add(function.path)
                yield function.excerpt

    return PromptParts(
        instruction="The code is from several files.\n\n",
        fill=take_units(others()),
        needles=(Needle(asked.excerpt, depth),),
        question=f"Question: Which file defines the function {asked.name}?\n",
        prefix=f"Answer: The function {asked.name} is defined in",
        answers=(asked.path,),
    )


def _mentions(function: SourceFunction, other: SourceFunction) -> bool:
    """Whether the excerpt has the name or the path of another function."""
    return other.name in function.excerpt or other.path in function.excerpt
