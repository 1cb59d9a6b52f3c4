"""`xsake.attention`: differentiable block-sparse attention on [B, T, H, D] arrays."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from xsake.attention.runtime_pruning import prune_blocks
from xsake.attention.sharded import attention_on_mesh
from xsake.attention.types import AttentionArgs, Implementation, Mask
from xsake.attention.validation import canonicalize_args, make_output
from xsake.kernels import dispatch
from xsake.kernels.block_sparse.api import block_sparse
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.sharding import placing_of
from xsake.kernels.validation import no_runtime_typecheck
from xsake.layout import BlockLayout


@no_runtime_typecheck
def attention(
    q: Float[Array | np.ndarray, "*B Tq Hq D"],
    k: Float[Array | np.ndarray, "*B Tk Hk D"],
    v: Float[Array | np.ndarray, "*B Tk Hk Dv"],
    *,
    mask: Mask = None,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    layout: BlockLayout | None = None,
    block_size: int | tuple[int, int] | None = None,
    bias: Float[Array | np.ndarray, "..."] | None = None,
    sinks: Float[Array | np.ndarray, "Hq *S"] | None = None,
    softcap: float | None = None,
    scale: float | Float[Array, ""] | None = None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_positions=None,
    kv_positions=None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Any:
    """Compute attention only in blocks with at least one allowed pair.

    `out_i = sum_j softmax_j(s_ij) v_j` with `s = softcap(scale * q.k + bias)`, over pairs that
    the mask allows, the layout lists, and whose segment ids are equal. A fully masked query gets
    zeros and no gradient. Differentiable in q, k, v, bias and sinks; works under `jit`, `grad`,
    `vmap`, `jax.checkpoint`, `jax.shard_map` and `jax.export`. Batch and heads stay sharded if
    the arrays' types are sharded over a mesh.

    Args:
        q: queries [B, Tq, Hq, D]; without B if k and v have none either.
        k: keys [B, Tk, Hk, D]; each kv head serves Hq / Hk query heads.
        v: values [B, Tk, Hk, Dv].
        mask: rule on positions (`xsake.masks`), its expression ("causal & window(1023, 0)"), or
            booleans that broadcast to [B, Hq, Tq, Tk]; None allows every pair. Booleans that are
            traced or differ within the batch need a bias of that size, and skip blocks at run time.
        is_causal: also restrict to keys up to the query's position.
        window: also restrict to (left, right) tokens around it; one number for both.
        layout: blocks to compute; None derives them from the mask.
        block_size: of a derived layout, tokens or (q, kv); None is 128.
        bias: added to the logits; broadcasts to [B, Hq, Tq, Tk].
        sinks: logits added to the softmax denominator without values, [Hq] or [Hq, S].
        softcap: logits become `softcap * tanh(logits / softcap)`.
        scale: factor on q.k; None is 1 / sqrt(D). A traced one multiplies q, in the dtype of q.
        q_segment_ids: [B, Tq]; only equal ids attend to each other, negative ids are padding.
        kv_segment_ids: [B, Tk]; defaults to `q_segment_ids` if Tq == Tk.
        q_positions: positions for the mask, [Tq] or [B, Tq]; None is 0, 1, 2, ...
        kv_positions: the same for keys.
        return_lse: also return the log-sum-exp, [B, Tq, Hq].
        implementation: name of a backend, or names in order of preference, which run or raise;
            None selects one for the platform.

    Returns:
        The output [B, Tq, Hq, Dv] in the dtype of q, or `(output, lse)`.

    Example:
        >>> import jax, jax.numpy as jnp, xsake
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 64))
        >>> xsake.attention(q, k, v, is_causal=True, window=(127, 0)).shape
        (1, 300, 4, 64)
    """
    args = AttentionArgs(
        mask, is_causal, window, layout, block_size, bias, sinks, softcap, scale,
        q_segment_ids, kv_segment_ids, q_positions, kv_positions,
    )  # fmt: skip
    inputs, config, sinks = canonicalize_args(q, k, v, args)
    return make_output(q, *attend(inputs, config, implementation, sinks), return_lse)


def attend(
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    implementation: dispatch.Implementation,
    sinks: Float[Array, "Hq S"] | None,
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Return `(o, lse)` of a validated call, with the sharding of its arrays."""
    placing = placing_of(q=inputs.q, k=inputs.k, v=inputs.v)
    if placing is not None:
        return attention_on_mesh(placing, inputs, config, implementation, sinks)
    runtime_rules = inputs.q_positions, inputs.kv_positions, inputs.q_segment_ids
    if any(x is not None for x in runtime_rules):
        inputs = prune_blocks(inputs)
    return block_sparse(inputs, config, implementation=implementation, sinks=sinks)
