"""GPU kernels of forward, dq and dkv over a schedule, shared by Ampere and Hopper.

Tiles of scores are [outer, inner]: queries by keys, and for dkv keys by queries. Probabilities
become operands of the next product without leaving their registers.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake.kernels import online_softmax
from xsake.kernels.batching import define_backend
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu import schedule
from xsake.kernels.block_sparse.mosaic_gpu.launch import GpuKernelBody, GpuLaunch, pad_features
from xsake.kernels.block_sparse.mosaic_gpu.masking import TilePairs
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.blocking import KeyArrays, QueryArrays
from xsake.kernels.mask_program import unsupported_mask
from xsake.kernels.online_softmax import (
    BackwardRows,
    backward_rows,
    isolate_nonfinite,
    zero_nonfinite,
)

# GPUs have an instruction for 2^x.
BASE = online_softmax.Base(online_softmax.LOG2E, jnp.exp2)
MAX_FEATURES = 256

type State = tuple[Array, ...]  # what a loop carries, in registers


def common_reason(inputs: BlockSparseInputs, config: BlockSparseConfig) -> str | None:
    """Why no GPU kernel serves a call, on any GPU; None if one may."""
    dtype = inputs.q.dtype
    if inputs.bias is not None:
        return "it adds no bias to the logits"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"its tensor cores take bfloat16 and float16, not {dtype}"
    if config.tiles is not None:
        return "its tiles follow from the head dimension"
    if max(inputs.q.shape[-1], inputs.v.shape[-1]) > MAX_FEATURES:
        return f"its registers hold heads of at most {MAX_FEATURES} features"
    return unsupported_mask(schedule.gpu_mask_program(inputs.layout.mask), inputs)


def define_passes(
    launch_of: Callable[[str, BlockSparseInputs, Any], GpuLaunch],
) -> tuple[Callable[..., Any], ...]:
    """Make `(forward, backward, dq_pass, dkv_pass)` of a GPU backend.

    `launch_of` makes the launch of a pass ("forward", "dq" or "dkv") from inputs and interpreter
    parameters, which are false on a device.
    """

    def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, interpret: Any):
        return forward_pass(launch_of("forward", inputs, interpret), config)

    def dq(
        inputs: BlockSparseInputs, config: BlockSparseConfig, *residuals: Array, interpret=False
    ) -> Array:
        rows = backward_rows(jnp.float32, *residuals, base=BASE)
        return dq_given_rows(launch_of("dq", inputs, interpret), config, rows)

    def dkv(
        inputs: BlockSparseInputs, config: BlockSparseConfig, *residuals: Array, interpret=False
    ) -> tuple[Array, Array]:
        rows = backward_rows(jnp.float32, *residuals, base=BASE)
        return dkv_given_rows(launch_of("dkv", inputs, interpret), config, rows)

    return *define_backend(forward, dq, dkv), dq, dkv


def forward_pass(
    launch: GpuLaunch, config: BlockSparseConfig, dtype: Any = None
) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`; o in `dtype`, or in that of the queries."""
    inputs = launch.inputs
    k, v = isolate_nonfinite(inputs.k, inputs.v)
    o, lse = launch.run(
        forward_body(config, launch),
        launch.pack_queries(inputs.q),
        launch.pack_keys(k, v),
        [(v.shape[-1], dtype or inputs.q.dtype), (None, jnp.float32)],
    )
    return o, lse


def dq_given_rows(
    launch: GpuLaunch, config: BlockSparseConfig, rows: BackwardRows, *, as_sums: bool = False
) -> Array:
    """dq [B, Tq, Hq, D]; `as_sums`: in float32 and not scaled, to be added to others."""
    inputs, poison = launch.inputs, None
    k, v = isolate_nonfinite(inputs.k, inputs.v)
    if launch.ops.uses_wgmma:
        # Keys are also multiplied with ds, straight from shared memory.
        poison = jnp.where(jnp.isfinite(k).all(-1), 0.0, jnp.nan).astype(jnp.float32)
        k = zero_nonfinite(k)
    (dq,) = launch.run(
        dq_body(config, launch, 1.0 if as_sums else config.scale),
        launch.pack_queries(inputs.q, rows),
        launch.pack_keys(k, v, poison),
        [(inputs.q.shape[-1], jnp.float32 if as_sums else inputs.q.dtype)],
    )
    return dq


def dkv_given_rows(
    launch: GpuLaunch, config: BlockSparseConfig, rows: BackwardRows, *, as_sums: bool = False
) -> tuple[Array, Array]:
    """dk [B, Tk, Hk, D] and dv [B, Tk, Hk, Dv]; arguments as in `dq_given_rows`."""
    inputs = launch.inputs
    # A query that is not finite reaches the keys that it sees, and no others.
    lse = jnp.where(jnp.isfinite(inputs.q).all(-1), rows.lse, jnp.nan)
    dk, dv = launch.run(
        dkv_body(config, launch, 1.0 if as_sums else config.scale),
        launch.pack_keys(*isolate_nonfinite(inputs.k, inputs.v)),
        launch.pack_queries(zero_nonfinite(inputs.q), rows._replace(lse=lse)),
        [(x.shape[-1], jnp.float32 if as_sums else x.dtype) for x in (inputs.k, inputs.v)],
    )
    return dk, dv


