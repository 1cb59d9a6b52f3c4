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
from xsake.benchmarking.rows import Shape
from xsake.layout import BlockLayout
from xsake.layout.grid import count_blocks
from xsake.layout.synthetic import causal_grid, ragged_grid
from xsake.masks import Causal

GEMM = 1024  # rows and columns of the matrix product
CHECKED_QUERIES = 8
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Maximum error of a row / maximum sum of its absolute terms, by dtype."""
Grid = Bool[np.ndarray, "Hq Nq Nk"]
"""Computed blocks; None in its place: all visible ones."""


class AttentionInputs(NamedTuple):
    """Inputs of all sides."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk D"]
    cotangent: Float[Array, "B Tq Hq D"]


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledCall:
    """One compiled side."""

    side: str
    implementation: str  # library and function
    run: Callable[[], Any]  # computes once and blocks until the result is ready
    result: Any  # of the first run; None if it was only compiled
    flops: int  # of the matrix products of its blocks, without recomputation
    grid: Grid | None  # None: not block-sparse
    compile_seconds: float  # until the first result
    temp_bytes: int  # temporary memory by the compiler's analysis


def random_inputs(shape: Shape, dtype: str, seed: int) -> AttentionInputs:
    """Draw standard normal inputs."""
    rng = np.random.default_rng(seed)
    q = (shape.batch, shape.q_tokens, shape.q_heads, shape.head_dim)
    kv = (shape.batch, shape.kv_tokens, shape.kv_heads, shape.head_dim)
    return AttentionInputs(
        *(jnp.asarray(rng.standard_normal(x, np.float32), dtype) for x in (q, kv, kv, q))
    )


def make_grid(shape: Shape, budget: float, block: int, seed: int) -> Grid | None:
    """Draw the blocks of a call: heads from 10% to 90% if the mean allows it, else equal."""
    heads, blocks = shape.q_heads, count_blocks(shape.q_tokens, block)
    if budget >= 1:
        return None
    margin = 0.8 / heads
    if heads > 2 and 0.1 + margin < budget < 0.9 - margin:
        return ragged_grid(heads, blocks, budget, seed=seed)
    return ragged_grid(heads, blocks, budget, seed=seed, low=budget * 0.999, high=budget * 1.001)


def causal_layout(tokens: int, block: int, grid: Grid | None) -> BlockLayout:
    """Return the layout of a causal call: the blocks of a grid, or all visible ones."""
    sizes = {"q_tokens": tokens, "kv_tokens": tokens, "block_q": block, "block_kv": block}
    if grid is None:
        return BlockLayout.from_mask(Causal(), **sizes)
    return BlockLayout.from_block_mask(grid, mask=Causal(), **sizes)


def xsake_call(
    inputs: AttentionInputs,
    side: str,
    grid: Grid | None,
    *,
    block: int,
    is_backward: bool,
    runs: bool = True,
) -> CompiledCall:
    """Compile `xsake.attention`: causal over the blocks of a grid, or one query over all keys."""
    q_tokens, kv_tokens, heads = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[2]
    attend, pairs = attention, q_tokens * kv_tokens * heads
    if q_tokens == kv_tokens:
        attend = functools.partial(attention, layout=causal_layout(q_tokens, block, grid))
        grid = causal_grid(heads, count_blocks(q_tokens, block)) if grid is None else grid
        pairs = int(grid.sum()) * block**2
    names = side, "xsake.attention"
    return _compile_attention(names, attend, inputs, pairs, grid, is_backward, runs)


def jax_nn_call(inputs: AttentionInputs, *, is_backward: bool, runs: bool = True) -> CompiledCall:
    """Compile `jax.nn.dot_product_attention` with its causal mask."""
    is_causal = inputs.q.shape[1] == inputs.k.shape[1]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
    pairs = inputs.q.shape[1] * inputs.k.shape[1] * inputs.q.shape[2]
    names = "jax.nn", "jax.nn.dot_product_attention"
    return _compile_attention(names, attend, inputs, pairs, None, is_backward, runs)


def matmul_call(dtype: str, seed: int) -> CompiledCall:
    """Compile one large matrix product, the reference rate."""
    arrays = np.random.default_rng(seed).standard_normal((2, GEMM, GEMM), np.float32)
    product = functools.partial(jnp.matmul, precision="highest")
    names, operands = ("bare product", "jnp.matmul"), tuple(jnp.asarray(x, dtype) for x in arrays)
    return _compile(names, product, operands, 2 * GEMM**3, None, runs=True)


def _compile_attention(names, attend, inputs, pairs: int, grid, is_backward, runs) -> CompiledCall:
    # Two products forward; scores again and four more products backward.
    flops = (7 if is_backward else 2) * 2 * inputs.q.shape[3] * pairs
    if not is_backward:
        return _compile(names, attend, inputs[:3], flops, grid, runs=runs)

    def forward_backward(q, k, v, cotangent):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(cotangent)

    return _compile(names, forward_backward, inputs, flops, grid, runs=runs)


def _compile(
    names: tuple[str, str], function, arrays, flops: int, grid, *, runs: bool
) -> CompiledCall:
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arrays).compile()
    run = lambda: jax.block_until_ready(compiled(*arrays))
    result = run() if runs else None
    seconds = time.perf_counter() - begin
    analysis = compiled.memory_analysis()
    temp_bytes = 0 if analysis is None else int(analysis.temp_size_in_bytes)
    return CompiledCall(*names, run, result, flops, grid, seconds, temp_bytes)


def dense_bytes(shape: Shape, *, is_backward: bool) -> int:
    """Estimate the memory of attention with materialised scores: two arrays of them, or four."""
    scores = shape.batch * shape.q_heads * shape.q_tokens * shape.kv_tokens * 4
    return math.ceil(scores * (4 if is_backward else 2))


def spot_error(inputs: tuple, outputs: tuple, grid: Grid | None, *, block: int, seed: int) -> float:
    """Return the maximum error of the output, and of dQ if given, at some queries in float64.

    Errors are relative to the sum of the absolute terms, so that cancellation does not count.
    """
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in inputs)
    out, *gradients = (np.asarray(x, np.float64) for x in outputs)
    rng, errors = np.random.default_rng(seed), []
    for _ in range(CHECKED_QUERIES):
        at, row, head = (int(rng.integers(size)) for size in q.shape[:3])
        keys = np.arange(row + 1 if q.shape[1] == k.shape[1] else k.shape[1])
        if grid is not None and q.shape[1] == k.shape[1]:
            keys = keys[grid[head, row // block, keys // block]]
        kv_head = head * k.shape[2] // q.shape[2]
        where = at, row, head
        true = _true_row(q[where], k[at, keys, kv_head], v[at, keys, kv_head], cotangent[where])
        for actual, (value, terms) in zip((out, *gradients[:1]), true, strict=False):
            errors.append(np.abs(actual[where] - value).max() / terms.max())
    return float(np.max(errors))


def _true_row(q: Float[np.ndarray, " D"], keys, values, cotangent):
    """Return output and dq of one query, each with the sum of its absolute terms."""
    scale = len(q) ** -0.5
    scores = keys @ q * scale
    p = np.exp(scores - scores.max())
    p /= p.sum()
    out, dp = p @ values, values @ cotangent
    dq = scale * (p * (dp - out @ cotangent)) @ keys
    terms = scale * (p * (np.abs(dp) + np.abs(out @ cotangent))) @ np.abs(keys)
    return (out, p @ np.abs(values)), (dq, terms)
