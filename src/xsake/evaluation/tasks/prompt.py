"""Prompts of tasks, with an exact number of tokens."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from xsake.errors import ArgumentError
from xsake.evaluation.trial import Encode, TokenSpan, check_vocabulary
from xsake.model.chat import ChatTemplate

_MARK = "XSAKEUSERMESSAGE"  # where a chat template puts the message of the user
# What a text follows, by its first character; tokenizers do not merge across these borders.
_BEFORE = {" ": ".", "\n": "a", ",": "a"}

CountTokens = Callable[[str], int]
Fill = Callable[[int, CountTokens], list[str]]
"""Returns texts that have at least the given number of tokens together."""


class Needle(NamedTuple):
    """Text that is inserted into the haystack.

    Args:
        text: of the needle.
        depth: 0 for the start of the haystack, 1 for its end.
        has_answer: False for a distractor.
    """

    text: str
    depth: float
    has_answer: bool = True


@dataclasses.dataclass(frozen=True)
class PromptParts:
    """Parts of a prompt, in their order.

    Args:
        instruction: at the start.
        fill: makes the texts of the haystack; the start of the first ones may be cut off.
        needles: inserted between the texts of the haystack, in the order of their depths.
        question: after the haystack.
        prefix: start of the answer, which is given.
        answers: expected strings; the answer has them in this order, separated by commas.
    """

    instruction: str
    fill: Fill
    needles: tuple[Needle, ...]
    question: str
    prefix: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TaskPrompt:
    """Prompt with its answer.

    Args:
        task: name.
        sample: number of the prompt in its task and context.
        depth: of the needle; None for a task without one needle.
        tokens: prompt and answer, `context` in total.
        answer: tokens of the answer, the last ones.
        answers: expected strings.
        answer_spans: tokens of each expected string.
        needles: tokens of each needle with an answer.
    """

    task: str
    sample: int
    depth: float | None
    tokens: Int[np.ndarray, " T"]
    answer: TokenSpan
    answers: tuple[str, ...]
    answer_spans: tuple[TokenSpan, ...]
    needles: tuple[TokenSpan, ...]

    @property
    def context(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.tokens)

    @property
    def prompt(self) -> Int[np.ndarray, " n"]:
        """Tokens of the prompt."""
        return self.tokens[: self.answer.start]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of tokens and answers."""
        total = hashlib.sha256(np.ascontiguousarray(self.tokens, "<i8").tobytes())
        spans = [tuple(span) for span in (self.answer, *self.answer_spans)]
        total.update(repr((spans, self.answers)).encode())
        return total.hexdigest()


def take_units(units: Iterable[str]) -> Fill:
    """Return a `Fill` that takes as many of the given texts as it needs."""

    def fill(num_tokens: int, count: CountTokens) -> list[str]:
        chosen, total = [], 0
        for unit in units:
            if total >= num_tokens:
                break
            chosen.append(unit)
            total += count(unit)
        if total < num_tokens:
            raise ArgumentError(
                "task-text",
                "the texts are too short for a task",
                got=f"{total} tokens",
                expected=f"at least {num_tokens}",
                fix="pass more text, or use a smaller --context",
            )
        return chosen

    return fill


