"""Build the function of a selected-attention case: one launch over a chunk of queries.

Block lists are arguments: XLA takes minutes to compile their construction for a TPU, and the
kernels do not depend on their contents.
"""

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from xsake.certify.build import BuiltCase
from xsake.certify.case import CompileCase
from xsake.certify.record import PassCost
from xsake.kernels.selected.chunking import (
    Chunk,
    ChunkResiduals,
    ChunkSizes,
    ChunkTiles,
    PartialSoftmax,
    QueryTiles,
    TileGradients,
    chunk_sizes,
)
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs


def build(case: CompileCase, kernels: ModuleType) -> BuiltCase:
    """Build the launch of a case for one kv head.

    Args:
        case: to build, with slots.
        kernels: a backend of selected attention with `visit_forward`, `visit_backward`, `TUNING`.
    """
    problem, dtype = SelectedConfig(case.block, case.head_dim**-0.5), jnp.dtype(case.dtype)
    cut = _compute_cut(case, problem, kernels)

    def run(chunk, tiles, *rest):
        call = ChunkTiles(cut, problem, dtype, False, Chunk(*chunk), QueryTiles(*tiles))
        if case.pass_name == "selected_forward":
            return kernels.visit_forward(call, PartialSoftmax(*rest[0]))
        known, sums = rest
        return kernels.visit_backward(call, ChunkResiduals(*known), TileGradients(*sums))

    arguments = _arguments(case, cut)
    results = jax.eval_shape(run, *arguments)
    read, written = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (arguments, results)
    )
    products = 2 if case.pass_name == "selected_forward" else 5
    cost = PassCost(
        listed=cut.capacity,
        computed=None,
        launches=kernels.LAUNCHES[case.pass_name],
        steps=cut.slots,
        balance=None,
        flops=2 * products * cut.capacity * cut.rows * case.block * case.head_dim,
        bytes_read=read,
        bytes_written=written,
        least_bytes=read + written,
    )
    return BuiltCase(run, arguments, cost)


def _array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _compute_cut(case: CompileCase, problem: SelectedConfig, kernels: ModuleType) -> ChunkSizes:
    assert case.slots is not None
    q = _array(1, case.tokens, case.q_heads, case.head_dim, dtype=case.dtype)
    k = _array(1, case.tokens, case.kv_heads, case.head_dim, dtype=case.dtype)
    blocks = _array(1, case.tokens, case.kv_heads, case.slots, dtype=jnp.int32)
    return chunk_sizes(SelectedInputs(q, k, k, blocks), problem, kernels.TUNING)


def _arguments(case: CompileCase, cut: ChunkSizes) -> tuple:
    """Return abstract arrays: chunk, tiles and the operands of the pass."""
    assert case.slots is not None
    dim, queries = case.head_dim, cut.chunk + 1
    kv = _array(-(-case.tokens // case.block), case.block, dim)
    rows = _array(queries, cut.group * dim, dtype=case.dtype)
    chunk = rows, _array(queries, dtype=jnp.int32), kv, kv
    tiles = (
        _array(cut.capacity, cut.tile, dtype=jnp.int32),
        _array(cut.capacity, dtype=jnp.int32),
        _array(dtype=jnp.int32),
        _array(cut.chunk, case.slots, dtype=jnp.int32),
    )
    room = _array(cut.slots, cut.rows, dim)
    if case.pass_name == "selected_forward":
        line = _array(cut.slots, cut.rows)
        return chunk, tiles, (room, line, line)
    known = _array(queries, cut.group * dim), *(_array(queries, cut.group) for _ in range(2))
    return chunk, tiles, known, (room, kv, kv)
