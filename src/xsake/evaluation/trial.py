"""Trials: token sequences and the spans that are scored."""

import dataclasses
import functools
import hashlib
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

FIRST_EDGE = 512


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
    """Token sequence with the spans that are scored.

    Args:
        label: for progress events.
        document: name of its document, for intervals over documents.
        tokens: token i is at position i.
        spans: of predicted tokens; scores are summed over each.
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
    doubling = itertools.accumulate(itertools.repeat(2), lambda x, y: x * y, initial=FIRST_EDGE)
    inner = itertools.takewhile(lambda edge: edge < tokens, doubling)
    return tuple(TokenSpan(*pair) for pair in itertools.pairwise([1, *inner, tokens]))
