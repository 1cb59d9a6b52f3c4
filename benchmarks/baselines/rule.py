"""Rule protocol: from the queries and keys of a layer to a ranking of its blocks."""

import dataclasses
import enum
import math
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, require_feasible


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSample:
    """Causal self-attention of one layer on one document.

    Args:
        q: queries after rotary embedding.
        k: keys after rotary embedding.
        scale: factor on q.k.
        block: tokens of a query block and of a kv block.
        layer: number of the layer.
        seed: of random rules.
        masses: true block masses, mean over the queries of a row; for oracles and calibration.
        entropy: mean attention entropy of each head in nats; for calibration.
    """

    q: Float[Array | np.ndarray, "Tq Hq D"]
    k: Float[Array | np.ndarray, "Tk Hk D"]
    scale: float
    block: int
    layer: int
    seed: int = 0
    masses: Float[Array | np.ndarray, "Hq Nq Nk"] | None = None
    entropy: Float[Array | np.ndarray, " Hq"] | None = None

    def __post_init__(self) -> None:
        tokens, heads, _ = self.q.shape
        if len(self.k) != tokens or tokens % self.block or heads % self.k.shape[1]:
            raise ArgumentError(
                "sample-shapes",
                "invalid shapes of a layer sample",
                got=f"q {self.q.shape}, k {self.k.shape}, block {self.block}",
                expected="equal tokens, a multiple of the block; Hq a multiple of Hk",
            )

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def blocks(self) -> int:
        return len(self.q) // self.block

    def true_masses(self) -> Float[np.ndarray, "Hq Nq Nk"]:
        """Return the true masses; raise if there are none."""
        if self.masses is None:
            raise ArgumentError(
                "true-masses",
                "this rule requires true masses",
                got="masses=None",
                fix="pass masses for calibration and for oracles",
            )
        return np.asarray(self.masses)


class RuleScope(enum.Enum):
    """Blocks that compete for one budget.

    Attributes:
        ROWS: equal totals per head, equal counts per row.
        HEADS: totals per head by the rule's `shares`, equal counts per row.
        MODEL: one threshold for all blocks of all heads and layers.
    """

    ROWS = "rows"
    HEADS = "heads"
    MODEL = "model"


@dataclasses.dataclass(frozen=True, eq=False)
class Ranking:
    """Selection order of blocks.

    Args:
        priority: float32, highest first. `inf`: forced at any budget, which includes it. `-inf`:
            masked by causality.
    """

    priority: Float[np.ndarray, "Hq Nq Nk"]

    @classmethod
    def of(
        cls, priority: Float[np.ndarray, "Hq Nq Nk"], *, forced: Bool[np.ndarray, "Nq Nk"]
    ) -> "Ranking":
        """Build a ranking from finite priorities and the blocks that are forced in every head."""
        if not np.isfinite(priority).all():
            raise ArgumentError(
                "priorities",
                "non-finite priorities",
                got=f"{np.count_nonzero(~np.isfinite(priority))} of {priority.size}",
                expected="finite numbers",
            )
        masked = np.where(causal_grid(len(forced)), priority.astype(np.float32), -np.inf)
        return cls(np.where(forced, np.float32(np.inf), masked).astype(np.float32))

    @property
    def forced(self) -> Bool[np.ndarray, "Hq Nq Nk"]:
        return np.isposinf(self.priority)


