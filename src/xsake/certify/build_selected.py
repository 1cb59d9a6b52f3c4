"""From a case of selected attention to what is compiled: one launch over a chunk of queries.

Making the lists of a chunk is XLA's work and takes it minutes to compile for a TPU; the kernels are
the same whatever the lists hold, so lists are arguments here.
"""

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from xsake.certify.build import Built
from xsake.certify.case import Case
from xsake.certify.record import Cost
from xsake.kernels.selected.call import Chunk, Cut, Known, Partial, cut_for
from xsake.kernels.selected.lists import Tiles
from xsake.kernels.selected.problem import Operands, Problem


def build(case: Case, kernels: ModuleType) -> Built:
    """The launch of a case for one kv head.

    Args:
        case: what to build; it has slots.
        kernels: a backend of selected attention with `visit_forward`, `visit_backward`, `TUNING`.
    """
    problem, kind = Problem(case.block, case.head_dim**-0.5), jnp.dtype(case.dtype)
    cut = _cut(case, problem, kernels)
    sizes = cut, problem, kind, False

    def run(chunk, tiles, *rest):
        if case.pass_name == "selected_forward":
            return kernels.visit_forward(*sizes, Chunk(*chunk), Tiles(*tiles), Partial(*rest[0]))
        known, sums = rest
        return kernels.visit_backward(*sizes, Chunk(*chunk), Known(*known), Tiles(*tiles), sums)

    arguments = _arguments(case, cut)
    results = jax.eval_shape(run, *arguments)
    read, written = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (arguments, results)
    )
    products = 2 if case.pass_name == "selected_forward" else 5
    cost = Cost(
        listed=cut.room,
        computed=None,
        launches=kernels.LAUNCHES[case.pass_name],
        steps=cut.slots,
        balance=None,
        flops=2 * products * cut.room * cut.rows * case.block * case.head_dim,
        bytes_read=read,
        bytes_written=written,
        least_bytes=read + written,
    )
    return Built(run, arguments, cost)


def _array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _cut(case: Case, problem: Problem, kernels: ModuleType) -> Cut:
    assert case.slots is not None
    q = _array(1, case.tokens, case.q_heads, case.head_dim, dtype=case.dtype)
    k = _array(1, case.tokens, case.kv_heads, case.head_dim, dtype=case.dtype)
    blocks = _array(1, case.tokens, case.kv_heads, case.slots, dtype=jnp.int32)
    return cut_for(Operands(q, k, k, blocks), problem, kernels.TUNING)


def _arguments(case: Case, cut: Cut) -> tuple:
    """Chunk and tiles, and what a pass adds to or reads: abstract arrays."""
    assert case.slots is not None
    dim, queries = case.head_dim, cut.chunk + 1
    kv = _array(-(-case.tokens // case.block), case.block, dim)
    rows = _array(queries, cut.group * dim, dtype=case.dtype)
    chunk = rows, _array(queries, dtype=jnp.int32), kv, kv
    tiles = (
        _array(cut.room, cut.tile, dtype=jnp.int32),
        _array(cut.room, dtype=jnp.int32),
        _array(dtype=jnp.int32),
        _array(cut.chunk, case.slots, dtype=jnp.int32),
    )
    room = _array(cut.slots, cut.rows, dim)
    if case.pass_name == "selected_forward":
        line = _array(cut.slots, cut.rows)
        return chunk, tiles, (room, line, line)
    known = _array(queries, cut.group * dim), *(_array(queries, cut.group) for _ in range(2))
    return chunk, tiles, known, (room, kv, kv)
