"""The calls that are timed: attention over grids of blocks, jax.nn beside it, a bare product."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from xsake.attention import attention
from xsake.bench.rows import Shape
from xsake.layout import BlockLayout
from xsake.layout.grid import blocks_of
from xsake.layout.synthetic import causal_grid
from xsake.masks import Causal

GEMM = 1024
"""Rows and columns of the bare product."""


class Inputs(NamedTuple):
    """What every side computes on."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk D"]
    cotangent: Float[Array, "B Tq Hq D"]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One side, compiled.

    Attributes:
        side: its name among the others.
        implementation: library and function.
        run: computes once and waits.
        result: of the first run; None if it was only compiled.
        flops: of the products that its blocks need, none of them twice.
        grid: the blocks that it computes; None: it knows no blocks.
        compile_seconds: until the first result was there.
        temp_bytes: that the compiler plans.
    """

    side: str
    implementation: str
    run: Callable[[], Any]
    result: Any
    flops: int
    grid: Bool[np.ndarray, "Hq Nq Nk"] | None
    compile_seconds: float
    temp_bytes: int


def drawn(shape: Shape, dtype: str, seed: int) -> Inputs:
    """Standard normal arrays."""
    random = np.random.default_rng(seed)
    q = (shape.batch, shape.q_tokens, shape.q_heads, shape.head_dim)
    kv = (shape.batch, shape.kv_tokens, shape.kv_heads, shape.head_dim)
    return Inputs(
        *(jnp.asarray(random.standard_normal(x, np.float32), dtype) for x in (q, kv, kv, q))
    )


def ours(
    inputs: Inputs,
    side: str,
    grid: Bool[np.ndarray, "Hq Nq Nk"] | None,
    *,
    block: int,
    is_backward: bool,
    runs: bool = True,
) -> Call:
    """`xsake.attention`: causal over the blocks of a grid, or of one token that sees everything.

    Args:
        inputs: what it computes on.
        side: its name.
        grid: the blocks; None: every visible one.
        block: tokens of a block.
        is_backward: gradients too.
        runs: False only compiles it.
    """
    q_tokens, kv_tokens, heads = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[2]
    if q_tokens != kv_tokens:
        attend, pairs = attention, q_tokens * kv_tokens * heads
    else:
        attend = functools.partial(attention, layout=causal_layout(q_tokens, block, grid))
        grid = causal_grid(heads, blocks_of(q_tokens, block)) if grid is None else grid
        pairs = int(grid.sum()) * block**2
    flops = _flops(pairs, inputs, is_backward)
    return _compiled(side, "xsake.attention", attend, inputs, flops, grid, is_backward, runs)


def causal_layout(
    tokens: int, block: int, grid: Bool[np.ndarray, "Hq Nq Nk"] | None
) -> BlockLayout:
    """The layout of a causal call: the blocks of a grid, or every visible one."""
    sizes = {"q_tokens": tokens, "kv_tokens": tokens, "block_q": block, "block_kv": block}
    if grid is None:
        return BlockLayout.from_mask(Causal(), **sizes)
    return BlockLayout.from_block_mask(grid, mask=Causal(), **sizes)


def theirs(inputs: Inputs, *, is_backward: bool, runs: bool = True) -> Call:
    """`jax.nn.dot_product_attention` with its own causal mask."""
    is_causal = inputs.q.shape[1] == inputs.k.shape[1]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
    pairs = inputs.q.shape[1] * inputs.k.shape[1] * inputs.q.shape[2]
    flops = _flops(pairs, inputs, is_backward)
    name = "jax.nn.dot_product_attention"
    return _compiled("jax.nn", name, attend, inputs, flops, None, is_backward, runs)


def bare_product(dtype: str, seed: int) -> Call:
    """One large matrix product: the rate that everything else is held against."""
    draw = np.random.default_rng(seed).standard_normal((2, GEMM, GEMM), np.float32)
    a, b = (jnp.asarray(x, dtype) for x in draw)
    product = functools.partial(jnp.matmul, precision="highest")
    return _timed("bare product", "jnp.matmul", product, (a, b), 2 * GEMM**3, None, runs=True)


def _flops(pairs: int, inputs: Inputs, is_backward: bool) -> int:
    """Two products forward; scores again, and four more products, backward."""
    return (7 if is_backward else 2) * 2 * inputs.q.shape[3] * pairs


def _compiled(side, name, attend, inputs: Inputs, flops, grid, is_backward, runs) -> Call:
    if not is_backward:
        return _timed(side, name, attend, inputs[:3], flops, grid, runs=runs)

    def both(q, k, v, cotangent):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(cotangent)

    return _timed(side, name, both, inputs, flops, grid, runs=runs)


def _timed(side, name, function, arrays, flops: int, grid, *, runs: bool) -> Call:
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arrays).compile()
    run = lambda: jax.block_until_ready(compiled(*arrays))
    result = run() if runs else None
    seconds = time.perf_counter() - begin
    said = compiled.memory_analysis()
    planned = 0 if said is None else int(said.temp_size_in_bytes)
    return Call(side, name, run, result, flops, grid, seconds, planned)


def dense_bytes(shape: Shape, *, is_backward: bool) -> int:
    """About what attention that holds all scores needs at once: two arrays of them, or four."""
    scores = shape.batch * shape.q_heads * shape.q_tokens * shape.kv_tokens * 4
    return math.ceil(scores * (4 if is_backward else 2))
