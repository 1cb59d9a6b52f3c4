"""Second-order estimate of the KL caused by pruning a head, from gradients.

Pruning changes the output of a head for query i by `e_i`. With `g_i` the gradient of the
log-probability of tokens sampled from the model, KL(dense || sparse) of its predictions is
`1/2 sum_i E[(g_i . e_i)^2]` to second order, ignoring other heads and cross terms. Both factors
need one number per query and block, `g . sum_j p_j v_j`, so no sparse pass has to run.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.attention.layer_call import LayerCall
from xsake.hads.budget import ForcedBlocks
from xsake.hads.curves import MIN_MASS
from xsake.hads.hooks import BackwardHook
from xsake.hads.selectors import ScoringContext, Selector, correct_masses
from xsake.layout.grid import count_blocks

QUERY_CHUNK = 64  # queries per step; larger chunks do not fit the CPU cache
NUM_SEGMENTS = 4  # of a document; each is padded to its last visible key and compiled once
MASKED = -1e30  # score of a masked key


def make_effect_hook(
    selectors: Sequence[Selector],
    weights: Mapping[str, Float[np.ndarray, "L Hq 3"]],
    components: Int[np.ndarray, "L Hk D"],
    block: int,
    forced: ForcedBlocks,
) -> BackwardHook:
    """Build a `BackwardHook` whose gradient is the effect of each head, by selector and level."""
    corrections = {name: jnp.asarray(each, jnp.float32) for name, each in weights.items()}
    ordered = jnp.asarray(components)

    def effects(q, k, v, layer, grad, context: ScoringContext):
        by_selector = {}
        for selector in selectors:
            estimate = selector.masses(q, k, context, ordered[layer])
            corrected = correct_masses(estimate, corrections[selector.name][layer])
            order = _block_order(corrected, forced)
            by_selector[selector.name] = head_effects(q, k, v, grad, order, context, forced)
        return by_selector

    def hook(out, q, k, v, call: LayerCall, perturbation):
        context = ScoringContext(block, call.scale, call.mask, call.softcap)

        @jax.custom_vjp
        def identity(out, q, k, v, layer, perturbation):
            return out

        def forward(out, q, k, v, layer, perturbation):
            return out, (q, k, v, layer)

        def backward(residuals, grad):
            q, k, v, layer = residuals
            zeros = (jnp.zeros_like(x) for x in (q, k, v))
            return grad, *zeros, None, effects(q, k, v, layer, grad, context)

        identity.defvjp(forward, backward)
        of_layer = {name: each[call.layer] for name, each in perturbation.items()}
        return identity(out, q, k, v, jnp.asarray(call.layer), of_layer)

    return hook


def head_effects(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hk D"],
    v: Float[Array, "B T Hk D"],
    grad: Float[Array, "B T Hq D"],
    order: Int[Array, "B Hq Nq Nk"],
    context: ScoringContext,
    forced: ForcedBlocks,
) -> Float[Array, "B Hq levels"]:
    """Return the KL that each head causes alone with max(forced, k) blocks per row, k in 0..n.

    `grad` is the gradient of the log-probability with respect to the attention output, `order` the
    blocks of each row in the order of selection. The unit is nats per token.
    """
    tokens, n = q.shape[1], order.shape[-1]
    rows = max(QUERY_CHUNK // context.block, 1)
    size = rows * context.block
    chunks = count_blocks(tokens, size)
    split = lambda x: jnp.moveaxis(_pad(x, chunks * size).reshape(
        x.shape[0], chunks, size, *x.shape[2:]), 1, 0)  # fmt: skip
    order = jnp.pad(order, ((0, 0), (0, 0), (0, chunks * rows - n), (0, 0)))
    order = jnp.moveaxis(order.reshape(*order.shape[:2], chunks, rows, n), 2, 0)
    parts = jnp.arange(chunks), split(q), split(grad), order
    keys, values = (_pad(x, chunks * size) for x in (k, v))

    def changes(part, blocks: int):
        number, q, grad, order = part
        visible = keys[:, : blocks * context.block], values[:, : blocks * context.block]
        masses, moves = _block_sums(q, *visible, grad, number * size, tokens, context)
        padding = ((0, 0),) * 4 + ((0, max(n - blocks, 0)),)
        picked = jnp.broadcast_to(order[:, :, :, None], (*masses.shape[:4], n))
        kept, moved = (
            jnp.cumsum(jnp.take_along_axis(jnp.pad(x, padding), picked, axis=-1), axis=-1)
            for x in (masses, moves)
        )
        change = moved / jnp.maximum(kept, MIN_MASS) - moved[..., -1:]
        return jnp.square(change).sum(3)  # [B, Hq, rows, blocks kept - 1]

    segments = []
    bounds = sorted({chunks * part // NUM_SEGMENTS for part in range(NUM_SEGMENTS + 1)})
    for first, last in itertools.pairwise(bounds):  # later blocks are masked
        segment = jax.tree.map(lambda x, a=first, b=last: x[a:b], parts)
        segments.append(jax.lax.map(lambda part, b=last * rows: changes(part, b), segment))
    change = jnp.moveaxis(jnp.concatenate(segments), 0, 2)
    change = change.reshape(*change.shape[:2], chunks * rows, n)[:, :, :n]
    levels = np.maximum(np.arange(n + 1)[None], forced.counts(n)[:, None]) - 1
    levels = np.broadcast_to(levels, (*change.shape[:2], *levels.shape))
    return jnp.take_along_axis(change, levels, axis=-1).sum(2) / (2 * tokens)


def _block_sums(q, k, v, grad, start, tokens: int, context: ScoringContext):
    """Return block masses and `g . sum_j p_j v_j` of blocks: [B, Hq, rows, block, Nk] each."""
    batch, queries, heads, dim = q.shape
    group = heads // k.shape[2]
    by_group = lambda x: x.reshape(batch, queries, -1, group, dim).astype(jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", by_group(q) * context.scale, k.astype(jnp.float32))
    if context.softcap is not None:
        scores = context.softcap * jnp.tanh(scores / context.softcap)
    scores = scores.reshape(batch, heads, queries, -1)
    q_pos = start + jnp.arange(queries, dtype=jnp.int32)[None, :, None]
    kv_pos = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
    head = None
    if context.mask.heads is not None:
        head = (np.arange(heads, dtype=np.int32) * context.mask.heads // heads)[:, None, None]
    visible = context.mask.allows(q_pos, kv_pos, head) & (kv_pos < tokens) & (q_pos < tokens)
    scores = jnp.where(visible[None], scores, MASKED)
    m = jnp.maximum(scores.max(-1, keepdims=True), MASKED / 2)
    p = jnp.exp(scores - m)
    dp = jnp.einsum("bqhgd,bkhd->bhgqk", by_group(grad), v.astype(jnp.float32))
    split = lambda x: x.reshape(
        batch, heads, -1, context.block, k.shape[1] // context.block, context.block
    )
    masses, moves = split(p).sum(-1), split(p * dp.reshape(p.shape)).sum(-1)
    inverse = 1 / jnp.maximum(masses.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return masses * inverse, moves * inverse


def _block_order(
    masses: Float[Array, "B Hq Nq Nk"], forced: ForcedBlocks
) -> Int[Array, "B Hq Nq Nk"]:
    """Return the blocks of each row: forced ones, then by descending mass, masked ones last."""
    n = masses.shape[-1]
    ranked = jnp.where(np.tri(n, dtype=bool), jnp.maximum(masses, 0), -1)
    return jnp.argsort(-jnp.where(forced.grid(n), jnp.inf, ranked), axis=-1, stable=True)


def _pad(x: Float[Array, "B T *rest"], tokens: int) -> Float[Array, "B padded *rest"]:
    return jnp.pad(x, ((0, 0), (0, tokens - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
