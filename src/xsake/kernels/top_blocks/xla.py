"""Scores of blocks in plain XLA loops: a chunk of queries against the tiles of keys it sees.

A chunk keeps one score per block, so memory is linear in the number of tokens. Tiles of keys after
the last query of a chunk, and before the first sequence of it, are not read.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from xsake.kernels.block_selection import select_blocks
from xsake.kernels.blocking import pad_axis
from xsake.kernels.sharding import axes_of, vary
from xsake.kernels.top_blocks.types import (
    ScoredKeys,
    TopBlocksConfig,
    TopBlocksInputs,
    finite_scores,
    pool_keys,
)


class TopBlocksTuning(NamedTuple):
    """Tuning of a platform; it changes no result beyond rounding."""

    queries: int  # of a chunk
    scores: int  # of a tile, over the index heads of one sequence


CPU = TopBlocksTuning(queries=128, scores=2**18)
ACCELERATOR = TopBlocksTuning(queries=512, scores=2**24)


class QueryChunk(NamedTuple):
    """Queries of one step."""

    q: Float[Array, "B Hg rows D"]  # rows: queries times index heads of a group
    weights: Float[Array, "B Hg rows"] | None
    position: Int[Array, "B chunk"]  # -1: sees nothing
    start: Int[Array, "B chunk"]


def forward(
    inputs: TopBlocksInputs, config: TopBlocksConfig, platform: str
) -> Int[Array, "B Tq Hg Ns"]:
    """See `top_blocks`."""
    tuning = CPU if platform == "cpu" else ACCELERATOR
    batch, queries, heads, dim = inputs.q.shape
    groups, selection = config.groups, config.selection
    chunk = min(tuning.queries, queries)
    keys = pool_keys(inputs, config)
    per_block = selection.block // keys.tokens
    blocks = max(1, tuning.scores // (chunk * heads * per_block))  # of a tile
    tiles = -(-selection.number // min(blocks, selection.number))
    blocks = -(-selection.number // tiles)
    keys = keys._replace(k=pad_axis(keys.k, 1, tiles * blocks * per_block, 0))

    def by_chunk(x: Array, fill: int) -> Array:
        """[B, Tq, ...] as [chunks, B, chunk, ...]."""
        x = pad_axis(x, 1, -(-queries // chunk) * chunk, fill)
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    def by_group(x: Array) -> Array:
        """[chunks, B, chunk, Hi, ...] as [chunks, B, Hg, rows, ...]."""
        x = x.reshape(*x.shape[:3], groups, heads // groups, *x.shape[4:])
        x = jnp.moveaxis(x, 3, 2)
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])

    position, start = inputs.bounds
    chunks = QueryChunk(
        by_group(by_chunk(inputs.q.astype(inputs.dtype), 0)),
        None if inputs.weights is None else by_group(by_chunk(inputs.weights, 0)),
        by_chunk(position, -1),
        by_chunk(start, 0),
    )
    score = functools.partial(_score_chunk, keys=keys, blocks=blocks, config=config)

    def one(chunk: QueryChunk) -> Int[Array, "B chunk Hg Ns"]:
        scores = score(chunk)[..., : selection.number]
        position, start = (
            jnp.broadcast_to(x[:, None], scores.shape[:3]) for x in (chunk.position, chunk.start)
        )
        return jnp.moveaxis(select_blocks(scores, position, start, selection), 1, 2)

    lists = jnp.moveaxis(lax.map(one, chunks), 0, 1)
    return lists.reshape(batch, -1, *lists.shape[3:])[:, :queries]


def _score_chunk(
    chunk: QueryChunk, keys: ScoredKeys, blocks: int, config: TopBlocksConfig
) -> Float[Array, "B Hg chunk Nk"]:
    """Scores of all blocks, -inf for those that a query does not see."""
    batch, groups, rows, _ = chunk.q.shape
    queries = chunk.position.shape[1]
    width = blocks * (config.selection.block // keys.tokens)  # keys of a tile

    def add_tile(tile: Array, scores: Array) -> Array:
        part = keys._replace(k=lax.dynamic_slice_in_dim(keys.k, tile * width, width, 1))
        k = jnp.broadcast_to(part.k, (batch, width, groups, part.k.shape[-1]))
        s = jnp.einsum("bgrd,bsgd->bgrs", chunk.q, k, precision="highest")
        s = jnp.maximum(s, 0) if config.has_relu else s
        s = s if chunk.weights is None else s * chunk.weights[..., None].astype(s.dtype)
        s = s.reshape(batch, groups, queries, rows // queries, width).sum(3)
        seen = part.visible(tile * width, chunk.position, chunk.start)
        s = jnp.where(seen[:, None], finite_scores(s), -jnp.inf)
        s = s.reshape(*s.shape[:3], blocks, -1).max(-1)
        return lax.dynamic_update_slice_in_dim(scores, s, tile * blocks, 3)

    scores = jnp.full((batch, groups, queries, keys.k.shape[1] // width * blocks), -jnp.inf)
    scores = vary(scores.astype(chunk.q.dtype), axes_of(chunk, keys.k))
    tokens = width * keys.tokens
    begin, end = jnp.min(chunk.start) // tokens, jnp.max(chunk.position) // tokens + 1
    return lax.fori_loop(begin, end, add_tile, scores)
