"""Resharding: blocks arrive at their assigned shards and return unchanged, as do gradients.

`vmap` with an axis name has the collectives of a mesh axis, on one device.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from xsake.distributed.load_balancing import EMPTY
from xsake.distributed.shard_schedule import (
    AllGatherRoute,
    AllToAllRoute,
    build_route,
    message_size,
)

AXIS, BLOCK = "context", 2


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
