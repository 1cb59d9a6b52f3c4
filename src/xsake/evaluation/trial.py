"""Trials: token sequences and the spans that are scored; windows of documents and far copies."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from xsake.errors import ArgumentError
from xsake.evaluation.documents import TextDocument

FIRST_EDGE = 512
PASSAGE = 512
Encode = Callable[[str], np.ndarray]


class TokenSpan(NamedTuple):
    """Predicted tokens at positions `start` to `end`, exclusive.

    The token at position 0 is not predicted, so `start` is at least 1.
    """

    start: int
    end: int

    def __str__(self) -> str:
        return f"{0 if self.start == 1 else self.start}-{self.end}"


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """Token sequence with the spans over which scores are summed.

    `label` is for progress events, `document` for intervals over documents.
    """

    label: str
    document: str
    tokens: Int[np.ndarray, " T"]
    spans: tuple[TokenSpan, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of tokens and spans."""
        total = hashlib.sha256(np.ascontiguousarray(self.tokens, "<i8").tobytes())
        total.update(repr([tuple(span) for span in self.spans]).encode())
        return total.hexdigest()


def position_spans(tokens: int) -> tuple[TokenSpan, ...]:
    """Split the predicted positions of a window into doubling spans: 1-512, 512-1024, ...

    Example:
        >>> [str(span) for span in position_spans(2000)]
        ['0-512', '512-1024', '1024-2000']
    """
    doubling = (FIRST_EDGE * 2**power for power in itertools.count())
    inner = itertools.takewhile(lambda edge: edge < tokens, doubling)
    return tuple(TokenSpan(*pair) for pair in itertools.pairwise([1, *inner, tokens]))


