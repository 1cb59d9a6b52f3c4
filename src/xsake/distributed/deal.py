"""Deals query blocks to context shards: as many blocks to each, and nearly the same work.

Token shards of a causal or sparse call have unequal work, so a shard does not compute the queries
that it holds but those that it is dealt, which visit it for the time of the call.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from xsake.distributed.packing import dealt, equal_parts
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.layout.ragged import Items, gather_rows, row_of_item

Deal = Literal["work", "stripes"]
"""How query blocks are dealt: by the work they have, or to and fro whatever they have."""

EMPTY = -1
"""Stands where a shard is dealt no block, because blocks do not divide evenly."""


def stripe_of(xp, block: Any, shards: int) -> Any:
    """The shard that a block goes to when blocks are dealt to and fro, one to each in a round."""
    place = block % shards
    return xp.where(block // shards % 2 == 1, shards - 1 - place, place)


def block_of_stripe(xp, shard: Any, round_: Any, shards: int) -> Any:
    """The block that a shard is dealt in a round: the inverse of `stripe_of`."""
    return round_ * shards + xp.where(round_ % 2 == 1, shards - 1 - shard, shard)


def stripes(blocks: int, shards: int) -> Int[np.ndarray, "shards each"]:
    """Blocks dealt to and fro; equal work if work grows evenly along the sequence.

    Example:
        >>> stripes(7, 2).tolist()
        [[0, 3, 4, -1], [1, 2, 5, 6]]
    """
    rounds = np.arange(-(-blocks // shards))[None, :]
    order = block_of_stripe(np, np.arange(shards)[:, None], rounds, shards)
    return np.where(order < blocks, order, EMPTY).astype(np.int32)


def by_work(work: Int[np.ndarray, " Nq"], shards: int) -> Int[np.ndarray, "shards each"]:
    """Blocks dealt by the work they have.

    Example:
        >>> by_work(np.array([1, 2, 3, 4, 5, 6]), 2).tolist()
        [[1, 2, 5], [0, 3, 4]]
    """
    padded = np.pad(work, (0, -work.size % shards))
    order = equal_parts(padded, shards)
    return np.where(order < work.size, order, EMPTY).astype(np.int32)


def by_traced_work(work: Int[Array, " Nq"], shards: int) -> Int[Array, "shards each"]:
    """The same inside a traced program, a little less even; see `packing.dealt`."""
    order = dealt(jnp.pad(work, (0, -work.shape[0] % shards)), shards)
    return jnp.where(order < work.shape[0], order, EMPTY).astype(jnp.int32)


def order_of(xp, work: Any, shards: int, deal: Deal) -> Any:
    """Who computes which query blocks, [shards, each]; `EMPTY` where a shard gets none.

    Args:
        xp: `numpy` if the work is known now, else `jax.numpy`.
        work: listed blocks of each query block.
        shards: how many.
        deal: how.
    """
    if deal == "stripes":
        return stripes(work.shape[0], shards)
    return by_work(work, shards) if xp is np else by_traced_work(work, shards)


def own_lists(xp, items: Items, planes: Any, q_blocks: int, own: Any, capacity: int) -> Items:
    """The lists of one shard.

    Args:
        xp: `numpy` or `jax.numpy`.
        items: lists of all planes (batch, head) and query blocks.
        planes: numbers of the planes that the shard computes.
        q_blocks: query blocks of a plane.
        own: query blocks that the shard computes, [each].
        capacity: room for the listed blocks.
    """
    rows = items.row_starts.shape[0] - 1
    starts = xp.concatenate([items.row_starts, items.row_starts[-1:]])  # ends with an empty row
    index = xp.where(own[None, :] == EMPTY, rows, planes[:, None] * q_blocks + own[None, :])
    return gather_rows(xp, items._replace(row_starts=starts), index.reshape(-1), capacity)


def own_capacity(capacity: int, planes: int, grid: tuple[int, int], shards: int, deal: Deal) -> int:
    """Room that the lists of any shard fit, if all of them have `capacity`.

    Blocks dealt by work differ by less than the heaviest one, so a shard has at most the mean and
    one such block; blocks dealt to and fro may all have their work in one shard.

    Args:
        capacity: of the lists of all query blocks.
        planes: (batch, head) planes of the lists.
        grid: query and kv blocks.
        shards: of the context axis.
        deal: how query blocks are dealt.
    """
    q_blocks, kv_blocks = grid
    widest = planes * kv_blocks
    room = min(capacity, -(-q_blocks // shards) * widest)
    return max(1, min(room, -(-capacity // shards) + widest) if deal == "work" else room)


@dataclasses.dataclass(frozen=True, eq=False)
class ContextWork:
    """Listed blocks by shard and chunk of keys: as tokens lie, and as queries are dealt.

    Args:
        before: [shards, chunks], each shard with its own tokens, keys in equal runs.
        after: the same with query blocks dealt, and keys dealt to and fro.
    """

    before: Int[np.ndarray, "shards shards"]
    after: Int[np.ndarray, "shards shards"]

    @property
    def excess_before(self) -> float:
        """Busiest / mean shard with its own tokens: how much longer all wait than they must."""
        return _busiest(self.before)

    @property
    def excess_after(self) -> float:
        """Busiest / mean shard with query blocks dealt."""
        return _busiest(self.after)

    @property
    def ring_excess_before(self) -> float:
        """The same for a ring, whose every step waits for the shard that is busiest in it."""
        return _busiest_by_step(self.before)

    @property
    def ring_excess_after(self) -> float:
        """The same for a ring with queries and keys dealt."""
        return _busiest_by_step(self.after)

    def __str__(self) -> str:
        return (
            f"busiest / mean of {self.before.shape[0]} shards: {self.excess_before:.3f} as tokens"
            f" lie, {self.excess_after:.3f} dealt; in a ring {self.ring_excess_before:.3f} and"
            f" {self.ring_excess_after:.3f}"
        )


def context_work(layout: BlockLayout, shards: int, deal: Deal = "work") -> ContextWork:
    """How many blocks every shard would compute, with and without dealing.

    Args:
        layout: a static one, or a traced one outside jit: all heads and batch elements of a shard.
        shards: of the context axis.
        deal: how query blocks are dealt.

    Example:
        >>> from xsake.masks import Causal
        >>> print(context_work(BlockLayout.from_mask(Causal(), q_tokens=8192), 4))
        busiest / mean of 4 shards: 1.738 as tokens lie, 1.000 dealt; in a ring 1.738 and 1.000
    """
    starts, kv_block = np.asarray(layout.row_starts), np.asarray(layout.kv_block)
    row = row_of_item(np, starts, kv_block.size)[: starts[-1]]
    q_block, kv_block = row % layout.q_blocks, kv_block[: row.size]
    each_q, each_kv = (-(-n // shards) for n in (layout.q_blocks, layout.kv_blocks))
    owner = np.empty(layout.q_blocks, np.int64)
    work = np.bincount(q_block, minlength=layout.q_blocks)
    for shard, own in enumerate(order_of(np, work, shards, deal)):
        owner[own[own != EMPTY]] = shard

    def counted(shard, chunk):
        table = np.zeros((shards, shards), np.int64)
        np.add.at(table, (shard, chunk), 1)
        return table

    return ContextWork(
        before=counted(q_block // each_q, kv_block // each_kv),
        after=counted(owner[q_block], stripe_of(np, kv_block, shards)),
    )


def _busiest(work: np.ndarray) -> float:
    total = int(work.sum())
    return float(work.sum(1).max() * work.shape[0] / total) if total else 1.0


def _busiest_by_step(work: np.ndarray) -> float:
    """Shard s meets chunk s - t in step t, and a step takes as long as its busiest shard."""
    shards, total = work.shape[0], int(work.sum())
    shard = np.arange(shards)
    steps = [work[shard, (shard - step) % shards].max() for step in range(shards)]
    return float(sum(steps) * shards / total) if total else 1.0


def require_blocks(q_blocks: int, shards: int) -> None:
    """Refuse sequences that leave shards without a single query block."""
    if q_blocks < shards:
        raise ArgumentError(
            "the sequence has fewer query blocks than the context axis has shards",
            got=f"{q_blocks} query blocks, {shards} shards",
            expected=f"at least {shards} query blocks",
            fix="use smaller blocks, or fewer context shards for sequences this short",
        )
