"""Tasks over the whole context: a chain of variables, common words, frequent words."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from xsake.errors import ArgumentError
from xsake.evaluation.tasks.material import (
    TaskMaterial,
    draw_distinct,
    draw_letters,
    draw_number,
    noise,
    shuffle,
)
from xsake.evaluation.tasks.prompt import CountTokens, Fill, Needle, PromptParts, take_units

NAME_LETTERS, CODED_LETTERS = 5, 6
HOPS = 4
NUM_COMMON, COMMON_TIMES, MIN_COMMON_TIMES, COMMON_RATIO = 10, 30, 4, 10
NUM_FREQUENT, ZETA_ALPHA = 3, 2.0
MIN_GUESSES = 3  # of the number of words that fit


def make_variable_tracking(
    _material: TaskMaterial, rng: np.random.Generator, _depth: float
) -> PromptParts:
    """Chain of assignments: which variables have a value?"""
    draw_name = lambda rng: draw_letters(rng, NAME_LETTERS).upper()
    value, other = draw_distinct(draw_number, rng, 2)
    names = draw_distinct(draw_name, rng, HOPS + 3)
    chain, (first, second) = names[: HOPS + 1], names[HOPS + 1 :]
    sources = [value, *(f"VAR {name}" for name in chain[:-1])]
    depths = sorted(rng.uniform(size=len(chain)).tolist())
    return PromptParts(
        instruction="Track the variables that are assigned in the text.\n"
        f"Example: VAR {first} = {other}. VAR {second} = VAR {first}. "
        f"The variables with the value {other} are {first}, {second}\n",
        fill=noise(),
        needles=tuple(
            Needle(f" VAR {name} = {source}.", depth)
            for name, source, depth in zip(chain, sources, depths, strict=True)
        ),
        question=f"\nQuestion: Which variables have the value {value}, in the order of the text?\n",
        prefix=f"Answer: The variables with the value {value} are",
        answers=tuple(chain),
    )


def make_common_words(
    material: TaskMaterial, rng: np.random.Generator, _depth: float
) -> PromptParts:
    """Numbered list of words: which are the most common ones?

    Common words occur 30 times each, others 3 times; both less often in a short context.
    """
    pool = material.draw_words(rng, max(NUM_COMMON + 2, len(material.words)))
    common: list[str] = []
    for word in pool:
        if len(common) < NUM_COMMON and not any(word in x or x in word for x in common):
            common.append(word)
    others = [word for word in pool if not any(word in x or x in word for x in common)]
    material.require_words(NUM_COMMON + 2, len(common) + len(others))
    first, second, *others = others

    def draw_list(num_words: int) -> list[str]:
        times = min(COMMON_TIMES, num_words // (NUM_COMMON + 4))
        each = max(1, times // COMMON_RATIO)
        num_rest = num_words - NUM_COMMON * times
        if times < MIN_COMMON_TIMES:
            raise _list_error(num_words, MIN_COMMON_TIMES * (NUM_COMMON + 4))
        material.require_words(-(-num_rest // each), len(others))
        rest = [word for word in others for _ in range(each)][:num_rest]
        words = shuffle(rng, [word for word in common for _ in range(times)] + rest)
        # All common words are equally common, so they can be renamed by first occurrence.
        firsts = dict.fromkeys(word for word in words if word in common)
        names = dict(zip(firsts, common, strict=True))
        return [names.get(word, word) for word in words]

    return PromptParts(
        instruction="Count how often each word is in the list.\n"
        f"Example: 1. {first} 2. {second} 3. {first}. The most common word is {first}\nList:\n",
        fill=_fill_list(draw_list, reversed(others), is_numbered=True),
        needles=(),
        question=f"\nQuestion: Which {NUM_COMMON} words are the most common ones in the list, in "
        "the order in which they appear first?\n",
        prefix=f"Answer: The {NUM_COMMON} most common words are",
        answers=tuple(common),
    )


def make_frequent_words(
    _material: TaskMaterial, rng: np.random.Generator, _depth: float
) -> PromptParts:
    """Made-up words with frequencies of a zeta distribution: which are the most frequent ones?"""
    coded: list[str] = []
    extra = (draw_letters(rng, CODED_LETTERS) for _ in itertools.count())

    def draw_list(num_words: int) -> list[str]:
        shares = np.arange(1, num_words + 1) ** -ZETA_ALPHA
        counts = np.rint(num_words * shares / shares.sum()).astype(int)
        if np.unique(counts[: NUM_FREQUENT + 1]).size <= NUM_FREQUENT:
            raise _list_error(num_words, 40)
        rare = itertools.islice(extra, int((counts > 0).sum()) - NUM_FREQUENT)
        return shuffle(rng, np.repeat([*coded, *rare], counts[counts > 0]).tolist())

    coded += draw_distinct(lambda rng: draw_letters(rng, CODED_LETTERS), rng, NUM_FREQUENT)
    return PromptParts(
        instruction="Count how often each coded word is in the text.\n",
        fill=_fill_list(draw_list, extra),
        needles=(),
        question=f"\nQuestion: Which {NUM_FREQUENT} coded words are the most frequent ones in the "
        "text, the most frequent one first?\n",
        prefix=f"Answer: The {NUM_FREQUENT} most frequent words are",
        answers=tuple(coded),
    )


def _fill_list(
    draw_list: Callable[[int], list[str]], extra: Iterator[str], *, is_numbered: bool = False
) -> Fill:
    """Return a `Fill` with as many words as fit, after extra ones of which a part is cut off.

    Args:
        draw_list: draws a list of the given number of words.
        extra: words that are in no list.
        is_numbered: whether every word of the list has its number before it.
    """

    def write(words: list[str]) -> list[str]:
        texts = [f" {word}" for word in words]
        if not is_numbered:
            return texts
        return [x for i, text in enumerate(texts, start=1) for x in (f" {i}.", text)]

    def fill(num_tokens: int, count: CountTokens) -> list[str]:
        guess = num_tokens // 6
        for attempt in itertools.count():
            units = write(draw_list(guess))
            used = sum(map(count, units))
            if attempt >= MIN_GUESSES and used <= num_tokens:
                break
            scaled = guess * num_tokens // used
            guess = scaled if attempt < MIN_GUESSES else min(scaled, guess - 1)
        return take_units(f" {word}" for word in extra)(num_tokens - used, count) + units

    return fill


def _list_error(num_words: int, minimum: int) -> ArgumentError:
    return ArgumentError(
        "task-list",
        "the context is too short for a task with a list of words",
        got=f"{num_words} words",
        expected=f"at least {minimum}",
        fix="use a larger --context",
    )
