"""Moves blocks of tokens between the shards of a mesh axis, to those they are dealt to and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from xsake.distributed.deal import EMPTY


class Route(NamedTuple):
    """Where blocks go when that is known before the program runs: two all-to-alls of equal parcels.

    `each` blocks lie on every shard, in order; `most` is the largest number of blocks that a shard
    has for another. Numbers past the end stand for a block of zeros. Inside a shard the first axis
    is gone.
    """

    send: Any  # [shards, shards * most]: own blocks by receiver
    receive: Any  # [shards, each]: which of the arrived blocks each dealt one is
    give_back: Any  # [shards, shards * most]: dealt blocks by the shard they came from
    restore: Any  # [shards, each]: which of the returned blocks each own one is

    def to_owners(self, x: Array, axis: str) -> Array:
        """From the blocks of the sequence that lie here [B, each * block, ...] to those dealt."""
        return _moved(x, self.send, self.receive, axis)

    def to_homes(self, x: Array, axis: str) -> Array:
        """The way back; blocks that nobody was dealt come back as zeros."""
        return _moved(x, self.give_back, self.restore, axis)


class Everywhere(NamedTuple):
    """Blocks found by number in the whole sequence, when a traced program decides where they go.

    What is moved is gathered whole on every shard for a moment.
    """

    own: Any  # [each]: the blocks dealt to this shard

    def to_owners(self, x: Array, axis: str) -> Array:
        """From the blocks of the sequence that lie here [B, each * block, ...] to those dealt."""
        whole = _blocks(jax.lax.all_gather(x, axis, axis=1, tiled=True), self._all(axis))
        return _tokens(_taken(whole, jnp.where(self.own == EMPTY, whole.shape[1], self.own)))

    def to_homes(self, x: Array, axis: str) -> Array:
        """The way back; blocks that nobody was dealt come back as zeros."""
        blocks, total = _blocks(x, self.own.shape[0]), self._all(axis)
        place = jnp.where(self.own == EMPTY, total, self.own)
        whole = jnp.zeros((x.shape[0], total, *blocks.shape[2:]), x.dtype)
        whole = _tokens(whole.at[:, place].set(blocks, mode="drop"))
        return jax.lax.psum_scatter(whole, axis, scatter_dimension=1, tiled=True)

    def _all(self, axis: str) -> int:
        return self.own.shape[0] * jax.lax.axis_size(axis)


def route_of(order: Int[np.ndarray, "shards each"], most: int | None = None) -> Route:
    """The route by which every shard gets the blocks that it is dealt.

    Args:
        order: blocks of each shard, every one at most once; block `b` lies on shard `b // each`.
        most: blocks that a parcel has room for; None is as many as needed.

    Example:
        >>> route = route_of(np.array([[0, 3], [1, 2]]))
        >>> route.send.tolist(), route.receive.tolist()
        ([[0, 1], [1, 0]], [[0, 1], [0, 1]])
    """
    shards, each = order.shape
    most = largest_parcel(order) if most is None else most
    send, give_back = (np.full((shards, shards, most), each, np.int32) for _ in range(2))
    receive, restore = (np.full((shards, each), shards * most, np.int32) for _ in range(2))
    used = np.zeros((shards, shards), np.int64)
    for owner in range(shards):
        for place, block in enumerate(order[owner]):
            if block == EMPTY:
                continue
            home, own = divmod(int(block), each)
            parcel = used[home, owner]
            used[home, owner] += 1
            send[home, owner, parcel] = own
            receive[owner, place] = home * most + parcel
            give_back[owner, home, parcel] = place
            restore[home, own] = owner * most + parcel
    flat = (shards, shards * most)
    return Route(send.reshape(flat), receive, give_back.reshape(flat), restore)


def largest_parcel(order: Int[np.ndarray, "shards each"]) -> int:
    """The largest number of blocks that a shard has for another."""
    shards, each = order.shape
    owner = np.repeat(np.arange(shards), each)
    block = order.reshape(-1)
    pairs = (block // each * shards + owner)[block != EMPTY]
    return int(np.bincount(pairs, minlength=1).max())


def _moved(x: Array, send: Array, receive: Array, axis: str) -> Array:
    parcels = _taken(_blocks(x, receive.shape[0]), send)
    arrived = jax.lax.all_to_all(parcels, axis, split_axis=1, concat_axis=1, tiled=True)
    return _tokens(_taken(arrived, receive))


def _taken(blocks: Array, index: Array) -> Array:
    return jnp.take(blocks, index, axis=1, mode="fill", fill_value=0)


def _blocks(x: Array, number: int) -> Array:
    """[B, number * block, ...] -> [B, number, block, ...]."""
    return x.reshape(x.shape[0], number, x.shape[1] // number, *x.shape[2:])


def _tokens(blocks: Array) -> Array:
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])