@runtime_checkable
class SelectionRule(Protocol):
    """Published block selection rule.

    Attributes:
        name: key in `RULES`.
        scope: blocks that compete for one budget.
    """

    @property
    def name(self) -> str: ...

    @property
    def scope(self) -> RuleScope: ...

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return flops of selection / flops of dense causal attention; see `cost.py`."""
        ...

    def observe(self, sample: LayerSample) -> None:
        """Calibrate on one layer of a document."""

    def finish(self) -> None:
        """Finish the calibration."""

    def rank(self, sample: LayerSample) -> Ranking:
        """Rank the blocks of one layer of a new document."""
        ...


@runtime_checkable
class HeadSelectionRule(SelectionRule, Protocol):
    """A rule of scope `HEADS`."""

    def shares(self, layer: int) -> Float[np.ndarray, " Hq"]:
        """Return computed / visible blocks of each head of a layer before rescaling."""
        ...


class Uncalibrated:
    """Mixin of rules without calibration."""

    def observe(self, sample: LayerSample) -> None:
        pass

    def finish(self) -> None:
        pass


def causal_grid(blocks: int) -> Bool[np.ndarray, "Nq Nk"]:
    """Return the causally visible blocks."""
    return np.tri(blocks, dtype=bool)


def block_offsets(blocks: int) -> Float[np.ndarray, "Nq Nk"]:
    """Return the distance of each kv block from the diagonal, in blocks."""
    return np.subtract.outer(np.arange(blocks), np.arange(blocks)).astype(np.float32)


def forced_grid(blocks: int, *, num_sink: int = 1, num_local: int = 2) -> Bool[np.ndarray, "Nq Nk"]:
    """Return the first `num_sink` and the last `num_local` blocks of each row.

    Example:
        >>> forced_grid(4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 0, 1, 1]])
    """
    return ForcedBlocks(num_sink, num_local).grid(blocks)


def take_rows(
    priority: Float[np.ndarray, "*heads Nq Nk"],
    counts: Int[np.ndarray, "*heads Nq"],
    forced: ForcedBlocks,
) -> Bool[np.ndarray, "*heads Nq Nk"]:
    """Select the forced blocks of each row, then the highest priorities, exactly `counts`.

    Args:
        priority: of blocks, may be infinite, not nan; ties go to the lower block number.
        counts: of rows, from the forced to the visible blocks.
        forced: selected first.

    Example:
        >>> take_rows(np.array([[0.0, 0, 0], [1, 0, 0], [3, 2, 0]]), np.array([1, 1, 2]),
        ...           ForcedBlocks(num_sink=0, num_local=1)).astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [1, 0, 1]])
    """
    n = priority.shape[-1]
    if (counts < forced.counts(n)).any() or (counts > np.arange(1, n + 1)).any():
        raise ArgumentError(
            "row-blocks",
            "number of blocks per row out of range",
            got=f"counts from {counts.min()} to {counts.max()}, {n=}",
            expected="in each row from the forced to the visible blocks",
        )
    return row_ranks(priority, forced) < counts[..., None]


def row_ranks(
    priority: Float[np.ndarray, "*heads Nq Nk"], forced: ForcedBlocks
) -> Int[np.ndarray, "*heads Nq Nk"]:
    """Return the rank of each block in its row: forced blocks first, masked blocks last.

    Example:
        >>> row_ranks(np.array([[0.0, 0, 0], [1, 0, 0], [3, 2, 0]]), ForcedBlocks(0, 1))
        array([[0, 1, 2],
               [1, 0, 2],
               [1, 2, 0]], dtype=int32)
    """
    ranks = np.empty(priority.shape, np.int32)
    planes = (-1, *priority.shape[-2:])
    numbers = np.arange(priority.shape[-1], dtype=np.int32)[None]
    # One head at a time, which fits the CPU cache.
    for plane, out in zip(priority.reshape(planes), ranks.reshape(planes), strict=True):
        order = np.argsort(sort_keys(plane, forced), axis=-1, kind="stable")
        np.put_along_axis(out, order, numbers, axis=-1)
    return ranks


def take_pool(
    priority: Float[np.ndarray, "*heads Nq Nk"], total: int, forced: ForcedBlocks
) -> Bool[np.ndarray, "*heads Nq Nk"]:
    """Select the forced blocks of all heads, then the highest priorities, exactly `total`.

    Args:
        priority: of blocks, may be infinite, not nan; ties go to the first in memory.
        total: blocks to select from the whole array.
        forced: selected first.

    Example:
        >>> take_pool(np.array([[0.0, 9], [7, 0]]), 2, ForcedBlocks(0, 0)).astype(int)
        array([[1, 0],
               [1, 0]])
    """
    n = priority.shape[-1]
    heads = math.prod(priority.shape[:-2])
    require_feasible(total, heads, n, forced)
    rank = sort_keys(priority, forced).reshape(-1)
    if not total:
        return np.zeros(priority.shape, bool)
    last = np.partition(rank, total - 1)[total - 1]
    taken = rank < last
    ties = np.flatnonzero(rank == last)
    taken[ties[: total - np.count_nonzero(taken)]] = True
    return taken.reshape(priority.shape)


def sort_keys(
    priority: Float[np.ndarray, "*heads Nq Nk"], forced: ForcedBlocks
) -> Float[np.ndarray, "*heads Nq Nk"]:
    """Return ascending sort keys: -inf for forced blocks, inf for masked ones, else finite."""
    if np.isnan(priority).any():
        raise ArgumentError(
            "nan-priorities", "priorities contain nan", got="nan", expected="finite or infinite"
        )
    n, largest = priority.shape[-1], np.finfo(priority.dtype).max
    rank = np.clip(-priority, -largest, largest)
    rank[..., ~np.tri(n, dtype=bool)] = np.inf
    rank[..., forced.grid(n)] = -np.inf
    return rank
