"""Arguments of native sparse attention: block sizes, gates, and K/V per branch."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Float, Int
from pydantic import ConfigDict, Field

from xsake._schema import Size
from xsake.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes of native sparse attention; the defaults are the paper's.

    Args:
        length: tokens per compressed block (the paper's l).
        stride: tokens between the starts of compressed blocks (d); divides length and size.
        size: tokens per selectable block (l').
        count: blocks selected per query, forced ones included (n).
        first: forced blocks at the start of the sequence.
        local: forced blocks that end with the block of the query.
        window: most recent tokens of the window branch, the query included (w).

    Example:
        >>> from xsake import nsa
        >>> nsa.Config(size=32, count=8).window
        512
    """

    length: Size = 32
    stride: Size = 16
    size: Size = 64
    count: Size = 16
    first: Annotated[int, Field(ge=0, le=2**24)] = 1
    local: Size = 2
    window: Size = 512
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        wrong = [f"{name}={sizes[name]}" for name in sizes if sizes[name] < (name != "first")]
        if wrong:
            raise ArgumentError(
                "nsa-sizes",
                "block sizes must be positive",
                got=", ".join(wrong),
                expected="1 or more; `first` may be 0",
                fix="the paper uses nsa.Config(32, 16, 64, 16, 1, 2, 512)",
            )
        if self.length % self.stride or self.size % self.stride:
            raise ArgumentError(
                "nsa-stride",
                "the stride must divide `length` and `size`",
                got=f"length={self.length}, stride={self.stride}, size={self.size}",
                expected="a stride that divides both",
                fix="block scores are sums over whole strides; see equation 9 of the paper",
            )
        if self.first + self.local > self.count:
            raise ArgumentError(
                "nsa-forced",
                "more forced blocks than selected blocks",
                got=f"first={self.first} + local={self.local}, count={self.count}",
                expected="first + local <= count",
                fix="increase `count`, or force fewer blocks",
            )


class Gates(NamedTuple):
    """Gate of each branch, [B, T, Hq]; None disables a branch."""

    compressed: Float[Array, "B Tq Hq"] | None
    selected: Float[Array, "B Tq Hq"] | None
    window: Float[Array, "B Tq Hq"] | None

    @classmethod
    def sigmoid(cls, logits: Float[Array, "B Tq Hq 3"]) -> "Gates":
        """Return independent sigmoid gates, as in the paper.

        Example:
            >>> import jax.numpy as jnp
            >>> from xsake import nsa
            >>> nsa.Gates.sigmoid(jnp.zeros((1, 5, 4, 3))).window.shape
            (1, 5, 4)
        """
        gates = jax.nn.sigmoid(logits)
        return cls(*(gates[..., i] for i in range(3)))


class KV(NamedTuple):
    """Keys or values of each branch, [B, T, Hk, D]."""

    compressed: Float[Array, "B Tk Hk D"]
    selected: Float[Array, "B Tk Hk D"]
    window: Float[Array, "B Tk Hk D"]


Compress = Callable[
    [Float[Array, "B Nc length Hk D"], Int[Array, "Bp Nc"]], Float[Array, "B Nc Hk D"]
]
"""Compresses blocks of keys (or values), given the position of the first token of each block in its
sequence."""
