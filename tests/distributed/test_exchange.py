"""Moving blocks: they arrive where they are dealt, come back unchanged, and so do gradients.

`vmap` with an axis name has the collectives of a mesh axis, on one device.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from xsake.distributed.deal import EMPTY
from xsake.distributed.exchange import Everywhere, Route, largest_parcel, route_of

AXIS, BLOCK = "context", 2


@st.composite
def orders(draw):
    """Any way to deal up to 9 blocks to 3 shards, of which some may get none."""
    blocks = draw(st.integers(1, 9))
    slots = [*range(blocks), *[EMPTY] * (9 - blocks)]
    return np.array(draw(st.permutations(slots)), np.int32).reshape(3, 3)


def tokens_of(order):
    """[shards, batch, each * block, 3], as tokens lie."""
    shape = (order.shape[0], 2, order.shape[1] * BLOCK, 3)
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def expected(x, order):
    whole = np.concatenate(x, axis=1)
    blocks = whole.reshape(2, -1, BLOCK, 3)
    dealt = [np.where(own[None, :, None, None] == EMPTY, 0, blocks[:, own]) for own in order]
    return np.stack([x.reshape(2, -1, 3) for x in dealt])


def hands(order):
    route = route_of(order, most=order.shape[1])  # one shape, so that it is compiled once
    return Route(*(jnp.asarray(x) for x in route)), Everywhere(jnp.asarray(order))


@jax.jit
@functools.partial(jax.vmap, axis_name=AXIS)
def there_and_back(x, way):
    there = way.to_owners(x, AXIS)
    return there, way.to_homes(there, AXIS)


@hypothesis.given(orders())
def test_blocks_arrive_where_they_are_dealt_and_come_back(order):
    x = tokens_of(order)
    dealt = np.isin(np.arange(order.size), order).repeat(BLOCK).reshape(order.shape[0], 1, -1, 1)
    for route in hands(order):
        there, back = there_and_back(x, route)
        np.testing.assert_array_equal(there, expected(x, order))
        np.testing.assert_array_equal(back, np.where(dealt, x, 0))


def test_gradients_go_the_same_way_back():
    order = np.array([[3, EMPTY, 5], [0, 2, 7], [EMPTY, 1, 4]], np.int32)
    x, weights = tokens_of(order), tokens_of(order) ** 2
    homes = jax.jit(jax.vmap(lambda x, way: way.to_homes(x, AXIS), axis_name=AXIS))
    loss = lambda x, route: (there_and_back(x, route)[0] * weights).sum()
    for route in hands(order):
        found = jax.jit(jax.grad(loss))(x, route)
        np.testing.assert_allclose(found, homes(weights, route), rtol=1e-6)


def test_infinities_and_nan_stay_in_their_blocks():
    order = np.array([[3, 0, 8], [1, 2, 7], [4, 6, 5]], np.int32)
    x = np.asarray(tokens_of(order)).copy()
    x[0, 0, 0, 0], x[1, 1, 3, 2] = -np.inf, np.nan
    for route in hands(order):
        np.testing.assert_array_equal(there_and_back(jnp.asarray(x), route)[1], x)


def test_parcels_are_as_large_as_the_largest_needs_to_be():
    assert largest_parcel(np.array([[0, 1], [2, 3]])) == 2
    assert largest_parcel(np.array([[0, 3], [1, 2]])) == 1
    assert largest_parcel(np.array([[EMPTY, 1], [0, EMPTY]])) == 1
