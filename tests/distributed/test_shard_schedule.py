"""Schedules list the whole layout together; blocks arrive at their shards and return unchanged."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.distributed.load_balancing import EMPTY
from xsake.distributed.shard_schedule import (
    AllGatherRoute,
    AllToAllRoute,
    ShardSchedule,
    build_local_schedule,
    build_route,
    build_static_schedules,
    message_size,
)
from xsake.layout import BlockLayout
from xsake.masks import Causal

AXIS = "context"


def layout_of(batch=2, heads=4, blocks=10) -> BlockLayout:
    rng = np.random.default_rng(1)
    budget = np.linspace(0.2, 0.9, heads)[:, None, None]
    chosen = rng.random((batch, heads, blocks, blocks)) < budget
    return BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8, mask=Causal())


def grids(schedule: ShardSchedule, planes: int, kv_blocks: int, q_blocks: int) -> np.ndarray:
    """Blocks listed by all shards, [planes, Nq, Nk]; schedules are stacked by shard."""
    listed = np.zeros((planes, q_blocks, kv_blocks), int)
    for shard in range(schedule.assigned.shape[0]):
        starts, kv_block = (np.asarray(x[shard]) for x in schedule.items[:2])
        blocks = np.asarray(schedule.assigned[shard])
        for row in range(planes * blocks.size):
            plane, block = row // blocks.size, blocks[row % blocks.size]
            listed_kv = kv_block[starts[row] : starts[row + 1]]
            assert block != EMPTY or listed_kv.size == 0
            listed[plane, block, listed_kv] += 1
    return listed


@pytest.mark.parametrize("assignment", ["work", "zigzag"])
@pytest.mark.parametrize("shards", [3, 4])
def test_static_schedules_cover_the_layout(shards, assignment):
    layout = layout_of()
    schedules = build_static_schedules(layout, (2, 2), shards, assignment)
    assert schedules.assigned.shape == (2, 2, shards, -(-10 // shards))
    whole = layout.to_block_mask()
    for batch in range(2):
        for part in range(2):
            schedule = jax.tree.map(lambda x, i=(batch, part): x[i], schedules)
            expected = whole[batch, 2 * part : 2 * part + 2]
            np.testing.assert_array_equal(grids(schedule, 2, 10, 10), expected)
            if assignment == "work":
                loads = schedule.items.row_starts[:, -1]
                assert np.ptp(loads) <= expected.sum((0, 2)).max()


@pytest.mark.parametrize("assignment", ["work", "zigzag"])
def test_traced_schedules_cover_the_layout(assignment):
    layout, shards = layout_of(), 4
    build = lambda _: build_local_schedule(layout.traced(), shards, assignment, AXIS)
    schedule = jax.jit(jax.vmap(build, axis_name=AXIS))(jnp.arange(shards))
    expected = layout.to_block_mask().reshape(8, 10, 10)
    np.testing.assert_array_equal(grids(schedule, 8, 10, 10), expected)
    if assignment == "work":
        assert schedule.items.kv_block.shape[1] < layout.traced().capacity


def test_schedules_of_a_layout_are_cached():
    arguments = layout_of(), (1, 2), 2, "work"
    assert build_static_schedules(*arguments) is build_static_schedules(*arguments)


BLOCK = 2  # `vmap` with an axis name has the collectives of a mesh axis, on one device


@st.composite
def orders(draw):
    """Any assignment of up to 9 blocks to 3 shards, some of which may be empty."""
    blocks = draw(st.integers(1, 9))
    slots = [*range(blocks), *[EMPTY] * (9 - blocks)]
    return np.array(draw(st.permutations(slots)), np.int32).reshape(3, 3)


def tokens_of(order):
    """[shards, batch, each * block, 3], contiguous."""
    shape = (order.shape[0], 2, order.shape[1] * BLOCK, 3)
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def expected(x, order):
    whole = np.concatenate(x, axis=1)
    blocks = whole.reshape(2, -1, BLOCK, 3)
    parts = [np.where(x[None, :, None, None] == EMPTY, 0, blocks[:, x]) for x in order]
    return np.stack([x.reshape(2, -1, 3) for x in parts])


def routes(order):
    route = build_route(order, order.shape[1])  # one shape, compiled once
    return AllToAllRoute(*(jnp.asarray(x) for x in route)), AllGatherRoute(jnp.asarray(order))


@jax.jit
@functools.partial(jax.vmap, axis_name=AXIS)
def round_trip(x, route):
    scattered = route.scatter(x, AXIS)
    return scattered, route.gather_back(scattered, AXIS)


@hypothesis.given(orders())
def test_blocks_arrive_at_their_shards_and_return(order):
    x = tokens_of(order)
    is_assigned = (
        np.isin(np.arange(order.size), order).repeat(BLOCK).reshape(order.shape[0], 1, -1, 1)
    )
    for route in routes(order):
        scattered, back = round_trip(x, route)
        np.testing.assert_array_equal(scattered, expected(x, order))
        np.testing.assert_array_equal(back, np.where(is_assigned, x, 0))


def test_gradients_go_the_same_way_back():
    order = np.array([[3, EMPTY, 5], [0, 2, 7], [EMPTY, 1, 4]], np.int32)
    x, weights = tokens_of(order), tokens_of(order) ** 2
    gather_back = jax.vmap(lambda x, route: route.gather_back(x, AXIS), axis_name=AXIS)
    loss = lambda x, route: (round_trip(x, route)[0] * weights).sum()
    for route in routes(order):
        grads = jax.jit(jax.grad(loss))(x, route)
        np.testing.assert_allclose(grads, jax.jit(gather_back)(weights, route), rtol=1e-6)


def test_infinities_and_nan_stay_in_their_blocks():
    order = np.array([[3, 0, 8], [1, 2, 7], [4, 6, 5]], np.int32)
    x = np.asarray(tokens_of(order)).copy()
    x[0, 0, 0, 0], x[1, 1, 3, 2] = -np.inf, np.nan
    for route in routes(order):
        np.testing.assert_array_equal(round_trip(jnp.asarray(x), route)[1], x)


def test_message_size_is_the_maximum_over_pairs_of_shards():
    assert message_size(np.array([[0, 1], [2, 3]])) == 2
    assert message_size(np.array([[0, 3], [1, 2]])) == 1
    assert message_size(np.array([[EMPTY, 1], [0, EMPTY]])) == 1
