"""Hands: what a context shard is dealt, its lists and the way there; before a program or in it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from xsake.distributed.deal import EMPTY, Deal, order_of, own_capacity, own_lists
from xsake.distributed.exchange import Everywhere, Route, largest_parcel, route_of
from xsake.layout import BlockLayout
from xsake.layout.ragged import Items


class Hand(NamedTuple):
    """What a shard is dealt."""

    items: Any  # Items: lists of its query blocks, rows (batch, head, own block)
    own: Any  # [each]: the query blocks, `EMPTY` where there is none
    route: Any  # Route or Everywhere: how they come here and go back


@functools.lru_cache(maxsize=32)
def hands_before(layout: BlockLayout, parts: tuple[int, int], shards: int, deal: Deal) -> Hand:
    """The hands of all shards, from a static layout; every (batch, head) part is dealt apart.

    Args:
        layout: lists of all batch elements and heads.
        parts: into how many parts the mesh splits its batch and its heads.
        shards: of the context axis.
        deal: how.

    Returns:
        NumPy arrays [batch parts, head parts, shards, ...].
    """
    items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    planes = np.arange(layout.batch * layout.heads).reshape(layout.batch, layout.heads)
    rows = np.split(planes, parts[0])
    groups = [x.reshape(-1) for row in rows for x in np.split(row, parts[1], axis=1)]
    counts = np.diff(np.asarray(layout.row_starts)).reshape(-1, layout.q_blocks)
    orders = [order_of(np, counts[group].sum(0), shards, deal) for group in groups]
    capacity = max(
        int(counts[np.ix_(group, own[own != EMPTY])].sum())
        for group, order in zip(groups, orders, strict=True)
        for own in order
    )
    most = max(largest_parcel(order) for order in orders)
    found = []
    for group, order in zip(groups, orders, strict=True):
        route = route_of(order, most)
        for shard, own in enumerate(order):
            lists = own_lists(np, items, group, layout.q_blocks, own, max(1, capacity))
            found.append(Hand(lists, own, Route(*(x[shard] for x in route))))
    stacked = lambda *x: np.stack(x).reshape(*parts, shards, *x[0].shape)
    return jax.tree.map(stacked, *found)


def hand_now(layout: BlockLayout, shards: int, deal: Deal, axis: str) -> Hand:
    """The hand of this shard, inside a program that runs on every one.

    Args:
        layout: lists of the batch elements and heads that are here, the same along the axis.
        shards: of the axis.
        deal: how.
        axis: the mesh axis of the shards.
    """
    items = Items(
        *(jnp.asarray(x) for x in (layout.row_starts, layout.kv_block, layout.is_partial))
    )
    work = (items.row_starts[1:] - items.row_starts[:-1]).reshape(-1, layout.q_blocks).sum(0)
    order = order_of(jnp, work, shards, deal)
    own = jnp.asarray(order)[jax.lax.axis_index(axis)]
    route = fixed_route(order, axis) if isinstance(order, np.ndarray) else Everywhere(own)
    planes = layout.batch * layout.heads
    grid = layout.q_blocks, layout.kv_blocks
    capacity = own_capacity(layout.capacity, planes, grid, shards, deal)
    numbers = jnp.arange(planes, dtype=jnp.int32)
    return Hand(own_lists(jnp, items, numbers, layout.q_blocks, own, capacity), own, route)


def fixed_route(order: Int[np.ndarray, "shards each"], axis: str) -> Route:
    """This shard's part of a route that is known before the program runs."""
    shard = jax.lax.axis_index(axis)
    return Route(*(jnp.asarray(x)[shard] for x in route_of(order)))
