"""The kv-major inverse of queries' block lists: tiles of queries that selected the same block."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class QueryTiles(NamedTuple):
    """Queries by selected block; tiles of one block are neighbours, its queries in their order.

    A query's index in its tile depends on earlier queries alone, so no later query can change a bit
    of its result.
    """

    query: Int[Array, "W tile"]  # the number of queries where there is none
    block: Int[Array, " W"]
    total: Int[Array, ""]  # tiles in use
    place: Int[Array, "Tq Ns"]  # of each (query, slot) in `query`, flat; W * tile if unused


def max_tiles(queries: int, slots: int, kv_blocks: int, tile: int) -> int:
    """Maximum number of tiles: every block has at most one tile that is not full."""
    return queries * slots // tile + min(kv_blocks, queries * slots)


def route_queries(
    blocks: Int[Array, "Tq Ns"], kv_blocks: int, tile: int, capacity: int
) -> QueryTiles:
    """Tiles of `tile` queries from the blocks of every query, in time linear but for one sort."""
    queries, slots = blocks.shape
    items = queries * slots
    flat = jnp.where(blocks < 0, kv_blocks, blocks).reshape(items).astype(jnp.int32)
    numbers = jnp.arange(items, dtype=jnp.int32)
    owner, item = lax.sort((flat, numbers), num_keys=1, is_stable=True)
    begins = jnp.searchsorted(owner, jnp.arange(kv_blocks + 1)).astype(jnp.int32)
    tiles = -(-(begins[1:] - begins[:-1]) // tile)
    ends = jnp.cumsum(tiles)
    first = jnp.append(ends - tiles, capacity)
    rank = numbers - begins[owner]
    place = jnp.where(owner < kv_blocks, first[owner] * tile + rank, capacity * tile)
    query = jnp.full(capacity * tile, queries, jnp.int32)
    query = query.at[place].set(item // slots, mode="drop").reshape(capacity, tile)
    block = jnp.searchsorted(ends, jnp.arange(capacity), side="right").astype(jnp.int32)
    inverse = jnp.zeros(items, jnp.int32).at[item].set(place, unique_indices=True)
    return QueryTiles(
        query, jnp.minimum(block, kv_blocks - 1), ends[-1], inverse.reshape(queries, slots)
    )
