"""Selected attention in plain XLA loops, kv-major: a block against the queries that selected it.

Queries that selected the same block are gathered into tiles, so that every product is a matrix
product whatever the group size. A tile leaves a partial softmax for each of its queries, with the
query's own maximum, and the slots of each query are merged. The backward pass computes all three
gradients from one pass over the tiles; every sum has one owner and one order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import online_softmax as softmax
from xsake.kernels.blocking import take
from xsake.kernels.online_softmax import zero_nonfinite
from xsake.kernels.selected import chunking
from xsake.kernels.selected.chunking import (
    ChunkResiduals,
    ChunkTiles,
    PartialSoftmax,
    SelectedTuning,
    TileGradients,
)

# On 2 x86 cores, tiles of 192 and of 384 rows are alike, tiles of 96 lose a third; a step of 8
# tiles keeps what it computes in the cache.
CPU = SelectedTuning(rows=256, tiles=8, queries=1024)
ACCELERATOR = SelectedTuning(rows=256, tiles=64, queries=4096)


class StepTiles(NamedTuple):
    """The tiles of a step; rows are (query, head of the group) pairs."""

    query: Any  # [step, tile]
    block: Any  # [step]
    q: Any  # [step, rows, D], not scaled
    k: Any  # [step, block, D]
    v: Any  # [step, block, Dv]
    s: Any  # [step, rows, block], base 2, -inf for masked pairs


def _step_tiles(call: ChunkTiles, step: Array) -> StepTiles:
    chunk, sizes = call.chunk, call.sizes
    part = lambda x: lax.dynamic_slice_in_dim(x, step * sizes.step, sizes.step, 0)
    query, block = part(call.tiles.query), part(call.tiles.block)
    q = take(chunk.q, query).reshape(sizes.step, sizes.rows, -1)
    k, v = take(chunk.k, block), take(chunk.v, block)
    factor = softmax.query_factor(call.config.scale, None)
    s = softmax.matmul(q.astype(k.dtype) * jnp.asarray(factor, k.dtype), jnp.swapaxes(k, 1, 2))
    size = k.shape[1]
    key = block[:, None, None] * size + jnp.arange(size)[None, None]
    mask = key <= take(chunk.positions, query)[:, :, None]
    mask = jnp.broadcast_to(mask[:, :, None], (sizes.step, sizes.tile, sizes.group, size))
    s = jnp.where(mask.reshape(s.shape), s, -jnp.inf)
    return StepTiles(query, block, q, k, v, s)


def _store(buffer: Array, step: Array, x: Array) -> Array:
    """Store the results of a step."""
    return lax.dynamic_update_slice_in_dim(buffer, x, step * x.shape[0], 0)


def _loop_steps(call: ChunkTiles, body: Callable[..., Any], state: Any) -> Any:
    """`state = body(step, tiles of the step, state)` for all steps of a chunk."""

    def loop_body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        step, state = carry
        return step + 1, body(step, _step_tiles(call, step), state)

    has_more = lambda carry: carry[0] * call.sizes.step < call.tiles.total
    return lax.while_loop(has_more, loop_body, (jnp.int32(0), state))[1]


def visit_forward(call: ChunkTiles, partial: PartialSoftmax) -> PartialSoftmax:
    """Partial softmaxes of all tiles of a chunk."""

    def body(step: Array, tile: StepTiles, partial: PartialSoftmax) -> PartialSoftmax:
        m = tile.s.max(-1)
        p = softmax.probabilities(tile.s, jnp.where(m == -jnp.inf, 0, m)[..., None])
        results = zip(partial, (softmax.matmul(p, tile.v), m, p.sum(-1)), strict=True)
        return PartialSoftmax(*(_store(buffer, step, x) for buffer, x in results))

    return _loop_steps(call, body, partial)


def visit_backward(
    call: ChunkTiles, residuals: ChunkResiduals, sums: TileGradients
) -> TileGradients:
    """Gradients of all tiles of a chunk."""
    over_rows = lambda x, y: jnp.einsum("rmn,rmd->rnd", x, y, precision="highest")

    def body(step: Array, tile: StepTiles, sums: TileGradients) -> TileGradients:
        rows = lambda x: take(x, tile.query).reshape(call.sizes.step, call.sizes.rows, -1)
        do, lse, delta = map(rows, residuals)
        p = softmax.probabilities(tile.s, lse)
        dp = softmax.matmul(do, jnp.swapaxes(tile.v, 1, 2))
        ds = softmax.score_grad(p, dp, delta, None)
        ds, p = (jnp.where(tile.s == -jnp.inf, 0, x) for x in (ds, p))
        q = zero_nonfinite(tile.q.astype(ds.dtype))
        return TileGradients(
            _store(sums.dq, step, softmax.matmul(ds, zero_nonfinite(tile.k))),
            _add_tiles(sums.dk, tile.block, over_rows(ds, q)),
            _add_tiles(sums.dv, tile.block, over_rows(p, zero_nonfinite(do))),
        )

    return _loop_steps(call, body, sums)


def _add_tiles(acc: Array, blocks: Array, parts: Array) -> Array:
    """Add each tile's part to its block, tile by tile: the order is always the same."""

    def add(tile: Array, acc: Array) -> Array:
        old = lax.dynamic_index_in_dim(acc, blocks[tile], 0)
        new = lax.dynamic_index_in_dim(parts, tile, 0)
        return lax.dynamic_update_index_in_dim(acc, old + new, blocks[tile], 0)

    return lax.fori_loop(0, parts.shape[0], add, acc)


forward, backward = chunking.define_backend(
    lambda platform: CPU if platform == "cpu" else ACCELERATOR, visit_forward, visit_backward
)
