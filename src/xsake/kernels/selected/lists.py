"""The kv-major inverse of queries' block lists: tiles of queries that selected the same block."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class Tiles(NamedTuple):
    """Who selected what, by block; tiles of one block are neighbours, its queries in their order.

    A query's place in its tile depends on earlier queries alone, so that no later query can
    change a bit of what is computed for it.
    """

    query: Int[Array, "W tile"]  # the number of queries where nobody is
    block: Int[Array, " W"]
    total: Int[Array, ""]  # tiles in use
    place: Int[Array, "Tq Ns"]  # of each (query, slot) in `query`, flat; W * tile if unused


def most_tiles(queries: int, slots: int, kv_blocks: int, tile: int) -> int:
    """As many as there can be: every block has at most one tile that is not full."""
    return queries * slots // tile + min(kv_blocks, queries * slots)


def tiles_of(blocks: Int[Array, "Tq Ns"], kv_blocks: int, tile: int, room: int) -> Tiles:
    """Tiles of `tile` queries from the blocks of every query, in time linear but for one sort."""
    queries, slots = blocks.shape
    items = queries * slots
    flat = jnp.where(blocks < 0, kv_blocks, blocks).reshape(items).astype(jnp.int32)
    numbers = jnp.arange(items, dtype=jnp.int32)
    owner, item = lax.sort((flat, numbers), num_keys=1, is_stable=True)
    begins = jnp.searchsorted(owner, jnp.arange(kv_blocks + 1)).astype(jnp.int32)
    tiles = -(-(begins[1:] - begins[:-1]) // tile)
    ends = jnp.cumsum(tiles)
    first = jnp.append(ends - tiles, room)
    rank = numbers - begins[owner]
    place = jnp.where(owner < kv_blocks, first[owner] * tile + rank, room * tile)
    query = jnp.full(room * tile, queries, jnp.int32)
    query = query.at[place].set(item // slots, mode="drop").reshape(room, tile)
    block = jnp.searchsorted(ends, jnp.arange(room), side="right").astype(jnp.int32)
    inverse = jnp.zeros(items, jnp.int32).at[item].set(place, unique_indices=True)
    return Tiles(
        query, jnp.minimum(block, kv_blocks - 1), ends[-1], inverse.reshape(queries, slots)
    )