class PromptEncoder:
    """Builds prompts of an exact number of tokens.

    Parts are encoded one by one, so that their positions are known. Each is encoded after a
    character like the one that precedes it.

    Args:
        encode: from a text to token ids.
        vocabulary: number of token ids of the model.
        opening: token ids at the start of every prompt, without a template.
        template: makes the prompt the message of a user; None: the prompt is plain text.
    """

    def __init__(
        self,
        encode: Encode,
        vocabulary: int,
        opening: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ):
        self._encode, self._vocabulary = encode, vocabulary
        self._heads = {x: np.asarray(encode(x), np.int32) for x in {"\n", *_BEFORE.values()}}
        self._tokens: dict[str, np.ndarray] = {}
        self._head, self._tail = np.asarray(opening, np.int32), np.zeros(0, np.int32)
        if template is not None:
            text = template.render([{"role": "user", "content": _MARK}])
            parts = text.split(_MARK)
            if len(parts) != 2:
                raise ArgumentError(
                    "task-template",
                    "the chat template does not have the message once",
                    got=f"{len(parts) - 1} times",
                    expected="once",
                    fix="evaluate without a chat template",
                )
            self._head, self._tail = (np.asarray(encode(x), np.int32) for x in parts)

    def tokens(self, text: str) -> Int[np.ndarray, " n"]:
        """Return the tokens of a text inside of a prompt."""
        if text not in self._tokens:
            before = _BEFORE.get(text[0], "\n")
            head, whole = self._heads[before], np.asarray(self._encode(before + text), np.int32)
            if not np.array_equal(whole[: len(head)], head):
                raise ArgumentError(
                    "task-tokenizer",
                    "the tokenizer merges the parts of a prompt",
                    got=f"one token for the border of {before!r} and {text[:20]!r}",
                    expected="a border of tokens before a space, and at a line break",
                )
            check_vocabulary(whole, self._vocabulary, "a task")
            self._tokens[text] = whole[len(head) :]
        return self._tokens[text]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text inside of a prompt."""
        return len(self.tokens(text))

    def build(self, parts: PromptParts, context: int) -> dict | None:
        """Return fields of a `TaskPrompt`; None if an answer occurs outside of its needles."""
        answer, spans = self._answer_tokens(parts.answers)
        needles = sorted(parts.needles, key=lambda needle: needle.depth)
        ends = self._tail, self.tokens(parts.prefix), answer
        start = np.concatenate([self._head, self.tokens(parts.instruction)])
        end = np.concatenate([self.tokens(parts.question), *ends])
        fixed = len(start) + len(end) + sum(self.count(needle.text) for needle in needles)
        num_fill = context - fixed
        if num_fill < 0:
            raise ArgumentError(
                "task-context",
                "the context is too short for a task",
                got=f"{context} tokens",
                expected=f"more than {fixed}",
                fix="use a larger --context",
            )
        units = parts.fill(num_fill, self.count)
        others = [x.text for x in needles if not x.has_answer]
        texts = "".join([parts.instruction, *units, *others, parts.question, parts.prefix])
        if needles and any(expected in texts for expected in parts.answers):
            return None
        haystack, places = self._insert(units, needles, num_fill)
        tokens = np.concatenate([start, haystack, end])
        shift = context - len(answer)
        return {
            "tokens": tokens,
            "answer": TokenSpan(shift, context),
            "answers": parts.answers,
            "answer_spans": tuple(TokenSpan(shift + a, shift + b) for a, b in spans),
            "needles": tuple(TokenSpan(len(start) + a, len(start) + b) for a, b in places),
        }

    def _answer_tokens(
        self, answers: Sequence[str]
    ) -> tuple[Int[np.ndarray, " n"], list[TokenSpan]]:
        """Return the tokens of an answer, and the span of each expected string."""
        pieces, spans, position = [], [], 0
        for number, expected in enumerate(answers):
            if number:
                pieces.append(self.tokens(","))
                position += len(pieces[-1])
            pieces.append(self.tokens(f" {expected}"))
            spans.append(TokenSpan(position, position + len(pieces[-1])))
            position = spans[-1].end
        return np.concatenate(pieces), spans

    def _insert(
        self, units: list[str], needles: list[Needle], num_tokens: int
    ) -> tuple[Int[np.ndarray, " n"], list[TokenSpan]]:
        """Cut the start of the units, insert needles between them; return answers' needles too."""
        encoded = [self.tokens(unit) for unit in units]
        ends = np.cumsum([0, *map(len, encoded)])
        borders = np.unique(np.maximum(ends - (ends[-1] - num_tokens), 0))
        flat = np.concatenate([np.zeros(0, np.int32), *encoded])[ends[-1] - num_tokens :]
        pieces, spans, start, shift = [], [], 0, 0
        for needle in needles:
            border = int(borders[np.abs(borders - needle.depth * num_tokens).argmin()])
            tokens = self.tokens(needle.text)
            pieces += [flat[start:border], tokens]
            if needle.has_answer:
                spans.append(TokenSpan(border + shift, border + shift + len(tokens)))
            start, shift = border, shift + len(tokens)
        return np.concatenate([*pieces, flat[start:]]), spans
