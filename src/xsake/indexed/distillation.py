"""Training of an indexer: KL of its scores from the attention that it shall imitate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from xsake.indexed.api import BlockIndices, check_index
from xsake.indexed.config import Config
from xsake.kernels.blocking import pad_axis
from xsake.kernels.validation import (
    check_arrays,
    no_runtime_typecheck,
    number,
    scale_or_default,
    sum_dtype,
)

LOGITS = 2**22  # of a chunk of queries


@no_runtime_typecheck
def distillation_loss(
    q: Float[Array | np.ndarray, "B T Hq D"],
    k: Float[Array | np.ndarray, "B T Hk D"],
    index_q: Float[Array | np.ndarray, "B T Hi Di"],
    index_k: Float[Array | np.ndarray, "B T Hs Di"],
    *,
    index_weights: Float[Array | np.ndarray, "B T Hi"] | None = None,
    blocks: Int[Array | np.ndarray, "B T Hk Ns"] | None = None,
    config: Config = Config(),  # noqa: B008 (frozen)
    scale: float | None = None,
    index_scale: float | None = None,
) -> Float[Array, "B T Hg"]:
    """Compute KL(attention || index) of every query, and list of blocks, over the keys it sees.

    The attention is the mean over the query heads that share a list, and is not differentiated; the
    index is a softmax over `index_scale * q.k` of the index arrays. Without `blocks` all earlier
    keys count (warm-up with dense attention: quadratic time); with `blocks` those of the selected
    blocks (linear time). Memory is linear in T in both cases.

    Args:
        q: queries.
        k: keys.
        index_q: index queries, as in `attention`.
        index_k: index keys.
        index_weights: factor on the product of each index head.
        blocks: selected blocks, of `attention(..., return_blocks=True)`; None: all keys.
        config: block size and scores.
        scale: factor on q.k; None is 1 / sqrt(D).
        index_scale: factor on the index score of a key; None is 1 / sqrt(Di).

    Returns:
        Nats of every query and list; there is one list per kv head, or one if `config.is_shared`.

    Example:
        >>> import jax
        >>> from xsake import indexed
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 2, 16))
        >>> same = indexed.distillation_loss(q, q, q, q)
        >>> other = indexed.distillation_loss(q, q, q[..., ::-1], q)
        >>> bool(abs(same).max() < 1e-5), bool(other.mean() > 0.1)
        (True, True)
    """
    q, k = lax.stop_gradient((jnp.asarray(q), jnp.asarray(k)))
    check_arrays(q, k, k)
    index = check_index(index_q, index_k, index_weights, q=q, k=k, config=config)
    scale = scale_or_default(scale, q)
    if index_scale is not None:
        index_scale = number("index_scale", index_scale, "None is 1 / sqrt(Di)")
    index_scale = scale_or_default(index_scale, index.q)
    batch, tokens, q_heads, _ = q.shape
    groups = 1 if config.is_shared else k.shape[2]
    keys = tokens if blocks is None else blocks.shape[3] * config.size
    chunk = min(tokens, max(8, LOGITS // (batch * max(q_heads, index.q.shape[2]) * keys)))

    def cut(x: Array, fill: int = 0) -> Array:
        x = pad_axis(x, 1, -(-tokens // chunk) * chunk, fill)
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    position = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    lists = None if blocks is None else cut(jnp.asarray(blocks)[:, :, :groups], -1)
    weights = None if index.weights is None else cut(index.weights)
    rows = _Rows(cut(q), cut(index.q), weights, cut(position, -1), lists)
    wide = sum_dtype(q.dtype)
    pairs = _Keys(k.astype(wide), index.k.astype(wide), groups, config)
    # Not kept for the backward pass: a chunk computes its logits again.
    loss = jax.checkpoint(lambda rows: _chunk_loss(rows, pairs, scale, index_scale))
    nats = jnp.moveaxis(lax.map(loss, rows), 0, 1)
    return nats.reshape(batch, -1, groups)[:, :tokens]


class _Rows(NamedTuple):
    """A chunk of queries."""

    q: Float[Array, "B chunk Hq D"]
    index_q: Float[Array, "B chunk Hi Di"]
    weights: Float[Array, "B chunk Hi"] | None
    position: Int[Array, "B chunk"]  # -1: padding
    blocks: BlockIndices | None


class _Keys(NamedTuple):
    """What all chunks share."""

    k: Float[Array, "B T Hk D"]
    index_k: Float[Array, "B T Hs Di"]
    groups: int
    config: Config


def _chunk_loss(
    rows: _Rows, keys: _Keys, scale: float, index_scale: float
) -> Float[Array, "B chunk Hg"]:
    groups, batch, chunk = keys.groups, *rows.position.shape
    by_group = lambda x: x.reshape(batch, chunk, groups, -1, *x.shape[3:])
    q, index_q = by_group(rows.q.astype(keys.k.dtype)), by_group(rows.index_q.astype(keys.k.dtype))
    heads = keys.k.shape[2] // groups  # kv heads of a list
    q = q.reshape(*q.shape[:3], heads, -1, q.shape[-1])
    index_k = jnp.broadcast_to(keys.index_k, (*keys.index_k.shape[:2], groups, index_q.shape[-1]))
    k = keys.k.reshape(*keys.k.shape[:2], groups, heads, -1)
    if rows.blocks is None:
        seen = jnp.arange(k.shape[1])[None, None, None] <= rows.position[..., None, None]
        s = jnp.einsum("btghnd,bsghd->btghns", q, k)
        r = jnp.einsum("btgnd,bsgd->btgns", index_q, index_k)
    else:
        size = keys.config.size
        at = rows.blocks[..., None] * size + jnp.arange(size)[None, None, None, None]
        seen = (at >= 0) & (at <= rows.position[..., None, None, None])
        at, seen = (x.reshape(*x.shape[:3], -1) for x in (at, seen))
        s = jnp.einsum("btghnd,btgshd->btghns", q, _gather(k, at))
        r = jnp.einsum("btgnd,btgsd->btgns", index_q, _gather(index_k, at))
    p = _log_softmax(s * scale, seen[:, :, :, None, None])
    p = jnp.exp(p).mean((3, 4))
    r = jnp.maximum(r, 0) if keys.config.has_relu else r
    r = r if rows.weights is None else r * by_group(rows.weights).astype(r.dtype)[..., None]
    log_r = _log_softmax(r.sum(3) * index_scale, seen)
    return jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - log_r), 0).sum(-1)


def _gather(x: Float[Array, "B T Hg ..."], at: Int[Array, "B chunk Hg n"]) -> Array:
    """Tokens of each list: [B, chunk, Hg, n, ...]."""
    at = jnp.clip(at, 0, x.shape[1] - 1)
    rows, heads = jnp.arange(x.shape[0])[:, None, None, None], jnp.arange(x.shape[2])
    return x[rows, at, heads[None, None, :, None]]


def _log_softmax(s: Array, seen: Bool[Array, "..."]) -> Array:
    """Log of the softmax over what is seen; a large negative number elsewhere."""
    s = jnp.where(seen, s, -1e30)
    return jnp.where(seen, jax.nn.log_softmax(s, axis=-1), -1e30)
