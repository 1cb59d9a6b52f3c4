"""Benchmark workloads: attention over grids of blocks, jax.nn attention, a matrix product."""

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
from xsake.layout.grid import count_blocks
from xsake.layout.synthetic import causal_grid
from xsake.masks import Causal

GEMM = 1024
"""Rows and columns of the matrix product."""


class AttentionInputs(NamedTuple):
    """Inputs of all sides."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk D"]
    cotangent: Float[Array, "B Tq Hq D"]


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledCall:
    """One compiled side.

    Attributes:
        side: its name.
        implementation: library and function.
        run: computes once and blocks until the result is ready.
        result: of the first run; None if it was only compiled.
        flops: of the matrix products of its blocks, without recomputation.
        grid: computed blocks; None: not block-sparse.
        compile_seconds: until the first result.
        temp_bytes: temporary memory by the compiler's analysis.
    """

    side: str
    implementation: str
    run: Callable[[], Any]
    result: Any
    flops: int
    grid: Bool[np.ndarray, "Hq Nq Nk"] | None
    compile_seconds: float
    temp_bytes: int


def random_inputs(shape: Shape, dtype: str, seed: int) -> AttentionInputs:
    """Draw standard normal inputs."""
    rng = np.random.default_rng(seed)
    q = (shape.batch, shape.q_tokens, shape.q_heads, shape.head_dim)
    kv = (shape.batch, shape.kv_tokens, shape.kv_heads, shape.head_dim)
    return AttentionInputs(
        *(jnp.asarray(rng.standard_normal(x, np.float32), dtype) for x in (q, kv, kv, q))
    )


def xsake_call(
    inputs: AttentionInputs,
    side: str,
    grid: Bool[np.ndarray, "Hq Nq Nk"] | None,
    *,
    block: int,
    is_backward: bool,
    runs: bool = True,
) -> CompiledCall:
    """Compile `xsake.attention`: causal over the blocks of a grid, or one query over all keys.

    Args:
        inputs: of the call.
        side: its name.
        grid: computed blocks; None: all visible ones.
        block: tokens of a block.
        is_backward: include gradients.
        runs: False: compile only.
    """
    q_tokens, kv_tokens, heads = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[2]
    if q_tokens != kv_tokens:
        attend, pairs = attention, q_tokens * kv_tokens * heads
    else:
        attend = functools.partial(attention, layout=causal_layout(q_tokens, block, grid))
        grid = causal_grid(heads, count_blocks(q_tokens, block)) if grid is None else grid
        pairs = int(grid.sum()) * block**2
    flops = _flops(pairs, inputs, is_backward)
    return _compile_attention(
        side, "xsake.attention", attend, inputs, flops, grid, is_backward, runs
    )


def causal_layout(
    tokens: int, block: int, grid: Bool[np.ndarray, "Hq Nq Nk"] | None
) -> BlockLayout:
    """Return the layout of a causal call: the blocks of a grid, or all visible ones."""
    sizes = {"q_tokens": tokens, "kv_tokens": tokens, "block_q": block, "block_kv": block}
    if grid is None:
        return BlockLayout.from_mask(Causal(), **sizes)
    return BlockLayout.from_block_mask(grid, mask=Causal(), **sizes)


def jax_nn_call(inputs: AttentionInputs, *, is_backward: bool, runs: bool = True) -> CompiledCall:
    """Compile `jax.nn.dot_product_attention` with its causal mask."""
    is_causal = inputs.q.shape[1] == inputs.k.shape[1]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
    pairs = inputs.q.shape[1] * inputs.k.shape[1] * inputs.q.shape[2]
    flops = _flops(pairs, inputs, is_backward)
    name = "jax.nn.dot_product_attention"
    return _compile_attention("jax.nn", name, attend, inputs, flops, None, is_backward, runs)


def matmul_call(dtype: str, seed: int) -> CompiledCall:
    """Compile one large matrix product, the reference rate."""
    arrays = np.random.default_rng(seed).standard_normal((2, GEMM, GEMM), np.float32)
    a, b = (jnp.asarray(x, dtype) for x in arrays)
    product = functools.partial(jnp.matmul, precision="highest")
    return _compile("bare product", "jnp.matmul", product, (a, b), 2 * GEMM**3, None, runs=True)


def _flops(pairs: int, inputs: AttentionInputs, is_backward: bool) -> int:
    """Return two products forward; scores again and four more products backward."""
    return (7 if is_backward else 2) * 2 * inputs.q.shape[3] * pairs


def _compile_attention(
    side, name, attend, inputs: AttentionInputs, flops, grid, is_backward, runs
) -> CompiledCall:
    if not is_backward:
        return _compile(side, name, attend, inputs[:3], flops, grid, runs=runs)

    def forward_backward(q, k, v, cotangent):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(cotangent)

    return _compile(side, name, forward_backward, inputs, flops, grid, runs=runs)


def _compile(side, name, function, arrays, flops: int, grid, *, runs: bool) -> CompiledCall:
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arrays).compile()
    run = lambda: jax.block_until_ready(compiled(*arrays))
    result = run() if runs else None
    seconds = time.perf_counter() - begin
    analysis = compiled.memory_analysis()
    temp_bytes = 0 if analysis is None else int(analysis.temp_size_in_bytes)
    return CompiledCall(side, name, run, result, flops, grid, seconds, temp_bytes)


def dense_bytes(shape: Shape, *, is_backward: bool) -> int:
    """Estimate the memory of attention with materialised scores: two arrays of them, or four."""
    scores = shape.batch * shape.q_heads * shape.q_tokens * shape.kv_tokens * 4
    return math.ceil(scores * (4 if is_backward else 2))
