"""Selected attention for NVIDIA GPUs: tiles of queries that chose one block, as a list of blocks.

A tile and its block are a row with one item, so the kernels of block-sparse attention compute them:
forward and dQ a row each, dK/dV all tiles of a block one after another, every sum in one place.
"""

import functools
from typing import Any

import jax.numpy as jnp

from xsake.kernels import mosaic_gpu_compat as gpu
from xsake.kernels.block_sparse import gpu_passes, mosaic_gpu
from xsake.kernels.block_sparse import problem as block_sparse
from xsake.kernels.block_sparse import tiles as softmax
from xsake.kernels.selected import call
from xsake.kernels.selected.call import (
    Chunk,
    Cut,
    Known,
    Partial,
    Tuning,
    cut_for,
    position_rows,
    rows_of,
)
from xsake.kernels.selected.lists import Tiles
from xsake.kernels.selected.problem import Cotangents, Gradients, Operands, Problem
from xsake.layout import BlockLayout
from xsake.masks import Causal

TUNING = Tuning(rows=256, tiles=1, queries=4096)
LAUNCHES = {"selected_forward": 1, "selected_backward": 2}  # of a chunk


def platforms() -> tuple[str, ...]:
    """The only platform that these kernels compile for."""
    return ("cuda",)


def unsupported(operands: Operands) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    dtype, features = operands.q.dtype, max(operands.q.shape[-1], operands.v.shape[-1])
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"its tensor cores take bfloat16 and float16, not {dtype}"
    if features > gpu_passes.MOST_FEATURES:
        return f"its registers hold heads of at most {gpu_passes.MOST_FEATURES} features"
    return mosaic_gpu.incapable(gpu.capability())


def forward(operands: Operands, problem: Problem, interpret: Any = None):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    cut = cut_for(operands, problem, TUNING)
    visit = functools.partial(visit_forward, cut, problem, operands.q.dtype, interpret)
    return call.forward(operands, problem, cut, visit)


def backward(
    operands: Operands,
    problem: Problem,
    out,
    lse,
    cotangents: Cotangents,
    interpret: Any = None,
) -> Gradients:
    """Gradients for q, k and v, recomputing the weights of the selected blocks twice."""
    cut = cut_for(operands, problem, TUNING)
    visit = functools.partial(visit_backward, cut, problem, operands.q.dtype, interpret)
    return call.backward(operands, problem, cut, visit, (out, lse), tuple(cotangents))


def visit_forward(
    cut: Cut, problem: Problem, kind, interpret, chunk: Chunk, tiles: Tiles, partial: Partial
) -> Partial:
    """Partial softmaxes of all tiles of a chunk, in one launch."""
    del partial  # every tile is written anew
    walk = mosaic_gpu.walk_of("forward", _operands(cut, kind, chunk, tiles), interpret)
    out, lse = gpu_passes.attend(walk, block_sparse.Problem(problem.scale), jnp.float32)
    out, lse = out.reshape(cut.slots, cut.rows, -1), lse.reshape(cut.slots, cut.rows)
    # A finished softmax is one under way: its peak is the log of its mass, which is then one.
    return Partial(out, lse * softmax.LOG2_E, (lse != -jnp.inf).astype(jnp.float32))


def visit_backward(
    cut: Cut, problem: Problem, kind, interpret, chunk: Chunk, known: Known, tiles: Tiles, sums
):
    """Gradients of all tiles of a chunk in two launches; those of keys and values are added up."""
    operands = _operands(cut, kind, chunk, tiles)
    in_line = lambda x: rows_of(x, tiles, cut).reshape(1, cut.slots * cut.rows, 1, -1)
    d_out = in_line(known.d_out).astype(kind)
    lse, delta = in_line(known.lse)[..., 0], in_line(known.delta)[..., 0]
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse / softmax.LOG2_E)
    # With an output of zeros, all of delta is what the log of the mass is wanted to give.
    saved = jnp.zeros_like(d_out), lse, block_sparse.Cotangents(d_out, -delta)
    numbers, wide = block_sparse.Problem(problem.scale), jnp.float32
    by_query = mosaic_gpu.walk_of("d_q", operands, interpret)
    d_q = gpu_passes.query_gradient(by_query, numbers, *saved, wide)
    by_key = mosaic_gpu.walk_of("d_kv", operands, interpret)
    d_k, d_v = gpu_passes.key_value_gradient(by_key, numbers, *saved, wide)
    # What is scaled here would be scaled again.
    room = d_q.reshape(cut.slots, cut.rows, -1) / problem.scale
    _, of_k, of_v = sums
    return room, of_k + d_k.reshape(of_k.shape) / problem.scale, of_v + d_v.reshape(of_v.shape)


def _operands(cut: Cut, kind, chunk: Chunk, tiles: Tiles) -> block_sparse.Operands:
    """A chunk as a call of block-sparse attention: one head, its tiles as query blocks."""
    number, size, _ = chunk.k.shape
    last = jnp.maximum(tiles.total - 1, 0)
    used = jnp.minimum(jnp.arange(cut.slots, dtype=jnp.int32), last)
    layout = BlockLayout(
        jnp.minimum(jnp.arange(cut.slots + 1, dtype=jnp.int32), tiles.total.astype(jnp.int32)),
        tiles.block[used],
        jnp.ones(cut.slots, bool),
        q_tokens=cut.slots * cut.rows,
        kv_tokens=number * size,
        block_q=cut.rows,
        block_kv=size,
        mask=Causal(),
    )
    in_line = lambda x: x.astype(kind).reshape(1, -1, 1, x.shape[-1])
    return block_sparse.Operands(
        in_line(rows_of(chunk.q, tiles, cut)),
        in_line(chunk.k),
        in_line(chunk.v),
        layout,
        q_positions=position_rows(chunk, tiles, cut).reshape(1, -1),
    )
