"""`xsake.attention`: block-sparse attention on [B, T, H, D] arrays, differentiable, any mask."""

import numpy as np
from jaxtyping import Array, Float

from xsake.attention.arguments import Rules, Scores, checks_itself, complete
from xsake.attention.sharded import attend_in_place
from xsake.attention.visibility import narrowed
from xsake.kernels import select
from xsake.kernels.block_sparse.op import block_sparse
from xsake.kernels.placed import placing_of
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


@checks_itself
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
    implementation: str | None = None,
):
    """Attention that computes only the blocks in which a query may see a key.

    `out_i = sum_j softmax_j(s_ij) v_j` with `s = softcap(scale * q.k + bias)`, over the pairs that
    the mask allows, the layout lists, and whose segment ids are equal. A query that may see nothing
    gets zeros, and no gradient. Differentiable in q, k, v, bias and sinks; works under `jit`,
    `grad`, `vmap`, `jax.checkpoint`, `jax.shard_map` and `jax.export`. Arrays whose types split
    batch and heads over a mesh stay split.

    Args:
        q: queries [B, Tq, Hq, D].
        k: keys [B, Tk, Hk, D]; each kv head serves Hq / Hk query heads.
        v: values [B, Tk, Hk, Dv].
        mask: who may see whom, by position (`xsake.masks`); None allows every pair.
        layout: the blocks to compute; None derives them from the mask, in blocks of 128.
        bias: added to the logits, [B or 1, Hq or 1, Tq, Tk].
        sinks: logits that join the softmax denominator and carry no value, [Hq] or [Hq, S].
        softcap: logits become `softcap * tanh(logits / softcap)`.
        scale: factor on q.k; None is 1 / sqrt(D).
        q_segment_ids: [B, Tq]; only equal ids see each other, negative ids are padding.
        kv_segment_ids: [B, Tk]; None takes `q_segment_ids` when Tq == Tk.
        q_positions: positions the mask sees, [Tq] or [B, Tq]; None is 0, 1, 2, ...
        kv_positions: likewise for keys.
        return_lse: also return the log of the softmax denominator, [B, Tq, Hq].
        implementation: "mosaic_gpu_hopper", "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None
            picks for the platform that the call is compiled for. A named one runs or raises.

    Returns:
        The output [B, Tq, Hq, Dv] in the dtype of q, or `(output, lse)`.

    Example:
        >>> import jax, jax.numpy as jnp, xsake
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 64))
        >>> mask = xsake.masks.Causal() & xsake.masks.Window(left=127, right=0)
        >>> xsake.attention(q, k, v, mask=mask).shape
        (1, 300, 4, 64)
    """
    rules = Rules(mask, layout, q_segment_ids, kv_segment_ids, q_positions, kv_positions)
    out, lse = attend(q, k, v, rules, Scores(scale, softcap, bias, sinks), implementation)
    return (out, lse) if return_lse else out


def attend(q, k, v, rules: Rules, scores: Scores, implementation: str | None):
    """`(out, lse)` of a call whose arguments are grouped but not yet checked."""
    operands, problem, sinks = complete(q, k, v, rules, scores)
    backend = select.choices(operands, problem, implementation)
    placing = placing_of(q=operands.q, k=operands.k, v=operands.v)
    if placing is not None:
        return attend_in_place(placing, operands, problem, backend, sinks)
    return block_sparse(narrowed(operands), problem, backend=backend, sinks=sinks)
