"""Routes of token blocks along a mesh axis, and the schedule of each shard: blocks and lists."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from xsake.distributed import load_balancing
from xsake.distributed.load_balancing import EMPTY, Assignment, assign_blocks, shard_items
from xsake.layout import BlockLayout
from xsake.layout.csr import Items


class AllToAllRoute(NamedTuple):
    """Static route by two all-to-alls with messages of equal size.

    Every shard stores `each` consecutive blocks; `m` is the maximum number of blocks of a message.
    Out-of-range indices give zero blocks. Inside a shard the first axis is removed.
    """

    send: Any  # [shards, shards * m]: stored blocks by receiver
    receive: Any  # [shards, each]: index of each assigned block among the received ones
    return_send: Any  # [shards, shards * m]: assigned blocks by their home shard
    return_receive: Any  # [shards, each]: index of each stored block among the returned ones

    def scatter(self, x: Array, axis: str) -> Array:
        """Exchange the stored blocks [B, each * block, ...] for the assigned ones."""
        return _exchange(x, self.send, self.receive, axis)

    def gather_back(self, x: Array, axis: str) -> Array:
        """Invert `scatter`; unassigned blocks become zeros."""
        return _exchange(x, self.return_send, self.return_receive, axis)


class AllGatherRoute(NamedTuple):
    """Traced route: all-gather and select; every shard temporarily holds the whole array."""

    assigned: Any  # [each]: blocks assigned to this shard

    def scatter(self, x: Array, axis: str) -> Array:
        """Exchange the stored blocks [B, each * block, ...] for the assigned ones."""
        whole = _split_blocks(
            jax.lax.all_gather(x, axis, axis=1, tiled=True), self._num_blocks(axis)
        )
        return _merge_blocks(
            _take(whole, jnp.where(self.assigned == EMPTY, whole.shape[1], self.assigned))
        )

    def gather_back(self, x: Array, axis: str) -> Array:
        """Invert `scatter`; unassigned blocks become zeros."""
        blocks, total = _split_blocks(x, self.assigned.shape[0]), self._num_blocks(axis)
        slot = jnp.where(self.assigned == EMPTY, total, self.assigned)
        whole = jnp.zeros((x.shape[0], total, *blocks.shape[2:]), x.dtype)
        whole = _merge_blocks(whole.at[:, slot].set(blocks, mode="drop"))
        return jax.lax.psum_scatter(whole, axis, scatter_dimension=1, tiled=True)

    def _num_blocks(self, axis: str) -> int:
        return self.assigned.shape[0] * jax.lax.axis_size(axis)


def build_route(
    order: Int[np.ndarray, "shards each"], message_blocks: int | None = None
) -> AllToAllRoute:
    """Build the route that scatters blocks to their assigned shards.

    Args:
        order: blocks of each shard without duplicates; block `b` is stored on shard `b // each`.
        message_blocks: size of a message; None is the minimum.

    Example:
        >>> route = build_route(np.array([[0, 3], [1, 2]]))
        >>> route.send.tolist(), route.receive.tolist()
        ([[0, 1], [1, 0]], [[0, 1], [0, 1]])
    """
    shards, each = order.shape
    message_blocks = message_size(order) if message_blocks is None else message_blocks
    send, return_send = (
        np.full((shards, shards, message_blocks), each, np.int32) for _ in range(2)
    )
    receive, return_receive = (
        np.full((shards, each), shards * message_blocks, np.int32) for _ in range(2)
    )
    used = np.zeros((shards, shards), np.int64)
    for owner in range(shards):
        for slot, block in enumerate(order[owner]):
            if block == EMPTY:
                continue
            home, stored = divmod(int(block), each)
            message = used[home, owner]
            used[home, owner] += 1
            send[home, owner, message] = stored
            receive[owner, slot] = home * message_blocks + message
            return_send[owner, home, message] = slot
            return_receive[home, stored] = owner * message_blocks + message
    flat = (shards, shards * message_blocks)
    return AllToAllRoute(send.reshape(flat), receive, return_send.reshape(flat), return_receive)


def message_size(order: Int[np.ndarray, "shards each"]) -> int:
    """Return the maximum number of blocks from one shard to another."""
    shards, each = order.shape
    owner = np.repeat(np.arange(shards), each)
    block = order.reshape(-1)
    pairs = (block // each * shards + owner)[block != EMPTY]
    return int(np.bincount(pairs, minlength=1).max())


def _exchange(x: Array, send: Array, receive: Array, axis: str) -> Array:
    messages = _take(_split_blocks(x, receive.shape[0]), send)
    arrived = jax.lax.all_to_all(messages, axis, split_axis=1, concat_axis=1, tiled=True)
    return _merge_blocks(_take(arrived, receive))


def _take(blocks: Array, index: Array) -> Array:
    return jnp.take(blocks, index, axis=1, mode="fill", fill_value=0)


def _split_blocks(x: Array, number: int) -> Array:
    """Reshape [B, number * block, ...] to [B, number, block, ...]."""
    return x.reshape(x.shape[0], number, x.shape[1] // number, *x.shape[2:])


def _merge_blocks(blocks: Array) -> Array:
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])


class ShardSchedule(NamedTuple):
    """Work of one shard."""

    items: Any  # Items: lists of the assigned query blocks, rows (batch, head, block)
    assigned: Any  # [each]: assigned query blocks, padded by `EMPTY`
    route: Any  # AllToAllRoute or AllGatherRoute


@functools.lru_cache(maxsize=32)
def build_static_schedules(
    layout: BlockLayout, parts: tuple[int, int], shards: int, assignment: Assignment
) -> ShardSchedule:
    """Build the schedules of all shards from a static layout, one per (batch, head) part.

    Returns:
        NumPy arrays [batch parts, head parts, shards, ...].
    """
    items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    planes = np.arange(layout.batch * layout.heads).reshape(layout.batch, layout.heads)
    rows = np.split(planes, parts[0])
    groups = [x.reshape(-1) for row in rows for x in np.split(row, parts[1], axis=1)]
    counts = np.diff(np.asarray(layout.row_starts)).reshape(-1, layout.q_blocks)
    orders = [assign_blocks(np, counts[group].sum(0), shards, assignment) for group in groups]
    capacity = max(
        int(counts[np.ix_(group, assigned[assigned != EMPTY])].sum())
        for group, order in zip(groups, orders, strict=True)
        for assigned in order
    )
    message_blocks = max(message_size(order) for order in orders)
    schedules = []
    for group, order in zip(groups, orders, strict=True):
        route = build_route(order, message_blocks)
        for shard, assigned in enumerate(order):
            lists = shard_items(np, items, group, layout.q_blocks, assigned, max(1, capacity))
            schedules.append(
                ShardSchedule(lists, assigned, AllToAllRoute(*(x[shard] for x in route)))
            )
    stacked = lambda *x: np.stack(x).reshape(*parts, shards, *x[0].shape)
    return jax.tree.map(stacked, *schedules)


def build_local_schedule(
    layout: BlockLayout, shards: int, assignment: Assignment, axis: str
) -> ShardSchedule:
    """Build the schedule of this shard inside shard_map; the layout is replicated along `axis`."""
    items = Items(
        *(jnp.asarray(x) for x in (layout.row_starts, layout.kv_block, layout.is_partial))
    )
    work = (items.row_starts[1:] - items.row_starts[:-1]).reshape(-1, layout.q_blocks).sum(0)
    order = assign_blocks(jnp, work, shards, assignment)
    assigned = jnp.asarray(order)[jax.lax.axis_index(axis)]
    route = shard_route(order, axis) if isinstance(order, np.ndarray) else AllGatherRoute(assigned)
    planes = layout.batch * layout.heads
    grid = layout.q_blocks, layout.kv_blocks
    capacity = load_balancing.shard_capacity(layout.capacity, planes, grid, shards, assignment)
    plane_index = jnp.arange(planes, dtype=jnp.int32)
    return ShardSchedule(
        shard_items(jnp, items, plane_index, layout.q_blocks, assigned, capacity), assigned, route
    )


def shard_route(order: Int[np.ndarray, "shards each"], axis: str) -> AllToAllRoute:
    """Return this shard's part of a static route."""
    shard = jax.lax.axis_index(axis)
    return AllToAllRoute(*(jnp.asarray(x)[shard] for x in build_route(order)))
