"""Block-sparse attention for TPUs: forward, dq and dkv, each on one flat ragged grid.

A grid step computes a row: one query block, or one kv block for dkv. It reads only the blocks that
the row lists, a few of them per group; the next group is prefetched while this one is computed.
Scores are [keys, queries] where statistics are taken over keys: these then lie along lanes, and
reductions never cross lanes.

The bodies below run on refs: `q.q[...]` is [block_q, D]; a group of `inner` blocks is a list of
such refs. `is_masked` groups hold partial blocks and apply the element mask, the others do not.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from xsake.kernels import online_softmax
from xsake.kernels.batching import define_backend
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.mosaic_tpu import schedule
from xsake.kernels.block_sparse.mosaic_tpu.launch import Refs, TpuKernelBody, TpuLaunch
from xsake.kernels.block_sparse.mosaic_tpu.masking import GroupMasks, to_column
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.blocking import KeyArrays, QueryArrays
from xsake.kernels.mask_program import trace_mask, unsupported_mask
from xsake.kernels.online_softmax import backward_rows, isolate_nonfinite

LANES = 128
# TPUs have an instruction for e^x: a polynomial, as on CPUs, takes 1.8 times the bundles per block.
BASE = online_softmax.BASE_E
_FORWARD, _DQ, _DKV = range(3)  # indices of the passes in `count_passes`


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call on a TPU; None if it can."""
    dtype = inputs.q.dtype
    if inputs.bias is not None:
        return "it adds no bias to the logits"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"TPUs compute in float32 and bfloat16, not in {dtype}"
    if schedule.has_too_many_blocks(inputs):
        return "there are more blocks than 29 bits can number; use larger blocks"
    mask = inputs.layout.mask
    return unsupported_mask(None if mask is None else trace_mask(mask), inputs)


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes."""
    return cost.blockwise(inputs, *schedule.count_schedules(inputs, config), widens=False)


def forward_pass(
    inputs: BlockSparseInputs, config: BlockSparseConfig, interpret: Any = False
) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`, with a batch axis that `vmap` does not see."""
    launch = _launch(_FORWARD, schedule.schedule_queries(inputs, config), inputs, interpret)
    k, v = isolate_nonfinite(inputs.k, inputs.v)
    block_q, dv = inputs.layout.block_q, v.shape[-1]
    row = (1, block_q)
    o, lse = launch.run(
        forward_body(config),
        launch.cut_queries(_scale(inputs.q, config)),
        launch.cut_keys(k, v, transpose_values=True),
        results=[((dv, block_q), inputs.q.dtype), (row, jnp.float32)],
        scratch=[(dv, block_q), row, row],
        keys_first=True,
    )
    return launch.query_tokens(o.swapaxes(1, 2)), launch.query_tokens(lse[:, 0])


def dq_pass(
    inputs: BlockSparseInputs, config: BlockSparseConfig, *residuals: Array, interpret: Any = False
) -> Array:
    """dq [B, Tq, Hq, D] from (o, lse, do, dlse)."""
    launch = _launch(_DQ, schedule.schedule_queries(inputs, config), inputs, interpret)
    block = inputs.layout.block_q, inputs.q.shape[-1]
    column = block[0], LANES
    rows = backward_rows(jnp.float32, *residuals, base=BASE)
    (dq,) = launch.run(
        dq_body(config),
        launch.cut_queries(_scale(inputs.q, config), rows),
        launch.cut_keys(*isolate_nonfinite(inputs.k, inputs.v)),
        results=[(block, inputs.q.dtype)],
        scratch=[block, column, column],
        keys_first=False,
    )
    return launch.query_tokens(dq)


def dkv_pass(
    inputs: BlockSparseInputs, config: BlockSparseConfig, *residuals: Array, interpret: Any = False
) -> tuple[Array, Array]:
    """dk [B, Tk, Hk, D] and dv [B, Tk, Hk, Dv] from (o, lse, do, dlse)."""
    launch = _launch(_DKV, schedule.schedule_keys(inputs, config), inputs, interpret)
    blocks = [(inputs.layout.block_kv, x.shape[-1]) for x in (inputs.k, inputs.v)]
    rows = backward_rows(jnp.float32, *residuals, base=BASE)
    dk, dv = launch.run(
        dkv_body(config),
        launch.cut_keys(*isolate_nonfinite(inputs.k, inputs.v)),
        launch.cut_queries(_scale(inputs.q, config), rows),
        results=[(block, inputs.k.dtype) for block in blocks],
        scratch=blocks,
        keys_first=True,
    )
    return launch.key_tokens(dk), launch.key_tokens(dv)