def forward_body(config: BlockSparseConfig, launch: GpuLaunch) -> GpuKernelBody:
    """Online softmax; s [queries, keys]."""
    ops, rows = launch.ops, launch.schedule.outer.tile

    def prologue(q: QueryArrays) -> State:
        features = pad_features(launch.inputs.v.shape[-1])
        acc = gpu.full((rows, features), 0.0)
        return acc, gpu.full((rows,), -jnp.inf), gpu.full((rows,), 0.0)

    def body(
        pairs: TilePairs, q: QueryArrays, kv: KeyArrays, state: State, is_masked: bool
    ) -> State:
        acc, m, l = state
        s = to_scores(ops.dot_products(q.q, kv.k), config.scale, config.softcap)
        mask = pairs.element_mask() if is_masked else None
        if mask is not None:
            s = jnp.where(mask, s, -jnp.inf)
        m, m_safe, alpha = online_softmax.rescale(m, jnp.max(s, 1), BASE)
        p = jnp.exp2(s - gpu.along(m_safe, pairs.shape, 0))
        l = l * alpha + jnp.sum(p, 1)
        acc = acc * gpu.along(alpha, acc.shape, 0)
        acc = ops.add_product(acc, p, kv.v)
        ops.release()
        return acc, m, l

    def epilogue(state: State) -> tuple[Array, ...]:
        acc, m, l = state
        inverse = 1 / jnp.where(l != 0, l, 1.0)
        o = acc * gpu.along(inverse, acc.shape, 0)
        return o, online_softmax.log_sum_exp(m, l, BASE)

    return GpuKernelBody("forward", prologue, body, epilogue)


def dq_body(config: BlockSparseConfig, launch: GpuLaunch, grad_scale: float) -> GpuKernelBody:
    """s [queries, keys]; ds is the left operand of the product of dq."""
    ops, rows = launch.ops, launch.schedule.outer.tile

    def prologue(q: QueryArrays) -> State:
        dq = gpu.full((rows, pad_features(launch.inputs.q.shape[-1])), 0.0)
        return dq, gpu.vector(q.lse, 0), gpu.vector(q.delta, 0)

    def body(
        pairs: TilePairs, q: QueryArrays, kv: KeyArrays, state: State, is_masked: bool
    ) -> State:
        dq, lse, delta = state
        shape = pairs.shape
        s = to_scores(ops.dot_products(q.q, kv.k), config.scale, config.softcap)
        if kv.poison is not None:
            s = s + gpu.along(gpu.vector(kv.poison, 1), shape, 1)
        p = jnp.exp2(s - gpu.along(lse, shape, 0))
        dp = ops.dot_products(q.do, kv.v)
        ds = _score_grad(p, dp, gpu.along(delta, shape, 0), s, config)
        mask = pairs.element_mask() if is_masked else None
        if mask is not None:
            ds = jnp.where(mask, ds, 0.0)
        zero = mask is not None and kv.poison is None
        dq = ops.add_product(dq, ds, kv.k, zero_nonfinite=zero)
        ops.release()
        return dq, lse, delta

    def epilogue(state: State) -> tuple[Array, ...]:
        return (state[0] * grad_scale,)

    return GpuKernelBody("dq", prologue, body, epilogue)


def dkv_body(config: BlockSparseConfig, launch: GpuLaunch, grad_scale: float) -> GpuKernelBody:
    """Rows are kv blocks; s [keys, queries]."""
    ops, rows = launch.ops, launch.schedule.outer.tile

    def prologue(kv: KeyArrays) -> State:
        arrays = launch.inputs.k, launch.inputs.v
        return tuple(gpu.full((rows, pad_features(x.shape[-1])), 0.0) for x in arrays)

    def body(
        pairs: TilePairs, kv: KeyArrays, q: QueryArrays, state: State, is_masked: bool
    ) -> State:
        dk, dv = state
        shape = pairs.shape
        s = to_scores(ops.dot_products(kv.k, q.q), config.scale, config.softcap)
        p = jnp.exp2(s - gpu.along(gpu.vector(q.lse, 1), shape, 1))
        mask = pairs.element_mask() if is_masked else None
        if mask is not None:
            p = jnp.where(mask, p, 0.0)
        dv = ops.add_product(dv, p, q.do)
        dp = ops.dot_products(kv.v, q.do)
        ds = _score_grad(p, dp, gpu.along(gpu.vector(q.delta, 1), shape, 1), s, config)
        if mask is not None:
            ds = jnp.where(mask, ds, 0.0)
        dk = ops.add_product(dk, ds, q.q)
        ops.release()
        return dk, dv

    def epilogue(state: State) -> tuple[Array, ...]:
        return state[0] * grad_scale, state[1]

    return GpuKernelBody("dkv", prologue, body, epilogue)


def to_scores(qk: Array, scale: float, softcap: float | None) -> Array:
    """Scores in base 2."""
    if softcap is None:
        return qk * (scale * BASE.factor)
    return _tanh(qk * (scale / softcap)) * (softcap * BASE.factor)


def _tanh(x: Array) -> Array:
    """tanh; the hardware's own has a relative error of 2^-11."""
    return 1 - 2 / (jnp.exp2(x * (2 * online_softmax.LOG2E)) + 1)


def _score_grad(p: Array, dp: Array, delta: Array, s: Array, config: BlockSparseConfig) -> Array:
    slope = online_softmax.softcap_grad(s, config.softcap, base=BASE)
    return online_softmax.score_grad(p, dp, delta, slope)
