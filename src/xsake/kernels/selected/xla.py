"""Selected attention in plain XLA loops, kv-major: a block against the queries that selected it.

Queries that selected the same block are gathered into tiles, so that every product is a matrix
product whatever the group size. A tile leaves a partial softmax for each of its queries, with the
query's own maximum, and the slots of each query are merged. The backward pass computes all three
gradients from one pass over the tiles; every sum has one owner and one order.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import online_softmax as softmax
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.online_softmax import zero_nonfinite
from xsake.kernels.selected import chunking
from xsake.kernels.selected.chunking import (
    Chunk,
    ChunkResiduals,
    ChunkSizes,
    PartialSoftmax,
    SelectedTuning,
    chunk_sizes,
)
from xsake.kernels.selected.routing import QueryTiles
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs

# On 2 x86 cores, tiles of 192 and of 384 rows are alike, tiles of 96 lose a third; a step of 8
# tiles keeps what it computes in the cache.
CPU = SelectedTuning(rows=256, tiles=8, queries=1024)
ACCELERATOR = SelectedTuning(rows=256, tiles=64, queries=4096)


def unsupported_reason(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can: it serves every call."""
    return None


def forward(inputs: SelectedInputs, config: SelectedConfig, platform: str):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    sizes = _sizes(inputs, config, platform)
    factor = softmax.query_factor(config.scale, None)
    visit = functools.partial(_visit_forward, sizes, factor)
    return chunking.forward(inputs, config, sizes, visit)


def backward(
    inputs: SelectedInputs,
    config: SelectedConfig,
    platform: str,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array,
) -> Gradients:
    """Gradients for q, k and v; the probabilities of the selected blocks are recomputed once."""
    sizes = _sizes(inputs, config, platform)
    factor = softmax.query_factor(config.scale, None)
    visit = functools.partial(_visit_backward, sizes, factor)
    return chunking.backward(inputs, config, sizes, visit, (o, lse), (do, dlse))


def _sizes(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> ChunkSizes:
    return chunk_sizes(inputs, config, CPU if platform == "cpu" else ACCELERATOR)


class StepTiles(NamedTuple):
    """The tiles of a step; rows are (query, head of the group) pairs."""

    query: Any  # [step, tile]
    block: Any  # [step]
    q: Any  # [step, rows, D], not scaled
    k: Any  # [step, block, D]
    v: Any  # [step, block, Dv]
    s: Any  # [step, rows, block], base 2, -inf for masked pairs


def _step_tiles(chunk: Chunk, tiles: QueryTiles, step, cut: ChunkSizes, factor: float) -> StepTiles:
    part = lambda x: lax.dynamic_slice_in_dim(x, step * cut.step, cut.step, 0)
    query, block = part(tiles.query), part(tiles.block)
    q = _take(chunk.q, query).reshape(cut.step, cut.rows, -1)
    k, v = _take(chunk.k, block), _take(chunk.v, block)
    scaled = q.astype(k.dtype) * jnp.asarray(factor, k.dtype)
    s = softmax.matmul(scaled, jnp.swapaxes(k, 1, 2))
    size = k.shape[1]
    key = block[:, None, None] * size + jnp.arange(size)[None, None]
    mask = key <= _take(chunk.positions, query)[:, :, None]
    mask = jnp.broadcast_to(mask[:, :, None], (cut.step, cut.tile, cut.group, size))
    s = jnp.where(mask.reshape(s.shape), s, -jnp.inf)
    return StepTiles(query, block, q, k, v, s)


def _take(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def _store(buffer, step, x):
    """Store the results of a step."""
    return lax.dynamic_update_slice_in_dim(buffer, x, step * x.shape[0], 0)


def _visit_forward(
    cut: ChunkSizes, factor: float, chunk: Chunk, tiles: QueryTiles, partial: PartialSoftmax
):
    def body(state):
        step, partial = state
        tile = _step_tiles(chunk, tiles, step, cut, factor)
        m = tile.s.max(-1)
        p = softmax.probabilities(tile.s, jnp.where(m == -jnp.inf, 0, m)[..., None])
        results = zip(partial, (softmax.matmul(p, tile.v), m, p.sum(-1)), strict=True)
        return step + 1, PartialSoftmax(*(_store(buffer, step, x) for buffer, x in results))

    has_more = lambda state: state[0] * cut.step < tiles.total
    return lax.while_loop(has_more, body, (jnp.int32(0), partial))[1]


def _visit_backward(
    cut: ChunkSizes,
    factor: float,
    chunk: Chunk,
    residuals: ChunkResiduals,
    tiles: QueryTiles,
    sums: tuple,
):
    over_rows = lambda x, y: jnp.einsum("rmn,rmd->rnd", x, y, precision="highest")

    def body(state):
        step, dq, dk, dv = state
        tile = _step_tiles(chunk, tiles, step, cut, factor)
        rows = lambda x: _take(x, tile.query).reshape(cut.step, cut.rows, -1)
        do, lse, delta = map(rows, residuals)
        p = softmax.probabilities(tile.s, lse)
        dp = softmax.matmul(do, jnp.swapaxes(tile.v, 1, 2))
        ds = softmax.score_grad(p, dp, delta, None)
        ds = jnp.where(tile.s == -jnp.inf, 0, ds)
        p = jnp.where(tile.s == -jnp.inf, 0, p)
        dq = _store(dq, step, softmax.matmul(ds, zero_nonfinite(tile.k)))
        q = zero_nonfinite(tile.q.astype(ds.dtype))
        dk = _add_tiles(dk, tile.block, over_rows(ds, q))
        dv = _add_tiles(dv, tile.block, over_rows(p, zero_nonfinite(do)))
        return step + 1, dq, dk, dv

    has_more = lambda state: state[0] * cut.step < tiles.total
    return lax.while_loop(has_more, body, (jnp.int32(0), *sums))[1:]


def _add_tiles(acc, blocks, parts):
    """Add each tile's part to its block, tile by tile: the order is always the same."""

    def add(tile, acc):
        old = lax.dynamic_index_in_dim(acc, blocks[tile], 0)
        new = lax.dynamic_index_in_dim(parts, tile, 0)
        return lax.dynamic_update_index_in_dim(acc, old + new, blocks[tile], 0)

    return lax.fori_loop(0, parts.shape[0], add, acc)
