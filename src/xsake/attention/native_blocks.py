"""What native sparse attention is told: sizes of blocks, gates, and keys or values by branch."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The sizes of native sparse attention; the defaults are the paper's.

    Args:
        length: tokens that a summary is made of (the paper's l).
        stride: tokens between the beginnings of two summaries (d); it divides length and size.
        size: tokens of a block that may be selected (l').
        count: blocks that a query selects, the forced ones included (n).
        first: blocks at the start of the sequence that every query selects.
        local: blocks that end with the query's own one and that it always selects.
        window: most recent tokens that a query sees, itself included (w).

    Example:
        >>> import xsake
        >>> xsake.Blocks(size=32, count=8).window
        512
    """

    length: int = 32
    stride: int = 16
    size: int = 64
    count: int = 16
    first: int = 1
    local: int = 2
    window: int = 512

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        wrong = [f"{name}={sizes[name]}" for name in sizes if sizes[name] < (name != "first")]
        if wrong:
            raise ArgumentError(
                "sizes of blocks must be positive",
                got=", ".join(wrong),
                expected="1 or more; `first` may be 0",
                fix="the paper has Blocks(32, 16, 64, 16, 1, 2, 512)",
            )
        if self.length % self.stride or self.size % self.stride:
            raise ArgumentError(
                "the stride must divide the length of summaries and the size of blocks",
                got=f"length={self.length}, stride={self.stride}, size={self.size}",
                expected="a stride that divides both",
                fix="scores of blocks are sums over whole strides; see equation 9 of the paper",
            )
        if self.first + self.local > self.count:
            raise ArgumentError(
                "there are more forced blocks than blocks to select",
                got=f"first={self.first} + local={self.local}, count={self.count}",
                expected="a count that holds the forced blocks",
                fix="raise `count`, or force fewer",
            )


class Gates(NamedTuple):
    """How much of each branch an output takes, [B, T, Hq] each; None leaves a branch out."""

    compressed: Float[Array, "B Tq Hq"] | None
    selected: Float[Array, "B Tq Hq"] | None
    window: Float[Array, "B Tq Hq"] | None

    @classmethod
    def sigmoid(cls, logits: Float[Array, "B Tq Hq 3"]) -> "Gates":
        """Independent gates between 0 and 1, as the paper has them.

        Example:
            >>> import jax.numpy as jnp, xsake
            >>> xsake.Gates.sigmoid(jnp.zeros((1, 5, 4, 3))).window.shape
            (1, 5, 4)
        """
        gates = jax.nn.sigmoid(logits)
        return cls(*(gates[..., i] for i in range(3)))


class Branches(NamedTuple):
    """Keys or values of the three branches, [B, T, Hk, D] each."""

    compressed: Any
    selected: Any
    window: Any


Compress = Callable[
    [Float[Array, "B Nc length Hk D"], Int[Array, "Bp Nc"]], Float[Array, "B Nc Hk D"]
]
"""From runs of keys (or values), and the position of each run's first token in its sequence, to
one summary each."""


def branches(x) -> Branches:
    """One array for all branches, or one for each."""
    return x if isinstance(x, Branches) else Branches(x, x, x)
