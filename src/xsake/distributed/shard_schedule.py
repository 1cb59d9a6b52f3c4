"""Per-shard schedules of context parallelism: assigned query blocks, their CSR lists, routing."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from xsake.distributed.load_balancing import (
    EMPTY,
    Assignment,
    assign_blocks,
    shard_capacity,
    shard_items,
)
from xsake.distributed.resharding import AllGatherRoute, AllToAllRoute, build_route, message_size
from xsake.layout import BlockLayout
from xsake.layout.csr import Items


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
    capacity = shard_capacity(layout.capacity, planes, grid, shards, assignment)
    plane_index = jnp.arange(planes, dtype=jnp.int32)
    return ShardSchedule(
        shard_items(jnp, items, plane_index, layout.q_blocks, assigned, capacity), assigned, route
    )


def shard_route(order: Int[np.ndarray, "shards each"], axis: str) -> AllToAllRoute:
    """Return this shard's part of a static route."""
    shard = jax.lax.axis_index(axis)
    return AllToAllRoute(*(jnp.asarray(x)[shard] for x in build_route(order)))
