"""Selected attention for TPUs, kv-major: one grid step per tile of queries that chose one block.

XLA gathers the queries of a chunk's tiles; the kernels meet each tile with its block, whose number
is prefetched. Tiles of one block are neighbours, so its keys and values are copied once, and its
gradients stay in vector memory until the next block begins. Logits are [keys, rows]: statistics
over keys lie along lanes, and reductions never cross lanes.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse import tiles as softmax
from xsake.kernels.block_sparse.problem import cleaned
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
from xsake.kernels.varying import shape_of_result

TUNING = Tuning(rows=512, tiles=1, queries=4096)
LAUNCHES = {"selected_forward": 1, "selected_backward": 1}  # of a chunk
LN_2 = 0.6931471805599453


def platforms() -> tuple[str, ...]:
    """The only platform that these kernels compile for."""
    return ("tpu",)


def unsupported(operands: Operands) -> str | None:
    """Why this backend cannot serve the call on a TPU; None if it can."""
    dtype = operands.q.dtype
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"TPUs compute in float32 and bfloat16, not in {dtype}"
    return None


def forward(operands: Operands, problem: Problem, interpret: Any = False):
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
    interpret: Any = False,
) -> Gradients:
    """Gradients for q, k and v, recomputing the weights of the selected blocks once."""
    cut = cut_for(operands, problem, TUNING)
    visit = functools.partial(visit_backward, cut, problem, operands.q.dtype, interpret)
    return call.backward(operands, problem, cut, visit, (out, lse), tuple(cotangents))


def _product(a, b, over: tuple[int, int], kind):
    """Sum of `a` times `b` over one axis of each, in float32, operands in the caller's dtype."""
    precision = lax.Precision.HIGHEST if kind == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(kind),
        b.astype(kind),
        (((over[0],), (over[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _logits(block, q, k, position, factor: float, kind):
    """[keys, rows] in bits, -inf where there is no pair."""
    logits = _product(k, q, (1, 1), kind) * factor
    size, rows = logits.shape
    key = block * size + lax.broadcasted_iota(jnp.int32, (size, rows), 0)
    return jnp.where(key <= position, logits, -jnp.inf)


def _power(x):
    """2^x: the unit of a TPU is for e^x."""
    return jnp.exp(x * LN_2)


def _forward_kernel(
    block_ref, total_ref, q_ref, position_ref, k_ref, v_ref, sums_ref, peaks_ref, masses_ref,
    *, factor: float, kind,
):  # fmt: skip
    """One tile of queries and its block.

    Grid    (tile), in order; tiles of one block are neighbours.
    Reads   q [rows, D], positions [1, rows]; k [block, D], v [block, Dv] of the tile's block.
    Writes  the partial softmax of every row: sums [rows, Dv], peak and mass [1, rows].
    """
    tile = pl.program_id(0)
    is_used = tile < total_ref[0]

    @pl.when(is_used)
    def _():
        logits = _logits(block_ref[tile], q_ref[...], k_ref[...], position_ref[...], factor, kind)
        peak = logits.max(0, keepdims=True)
        weight = _power(logits - jnp.where(peak == -jnp.inf, 0.0, peak))
        sums_ref[...] = _product(weight, v_ref[...], (0, 0), kind)
        peaks_ref[...] = peak
        masses_ref[...] = weight.sum(0, keepdims=True)

    @pl.when(jnp.logical_not(is_used))
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        peaks_ref[...] = jnp.full_like(peaks_ref, -jnp.inf)
        masses_ref[...] = jnp.zeros_like(masses_ref)


def _backward_kernel(
    block_ref, total_ref, q_ref, position_ref, d_out_ref, lse_ref, delta_ref, k_ref, v_ref,
    d_q_ref, d_k_ref, d_v_ref, *, factor: float, kind,
):  # fmt: skip
    """One tile of queries and its block.

    Grid    (tile), in order; tiles of one block are neighbours.
    Reads   q [rows, D], d_out [rows, Dv], positions, lse and delta [1, rows]; k and v of the block.
    Writes  d_q [rows, D] of the tile; adds to d_k [block, D] and d_v [block, Dv] of the block.
    """
    tile = pl.program_id(0)
    before = block_ref[jnp.maximum(tile - 1, 0)]

    @pl.when((tile == 0) | (block_ref[tile] != before))
    def _():
        d_k_ref[...] = jnp.zeros_like(d_k_ref)
        d_v_ref[...] = jnp.zeros_like(d_v_ref)

    @pl.when(tile < total_ref[0])
    def _():
        q, k, v, d_out = q_ref[...], k_ref[...], v_ref[...], d_out_ref[...]
        # TPUs tell what is finite in float32 only.
        finite = lambda x: cleaned(x.astype(jnp.float32))
        logits = _logits(block_ref[tile], q, k, position_ref[...], factor, kind)
        weight = jnp.where(logits == -jnp.inf, 0.0, _power(logits - lse_ref[...]))
        products = _product(v, d_out, (1, 1), kind)
        slope = jnp.where(logits == -jnp.inf, 0.0, weight * (products - delta_ref[...]))
        d_q_ref[...] = _product(slope, finite(k), (0, 0), kind)
        d_k_ref[...] += _product(slope, finite(q), (1, 0), kind)
        d_v_ref[...] += _product(weight, finite(d_out), (1, 0), kind)

    @pl.when(tile >= total_ref[0])
    def _():
        d_q_ref[...] = jnp.zeros_like(d_q_ref)


def _lists(tiles: Tiles, cut: Cut):
    """The block of every tile, and how many tiles are used; unused ones stay at the last block."""
    last = jnp.maximum(tiles.total - 1, 0)
    used = jnp.minimum(jnp.arange(cut.slots, dtype=jnp.int32), last)
    return tiles.block[used], tiles.total.reshape(1).astype(jnp.int32)


def _own(*shape: int) -> pl.BlockSpec:
    """What belongs to a tile."""
    return pl.BlockSpec((None, *shape), lambda tile, *lists: (tile, 0, 0))


def _of_block(*shape: int) -> pl.BlockSpec:
    """What belongs to a tile's block."""
    return pl.BlockSpec((None, *shape), lambda tile, block_ref, *lists: (block_ref[tile], 0, 0))


def _launched(kernel, name: str, cut: Cut, specs: tuple, shapes, interpret, lists, inputs):
    arithmetic = pl.CostEstimate(
        flops=2 * cut.slots * cut.rows * sum(x.shape[-1] for x in inputs) * inputs[-1].shape[1],
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in inputs),
        transcendentals=cut.slots * cut.rows * inputs[-1].shape[1],
    )
    in_specs, out_specs = specs
    return pl.pallas_call(
        kernel,
        out_shape=[shape_of_result(shape, jnp.float32, inputs[0]) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(cut.slots,),
            in_specs=list(in_specs),
            out_specs=list(out_specs),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=arithmetic,
        interpret=interpret,
        name=f"selected_{name}",
    )(*lists, *inputs)


def visit_forward(
    cut: Cut, problem: Problem, kind, interpret, chunk: Chunk, tiles: Tiles, partial: Partial
) -> Partial:
    """Partial softmaxes of all tiles of a chunk, in one launch."""
    del partial  # every tile is written anew
    _, size, dim = chunk.k.shape
    out_dim, rows = chunk.v.shape[-1], cut.rows
    factor = softmax.query_factor(problem.scale, None)
    inputs = (
        rows_of(chunk.q, tiles, cut),
        position_rows(chunk, tiles, cut),
        chunk.k.astype(kind),
        chunk.v.astype(kind),
    )
    in_specs = _own(rows, dim), _own(1, rows), _of_block(size, dim), _of_block(size, out_dim)
    out_specs = _own(rows, out_dim), _own(1, rows), _own(1, rows)
    shapes = (cut.slots, rows, out_dim), (cut.slots, 1, rows), (cut.slots, 1, rows)
    kernel = functools.partial(_forward_kernel, factor=factor, kind=kind)
    specs = in_specs, out_specs
    sums, peaks, masses = _launched(
        kernel, "forward", cut, specs, shapes, interpret, _lists(tiles, cut), inputs
    )
    return Partial(sums, peaks[:, 0], masses[:, 0])


def visit_backward(
    cut: Cut, problem: Problem, kind, interpret, chunk: Chunk, known: Known, tiles: Tiles, sums
):
    """Gradients of all tiles of a chunk in one launch; those of keys and values are added up."""
    number, size, dim = chunk.k.shape
    out_dim, rows = chunk.v.shape[-1], cut.rows
    factor = softmax.query_factor(problem.scale, None)
    in_line = lambda x: rows_of(x, tiles, cut).reshape(cut.slots, 1, rows)
    inputs = (
        rows_of(chunk.q, tiles, cut),
        position_rows(chunk, tiles, cut),
        rows_of(known.d_out, tiles, cut),
        in_line(known.lse),
        in_line(known.delta),
        chunk.k.astype(kind),
        chunk.v.astype(kind),
    )
    line, keys, values = _own(1, rows), _of_block(size, dim), _of_block(size, out_dim)
    in_specs = _own(rows, dim), line, _own(rows, out_dim), line, line, keys, values
    out_specs = _own(rows, dim), keys, values
    shapes = (cut.slots, rows, dim), (number, size, dim), (number, size, out_dim)
    kernel = functools.partial(_backward_kernel, factor=factor, kind=kind)
    lists = _lists(tiles, cut)
    specs = in_specs, out_specs
    room, d_k, d_v = _launched(kernel, "backward", cut, specs, shapes, interpret, lists, inputs)
    # A block that nobody selected was never written.
    used = jnp.arange(cut.room) < tiles.total
    met = jnp.zeros(number + 1, bool).at[jnp.where(used, tiles.block, number)].set(True)
    met = met[:number, None, None]
    _, of_k, of_v = sums
    return room, of_k + jnp.where(met, d_k, 0), of_v + jnp.where(met, d_v, 0)
