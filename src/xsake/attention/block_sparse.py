"""`xsake.attention`: differentiable block-sparse attention on [B, T, H, D] arrays."""

import numpy as np
from jaxtyping import Array, Float

from xsake.attention.runtime_pruning import prune_blocks
from xsake.attention.sharded import attention_by_sharding
from xsake.attention.validation import LogitsSpec, MaskSpec, canonicalize_args, no_runtime_typecheck
from xsake.kernels.block_sparse.api import block_sparse
from xsake.kernels.dispatch import Implementation
from xsake.kernels.sharding import placing_of
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


@no_runtime_typecheck
def attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"],
    v: Float[Array | np.ndarray, "B Tk Hk Dv"],
    *,
    mask: AbstractMask | None = None,
    layout: BlockLayout | None = None,
    bias: Float[Array | np.ndarray, "Bb Hb Tq Tk"] | None = None,
    sinks: Float[Array | np.ndarray, "Hq *S"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_positions=None,
    kv_positions=None,
    return_lse: bool = False,
    implementation: Implementation = None,
):
    """Compute attention only in blocks with at least one allowed pair.

    `out_i = sum_j softmax_j(s_ij) v_j` with `s = softcap(scale * q.k + bias)`, over pairs that
    the mask allows, the layout lists, and whose segment ids are equal. A fully masked query gets
    zeros and no gradient. Differentiable in q, k, v, bias and sinks; works under `jit`, `grad`,
    `vmap`, `jax.checkpoint`, `jax.shard_map` and `jax.export`. Batch and heads stay sharded if
    the arrays' types are sharded over a mesh.

    Args:
        q: queries [B, Tq, Hq, D].
        k: keys [B, Tk, Hk, D]; each kv head serves Hq / Hk query heads.
        v: values [B, Tk, Hk, Dv].
        mask: rule on positions (`xsake.masks`); None allows every pair.
        layout: blocks to compute; None derives them from the mask, in blocks of 128.
        bias: added to the logits, [B or 1, Hq or 1, Tq, Tk].
        sinks: logits added to the softmax denominator without values, [Hq] or [Hq, S].
        softcap: logits become `softcap * tanh(logits / softcap)`.
        scale: factor on q.k; None is 1 / sqrt(D).
        q_segment_ids: [B, Tq]; only equal ids attend to each other, negative ids are padding.
        kv_segment_ids: [B, Tk]; defaults to `q_segment_ids` if Tq == Tk.
        q_positions: positions for the mask, [Tq] or [B, Tq]; None is 0, 1, 2, ...
        kv_positions: the same for keys.
        return_lse: also return the log-sum-exp, [B, Tq, Hq].
        implementation: "mosaic_gpu_hopper", "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None
            selects one for the platform. A named one is used or raises.

    Returns:
        The output [B, Tq, Hq, Dv] in the dtype of q, or `(output, lse)`.

    Example:
        >>> import jax, jax.numpy as jnp, xsake
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 64))
        >>> mask = xsake.masks.Causal() & xsake.masks.Window(left=127, right=0)
        >>> xsake.attention(q, k, v, mask=mask).shape
        (1, 300, 4, 64)
    """
    masking = MaskSpec(mask, layout, q_segment_ids, kv_segment_ids, q_positions, kv_positions)
    out, lse = attention_with_lse(
        q, k, v, masking, LogitsSpec(scale, softcap, bias, sinks), implementation
    )
    return (out, lse) if return_lse else out


def attention_with_lse(
    q, k, v, masking: MaskSpec, logits: LogitsSpec, implementation: Implementation
):
    """Return `(out, lse)` of a call with grouped arguments."""
    operands, problem, sinks = canonicalize_args(q, k, v, masking, logits)
    placing = placing_of(q=operands.q, k=operands.k, v=operands.v)
    if placing is not None:
        return attention_by_sharding(placing, operands, problem, implementation, sinks)
    inputs = prune_blocks(operands)
    return block_sparse(inputs, problem, implementation=implementation, sinks=sinks)
