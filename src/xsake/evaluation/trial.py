"""A trial: tokens that a model reads from the start, and the spans of them that are asked about."""

import dataclasses
import functools
import hashlib
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

FIRST_EDGE = 512


class Span(NamedTuple):
    """Predicted tokens at positions `start` to `end`, `end` not included.

    The token at position 0 is predicted from nothing, so `start` is at least 1.
    """

    start: int
    end: int

    def __str__(self) -> str:
        return f"{0 if self.start == 1 else self.start}-{self.end}"


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """What the model reads, and what is asked about it.

    Args:
        label: for whoever watches.
        document: the document that it counts for; intervals are over documents.
        tokens: token i is at position i.
        spans: the answers are sums over each.
    """

    label: str
    document: str
    tokens: Int[np.ndarray, " T"]
    spans: tuple[Span, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Names the question: the same tokens and spans, wherever they come from."""
        total = hashlib.sha256(np.ascontiguousarray(self.tokens, "<i8").tobytes())
        total.update(repr([tuple(span) for span in self.spans]).encode())
        return total.hexdigest()


def position_spans(tokens: int) -> tuple[Span, ...]:
    """All predicted positions of a window in spans that double: 1-512, 512-1024, 1024-2048...

    Example:
        >>> [str(span) for span in position_spans(2000)]
        ['0-512', '512-1024', '1024-2000']
    """
    doubling = itertools.accumulate(itertools.repeat(2), lambda x, y: x * y, initial=FIRST_EDGE)
    inner = itertools.takewhile(lambda edge: edge < tokens, doubling)
    return tuple(Span(*pair) for pair in itertools.pairwise([1, *inner, tokens]))
