"""Material of the tasks: sentences and words of texts, functions of source code, noise."""

import dataclasses
import functools
import itertools
import math
import re
import uuid
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xsake.errors import ArgumentError
from xsake.evaluation.documents import TextDocument
from xsake.evaluation.tasks.prompt import Fill, take_units

NOISE = (
    " The road follows the river.", " Rain falls on the roof.", " A boat waits at the pier.",
    " The lamp is lit at dusk.", " Then the day is over.",
)  # fmt: skip
EXCERPT_LINES = 20
MIN_WORDS = 20  # of keys
_WORD = re.compile(r"\b[^\W\d_]{4,10}\b")
_FUNCTION = re.compile(r"^def ([A-Za-z]\w{3,39})\(.*\n(?:(?:[ \t)].*)?\n)+", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True)
class SourceFunction:
    """First lines of a function of a source file."""

    path: str
    name: str
    text: str

    @property
    def excerpt(self) -> str:
        """The function after a line with the path of its file."""
        return f"# file: {self.path}\n{self.text}\n"


@dataclasses.dataclass(frozen=True)
class TaskMaterial:
    """What prompts are made of.

    Args:
        documents: of the haystack; words are theirs, too.
        code: source files.
    """

    documents: tuple[TextDocument, ...]
    code: tuple[TextDocument, ...] = ()

    @functools.cached_property
    def sentences(self) -> tuple[str, ...]:
        """Sentences of all documents, with single spaces."""
        parts = (x for document in self.documents for x in _SENTENCE_END.split(document.text))
        return tuple(text for part in parts if (text := " ".join(part.split())))

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Words of 4 to 10 lower-case letters, in alphabetical order."""
        return tuple(sorted({
            word
            for document in self.documents
            for word in _WORD.findall(document.text)
            if word.islower()
        }))  # fmt: skip

    @functools.cached_property
    def functions(self) -> tuple[SourceFunction, ...]:
        """Functions at the top level of files whose name is defined once in all files."""
        functions: dict[str, list[SourceFunction]] = {}
        for document in self.code:
            for match in _FUNCTION.finditer(document.text):
                lines = match[0].rstrip().splitlines()[:EXCERPT_LINES]
                text = "".join(f"{line.rstrip()}\n" for line in lines)
                functions.setdefault(match[1], []).append(
                    SourceFunction(document.name, match[1], text)
                )
        return tuple(x[0] for x in functions.values() if len(x) == 1)

    def require_words(self, count: int, available: int | None = None) -> None:
        """Raise if there are fewer words; `available`: the number that a task can use."""
        available = len(self.words) if available is None else available
        if available < count:
            raise ArgumentError(
                "task-words",
                "the texts have too few different words for a task",
                got=f"{available} of 4 to 10 lower-case letters",
                expected=f"at least {count}",
                fix="pass more text, or use a smaller --context",
            )

    def draw_words(self, rng: np.random.Generator, count: int) -> list[str]:
        """Draw different words."""
        self.require_words(count)
        return [self.words[i] for i in rng.choice(len(self.words), count, replace=False)]

    def iter_keys(self, rng: np.random.Generator) -> Iterator[str]:
        """Draw different keys of two words each."""
        used: set[str] = set()
        while True:
            self.require_words(max(MIN_WORDS, math.isqrt(4 * len(used))))
            key = "-".join(self.draw_words(rng, 2))
            if key not in used:
                used.add(key)
                yield key

    def text(self, rng: np.random.Generator) -> Fill:
        """Return consecutive sentences from a random one on; the first follows the last."""
        start = int(rng.integers(len(self.sentences)))
        order = itertools.chain(self.sentences[start:], self.sentences[:start])
        return take_units(f" {sentence}" for sentence in order)

    def draw_passage(self, rng: np.random.Generator, num_words: int) -> list[str]:
        """Draw consecutive words."""
        start = int(rng.integers(len(self.sentences)))
        order = itertools.chain(self.sentences[start:], self.sentences[:start])
        words = list(itertools.islice((w for x in order for w in x.split()), num_words))
        if len(words) < num_words:
            raise ArgumentError(
                "task-passage", "the texts are too short for a passage", got=f"{len(words)} words",
                expected=f"at least {num_words}", fix="pass more text",
            )  # fmt: skip
        return words


def noise() -> Fill:
    """Return the same few sentences again and again."""
    return take_units(itertools.cycle(NOISE))


def draw_number(rng: np.random.Generator) -> str:
    """Draw a number of seven digits."""
    return str(rng.integers(10**6, 10**7))


def draw_uuid(rng: np.random.Generator) -> str:
    """Draw a UUID."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def draw_letters(rng: np.random.Generator, count: int) -> str:
    """Draw lower-case letters."""
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), count))


def draw_distinct(
    draw: Callable[[np.random.Generator], str], rng: np.random.Generator, count: int
) -> list[str]:
    """Draw different values."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[draw(rng)] = None
    return list(values)


def shuffle(rng: np.random.Generator, items: Sequence) -> list:
    """Return the items in random order."""
    return [items[index] for index in rng.permutation(len(items))]