def check_vocabulary(tokens: Int[np.ndarray, " n"], vocabulary: int, name: str) -> None:
    """Raise if a text has token ids that the model does not have."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ArgumentError(
            "evaluation-vocabulary",
            "token ids exceed the model's vocabulary",
            got=f"token ids up to {tokens.max()} in {name}",
            expected=f"ids below {vocabulary}",
            fix="use the tokenizer of this model",
        )


class TokenizedTexts:
    """Documents that are tokenized on first use; `opening` starts every sequence, such as BOS."""

    def __init__(
        self,
        documents: Sequence[TextDocument],
        encode: Encode,
        vocabulary: int,
        opening: Sequence[int] = (),
    ):
        self.documents, self.opening = tuple(documents), np.asarray(opening, np.int32)
        self._encode, self._vocabulary = encode, vocabulary
        self._tokens: dict[str, np.ndarray] = {}

    def tokens(self, document: TextDocument) -> Int[np.ndarray, " n"]:
        """Return all tokens of a document."""
        if document.name not in self._tokens:
            tokens = np.asarray(self._encode(document.text), np.int32)
            check_vocabulary(tokens, self._vocabulary, document.name)
            self._tokens[document.name] = tokens
        return self._tokens[document.name]


@dataclasses.dataclass(frozen=True)
class WindowSet:
    """Windows of `context` tokens each; `too_short` documents were skipped."""

    context: int
    trials: tuple[Trial, ...]
    documents: tuple[TextDocument, ...]
    too_short: int


def cut_windows(
    tokenized: TokenizedTexts, context: int, *, per_document: int = 1, limit: int | None = None
) -> WindowSet:
    """Split up to `limit` documents into windows from their start, the opening included.

    Documents that are shorter than a window are skipped.
    """
    trials, used, too_short = [], [], 0
    size = context - len(tokenized.opening)
    for document in tokenized.documents:
        if len(used) == limit:
            break
        tokens = tokenized.tokens(document)
        count = min(per_document, len(tokens) // size)
        if count == 0:
            too_short += 1
            continue
        used.append(document)
        for number in range(count):
            part = tokens[number * size : (number + 1) * size]
            label = f"{context} tokens, {document.name}, window {number + 1}"
            sequence = np.concatenate([tokenized.opening, part])
            trials.append(Trial(label, document.name, sequence, position_spans(context)))
    return WindowSet(context, tuple(trials), tuple(used), too_short)


class FarCopy(NamedTuple):
    """A passage, a gap of other text and a copy of the passage; spans are the two copies.

    A model with long-range attention predicts the second copy far better than the first.
    Perplexity hardly shows this, because most tokens depend on nearby tokens. Both spans exclude
    the first token of the copy, so that they have the same tokens, each predicted from inside its
    copy.
    """

    gap: int
    sample: int
    trial: Trial


def far_copies(
    tokenized: TokenizedTexts,
    documents: Sequence[TextDocument],
    gaps: Sequence[int],
    *,
    samples: int = 2,
    passage: int = PASSAGE,
    seed: int = 0,
    max_tokens: int | None = None,
    tokens: int | None = None,
) -> tuple[list[FarCopy], list[str]]:
    """Build the far copies, determined by documents and seed; return them and notes.

    A sample has the same passage at every gap, and a shorter gap is a prefix of a longer one.
    Passages and gaps are from different documents if there are several. Sequences are at most
    `max_tokens` long, and padded to `tokens` if the attention supports only that length.
    """
    overhead = 2 * passage + len(tokenized.opening)
    limit = min((x for x in (max_tokens, tokens) if x is not None), default=None)
    valid_gaps = [gap for gap in gaps if limit is None or overhead + gap <= limit]
    notes = [
        f"far copy: skipped gap {gap}, its {overhead + gap} tokens exceed the limit of {limit}"
        for gap in gaps
        if gap not in valid_gaps
    ]
    copies: list[FarCopy] = []
    pool = [(document.name, tokenized.tokens(document)) for document in documents]
    for sample in range(samples):
        drawn = _draw_passage(pool, passage, max(valid_gaps, default=0), sample, seed)
        if drawn is None:
            return [], [*notes, f"far copy: no document has {passage} tokens"]
        label, copied, filler = drawn
        for gap in valid_gaps:
            if gap > len(filler):
                few = f"the texts have only {len(filler)} more tokens"
                notes.append(f"far copy: skipped gap {gap} in sample {sample + 1}, {few}")
                continue
            sequence = np.concatenate([tokenized.opening, copied, filler[:gap], copied])
            padded = np.pad(sequence, (0, (tokens or len(sequence)) - len(sequence)))
            first = len(tokenized.opening)
            spans = tuple(
                TokenSpan(start + 1, start + passage) for start in (first, first + passage + gap)
            )
            trial = Trial(f"far copy {sample + 1} over {gap}", label, padded, spans)
            copies.append(FarCopy(gap, sample, trial))
    return copies, notes


def _draw_passage(
    pool: list[tuple[str, np.ndarray]], passage: int, gap: int, sample: int, seed: int
) -> tuple[str, np.ndarray, np.ndarray] | None:
    """Draw a passage from one document and up to `gap` tokens from others, with their origin."""
    # One shuffle for all samples, so that they use different documents while there are enough.
    order = np.random.default_rng(seed).permutation(len(pool))
    long_enough = [index for index in order if len(pool[index][1]) >= passage]
    if not long_enough:
        return None
    rng = np.random.default_rng([seed, sample])
    chosen = int(long_enough[sample % len(long_enough)])
    name, document = pool[chosen]
    position = order.tolist().index(chosen)
    others = [pool[index][1] for index in (*order[position + 1 :], *order[:position])]
    if sum(map(len, others)) >= min(gap, len(document) - passage):
        start = int(rng.integers(len(document) - passage + 1))
        skipped = int(rng.integers(max(0, len(others[0]) - gap) + 1)) if others else 0
        filler = np.concatenate([document[:0], *others])[skipped : skipped + gap]
    else:
        # A single document: the passage from its first half, the gap from its end.
        start = int(rng.integers(max(0, len(document) - gap - passage) // 2 + 1))
        filler = document[max(start + passage, len(document) - gap) :]
    return f"{name} at {start}", document[start : start + passage], filler