forward, backward = define_backend(forward_pass, dq_pass, dkv_pass)


def forward_body(config: BlockSparseConfig) -> TpuKernelBody:
    """Online softmax; s [keys, queries], acc [Dv, queries]."""

    def prologue(q: QueryArrays, scratch: Refs) -> None:
        acc, m, l = scratch
        acc[...] = jnp.zeros_like(acc)
        m[...] = jnp.full_like(m, -jnp.inf)
        l[...] = jnp.zeros_like(l)

    def body(
        masks: GroupMasks, q: QueryArrays, kv: list[KeyArrays], scratch: Refs, is_masked: bool
    ) -> None:
        acc, m, l = scratch
        q_block, s = q.q[...], []
        for slot, block in enumerate(kv):
            s_block = _scores(block.k[...], q_block, config)
            if is_masked:
                s_block = jnp.where(masks.of_slot(slot, q, block), s_block, -jnp.inf)
            s.append(s_block)
        m_group = jnp.max(s[0], 0, keepdims=True)
        for s_block in s[1:]:
            m_group = jnp.maximum(m_group, jnp.max(s_block, 0, keepdims=True))
        m[...], m_safe, alpha = online_softmax.rescale(m[...], m_group, BASE)
        l_new, acc_new = l[...] * alpha, acc[...] * alpha
        for s_block, block in zip(s, kv, strict=True):
            p = online_softmax.probabilities(s_block, m_safe, base=BASE)
            l_new = l_new + jnp.sum(p, 0, keepdims=True)
            acc_new = acc_new + _dot(block.v[...], p)
        l[...], acc[...] = l_new, acc_new

    def epilogue(results: Refs, scratch: Refs) -> None:
        (o, lse), (acc, m, l) = results, scratch
        o[...] = online_softmax.normalize(acc[...], l[...]).astype(o.dtype)
        lse[...] = online_softmax.log_sum_exp(m[...], l[...], BASE)

    return TpuKernelBody("forward", prologue, body, epilogue)


def dq_body(config: BlockSparseConfig) -> TpuKernelBody:
    """s [queries, keys]: no statistics are taken, and dq needs no tile transposed.

    Here and for dkv all products of a group come first, then the elementwise part, then the sums:
    slot after slot would take a third more bundles.
    """

    def prologue(q: QueryArrays, scratch: Refs) -> None:
        dq, lse, delta = scratch
        dq[...] = jnp.zeros_like(dq)
        lse[...] = to_column(q.lse[...], LANES)
        delta[...] = to_column(q.delta[...], LANES)

    def body(
        masks: GroupMasks, q: QueryArrays, kv: list[KeyArrays], scratch: Refs, is_masked: bool
    ) -> None:
        dq, lse, delta = scratch
        q_block, do = q.q[...], q.do[...]
        s = [_scores(q_block, block.k[...], config) for block in kv]
        dp = [_dot_t(do, block.v[...]) for block in kv]
        lse, delta = (_widen(x[...], s[0].shape[1]) for x in (lse, delta))
        ds = [_p_and_ds(*x, lse, delta, config)[1] for x in zip(s, dp, strict=True)]
        dq_new = dq[...]
        for slot, (block, ds_block) in enumerate(zip(kv, ds, strict=True)):
            k = block.k[...]
            if is_masked:
                ds_block = jnp.where(masks.of_slot(slot, q, block), ds_block, 0)
                k = _zero_nonfinite(k)
            dq_new = dq_new + _dot(ds_block, k)
        dq[...] = dq_new

    def epilogue(results: Refs, scratch: Refs) -> None:
        (dq,), (acc, _, _) = results, scratch
        dq[...] = (acc[...] * config.scale).astype(dq.dtype)

    return TpuKernelBody("dq", prologue, body, epilogue)


def dkv_body(config: BlockSparseConfig) -> TpuKernelBody:
    """Rows are kv blocks; s [keys, queries]."""

    def prologue(kv: KeyArrays, scratch: Refs) -> None:
        for acc in scratch:
            acc[...] = jnp.zeros_like(acc)

    def body(
        masks: GroupMasks, kv: KeyArrays, queries: list[QueryArrays], scratch: Refs, is_masked: bool
    ) -> None:
        k, v = kv.k[...], kv.v[...]
        s = [_scores(k, block.q[...], config) for block in queries]
        dp = [_dot_t(v, block.do[...]) for block in queries]
        p_ds = [
            _p_and_ds(s_block, dp_block, block.lse[...], block.delta[...], config)
            for s_block, dp_block, block in zip(s, dp, queries, strict=True)
        ]
        dk, dv = (acc[...] for acc in scratch)
        for slot, (block, (p, ds)) in enumerate(zip(queries, p_ds, strict=True)):
            q = block.q[...]
            if is_masked:
                mask = masks.of_slot(slot, block, kv)
                p, ds = (jnp.where(mask, x, 0) for x in (p, ds))
                q = _zero_nonfinite(q)
            dk, dv = dk + _dot(ds, q), dv + _dot(p, block.do[...])
        for acc, new in zip(scratch, (dk, dv), strict=True):
            acc[...] = new

    def epilogue(results: Refs, scratch: Refs) -> None:
        (dk, dv), (dk_acc, dv_acc) = results, scratch
        dk[...] = (dk_acc[...] * _late_scale(dk.dtype, config)).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)

    return TpuKernelBody("dkv", prologue, body, epilogue)


def _launch(
    index: int, made: schedule.TpuSchedule, inputs: BlockSparseInputs, interpret: Any
) -> TpuLaunch:
    """Launch of the pass `count_passes()[index]`, with its cost for the compiler's scheduler."""
    layout, own = inputs.layout, schedule.count_schedule(made, inputs)
    # A pass depends on its own schedule only, so the other one is not built for the estimate.
    counted = cost.blockwise(inputs, own, own, widens=False)[index]
    launches = counted.launches or 1
    estimate = pl.CostEstimate(
        flops=counted.flops // launches,
        transcendentals=counted.listed * layout.block_q * layout.block_kv // launches,
        bytes_accessed=(counted.bytes_read + counted.bytes_written) // launches,
    )
    return TpuLaunch(inputs, made, interpret, estimate)


def _p_and_ds(
    s: Array, dp: Array, lse: Array, delta: Array, config: BlockSparseConfig
) -> tuple[Array, Array]:
    """`(p, ds)` of a tile."""
    p = online_softmax.probabilities(s, lse, base=BASE)
    slope = online_softmax.softcap_grad(s, config.softcap, base=BASE)
    return p, online_softmax.score_grad(p, dp, delta, slope)


def _widen(x: Array, width: int) -> Array:
    """[n, LANES], equal along lanes -> an array that broadcasts to [n, width] within lanes."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), 1) if width % LANES == 0 else x[:, :1]


def _scale(q: Array, config: BlockSparseConfig) -> Array:
    """Scale queries, unless that would round them to bfloat16 again."""
    return q * config.scale if q.dtype == jnp.float32 else q


def _late_scale(dtype: Any, config: BlockSparseConfig) -> float:
    """The scale that `_scale` leaves out."""
    return 1.0 if dtype == jnp.float32 else config.scale


def _scores(a: Array, b: Array, config: BlockSparseConfig) -> Array:
    """Scores of two lists of vectors."""
    qk = _dot_t(a, b) * _late_scale(a.dtype, config)
    return online_softmax.to_scores(qk, None, config.softcap, BASE)


def _dot_t(a: Array, b: Array) -> Array:
    """[m, D] x [n, D] -> [m, n]."""
    return _dot_general(a, b, 1)


def _dot(a: Array, b: Array) -> Array:
    """[m, n] x [n, D] -> [m, D], in the dtype of the operand that came from memory."""
    narrow = a.dtype if a.dtype != jnp.float32 else b.dtype
    return _dot_general(a.astype(narrow), b.astype(narrow), 0)


def _dot_general(a: Array, b: Array, axis: int) -> Array:
    """Contract the last axis of `a` with an axis of `b`."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = ((1,), (axis,)), ((), ())
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _zero_nonfinite(x: Array) -> Array:
    """`zero_nonfinite` by way of float32: TPUs have isfinite for no other dtype."""
    return online_softmax.zero_nonfinite(x.astype(jnp.float32)).astype(x.dtype)
