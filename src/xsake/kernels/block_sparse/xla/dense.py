"""Short sequences: all pairs of a few batch elements at once, without block lists.

A single block has nothing to skip, and two or three blocks that are mostly padding cost more than
all pairs that exist.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, Gradients
from xsake.kernels.blocking import TokenBlocks
from xsake.kernels.element_mask import ExpandedSide, element_mask, rule_of_heads
from xsake.kernels.online_softmax import isolate_nonfinite, zero_nonfinite
from xsake.kernels.validation import sum_dtype
from xsake.layout import BlockLayout
from xsake.layout.csr import item_rows, namespace

MAX_BLOCKS = 3  # of a sequence that is mostly padding
MAX_FILLED = 0.62  # a causal list computes two thirds to three quarters of three blocks
STEP_LOGITS = 12 * 128 * 512  # of a step, as in the loop over lists


def is_dense(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str) -> bool:
    """Whether all pairs are computed; shapes alone decide, so no batch changes the answer."""
    layout = inputs.layout
    if platform != "cpu" or config.tiles is not None:
        return False
    if layout.q_blocks == layout.kv_blocks == 1:
        return True
    padded = layout.q_blocks * layout.block_q * layout.kv_blocks * layout.block_kv
    is_short = max(layout.q_blocks, layout.kv_blocks) <= MAX_BLOCKS
    return is_short and layout.q_tokens * layout.kv_tokens <= MAX_FILLED * padded


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    dtype = sum_dtype(inputs.q.dtype)

    def run(part: _Part):
        fold = _Fold(part.q, part.k)
        q, k, v = _load(part, fold, config, dtype)
        bias = None if part.bias is None else fold.pairs(part.bias.astype(q.dtype))
        s = online_softmax.to_scores(online_softmax.dot_products(q, k), bias, config.softcap)
        visible = _visible(part, inputs.layout)
        if visible is not None:
            s = jnp.where(fold.pairs(visible), s, -jnp.inf)
        state = online_softmax.init(q.shape[0], q.shape[1], v.shape[-1], q.dtype)
        out, lse = (
            fold.undo_queries(x)
            for x in online_softmax.finalize(online_softmax.update(state, s, v))
        )
        return out.astype(part.q.dtype), lse

    return _by_batch(run, _parts(inputs))


def backward(inputs: BlockSparseInputs, config: BlockSparseConfig, *residuals: Array) -> Gradients:
    """Gradients for q, k, v and bias from (o, lse, do, dlse); p is recomputed."""
    dtype, softcap = sum_dtype(inputs.q.dtype), config.softcap

    def run(part: _Part):
        """Tiles are [rows, keys, queries], which no product has to transpose."""
        fold = _Fold(part.q, part.k)
        q, k, v = _load(part, fold, config, dtype)
        do, lse, delta = (fold.queries(x) for x in part.residuals)
        do, transpose = do.astype(dtype), lambda x: x.swapaxes(1, 2)
        bias = None if part.bias is None else transpose(fold.pairs(part.bias.astype(dtype)))
        s = online_softmax.to_scores(online_softmax.dot_products(k, q), bias, softcap)
        visible = _visible(part, inputs.layout)
        mask = None if visible is None else transpose(fold.pairs(visible))
        keep = lambda x: x if mask is None else jnp.where(mask, x, 0)
        p = keep(online_softmax.probabilities(s, lse[:, None]))
        p = online_softmax.normalize(p, p.sum(1, keepdims=True))  # removes the rounding of lse
        dp, slope = online_softmax.dot_products(v, do), online_softmax.softcap_grad(s, softcap)
        ds = keep(online_softmax.score_grad(p, dp, delta[:, None], slope))
        q, k = (q, k) if mask is None else (zero_nonfinite(q), zero_nonfinite(k))
        dq = transpose(online_softmax.matmul(transpose(k), ds)) * jnp.asarray(config.scale, dtype)
        # The queries came with query_factor, the gradient takes `scale`.
        dk = online_softmax.matmul(ds, q) / (online_softmax.LOG2E if softcap is None else 1)
        dk, dv = fold.undo_keys(dk), fold.undo_keys(online_softmax.matmul(p, do))
        dbias = None
        if part.bias is not None:
            dbias = fold.sum_pairs(transpose(ds), part.bias.shape)
        return fold.undo_queries(dq).astype(part.q.dtype), dk, dv, dbias

    rows = online_softmax.backward_rows(dtype, *residuals)
    dq, dk, dv, dbias = _by_batch(run, _parts(inputs, rows))
    if inputs.bias is not None:
        shared = inputs.bias.shape[0] == 1
        dbias = dbias.sum(0, keepdims=True) if shared else dbias
        dbias = dbias.astype(inputs.bias.dtype)
    return Gradients(dq, dk.astype(inputs.k.dtype), dv.astype(inputs.v.dtype), dbias)


class _Part(NamedTuple):
    """Arrays of some batch elements; the first axis is 1 where all elements share an array."""

    q: Any
    k: Any
    v: Any
    codes: Any  # int8 [B or 1, heads, q_blocks, kv_blocks]: 1 full, 2 partial; None: all full
    bias: Any
    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    residuals: Any  # of the backward pass: do, lse in base 2, delta


def _parts(inputs: BlockSparseInputs, residuals=None) -> _Part:
    arrays = inputs._asdict()
    layout = arrays.pop("layout")
    return _Part(**arrays, codes=_codes(layout), residuals=residuals)


def _codes(layout: BlockLayout):
    xp = namespace(layout.row_starts)
    row = item_rows(xp, layout.row_starts, layout.capacity)  # `rows` for unused entries
    index, code = (row, layout.kv_block), layout.is_partial.astype(np.int8) + np.int8(1)
    codes = np.zeros((layout.rows + 1, layout.kv_blocks), np.int8)
    if xp is np:
        codes[index] = code
        if (codes[:-1] == 1).all():
            return None
    else:
        codes = jnp.asarray(codes).at[index].set(code)
    return codes[:-1].reshape(layout.batch, layout.heads, layout.q_blocks, layout.kv_blocks)


def _by_batch(run, whole: _Part):
    """`run` over as many batch elements at a time as make `STEP_LOGITS`; results joined."""
    batch, q_tokens, heads, _ = whole.q.shape
    size = max(1, STEP_LOGITS // (heads * q_tokens * whole.k.shape[1]))
    if size >= batch:
        return run(whole)
    flat, tree = jax.tree.flatten(whole)
    is_batched = [x.shape[0] == batch for x in flat]

    def step(parts):
        parts = iter(parts)
        return run(
            tree.unflatten([next(parts) if x else y for x, y in zip(is_batched, flat, strict=True)])
        )

    parts = [jnp.asarray(x) for x, yes in zip(flat, is_batched, strict=True) if yes]
    steps = batch // size
    most = [x[: steps * size].reshape(steps, size, *x.shape[1:]) for x in parts]
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(step, most))
    if steps * size == batch:
        return results
    last = step([x[steps * size :] for x in parts])
    return jax.tree.map(lambda *x: jnp.concatenate(x), results, last)


class _Fold:
    """Reshape between [B, T, H, D] and rows of kv heads [B * Hk, repeats * Tq or Tk, D]."""

    def __init__(self, q, k):
        self.batch, self.q_tokens, heads, _ = q.shape
        self.kv_tokens, self.kv_heads = k.shape[1:3]
        self.repeats = heads // self.kv_heads
        self.rows = self.batch * self.kv_heads

    def queries(self, x):
        x = jnp.moveaxis(x, 2, 1)
        return x.reshape(self.rows, self.repeats * self.q_tokens, *x.shape[3:])

    def undo_queries(self, x):
        x = x.reshape(self.batch, -1, self.q_tokens, *x.shape[2:])
        return jnp.moveaxis(x, 1, 2)

    def keys(self, x):
        return jnp.moveaxis(x, 2, 1).reshape(self.rows, self.kv_tokens, x.shape[-1])

    def undo_keys(self, x):
        return jnp.moveaxis(x.reshape(self.batch, self.kv_heads, *x.shape[1:]), 1, 2)

    def pairs(self, x):
        """[B or 1, Hq or 1, Tq, Tk] -> [B * Hk, repeats * Tq, Tk]."""
        shape = self.batch, self.kv_heads * self.repeats, self.q_tokens, self.kv_tokens
        return jnp.broadcast_to(x, shape).reshape(self.rows, -1, self.kv_tokens)

    def sum_pairs(self, x, shape: tuple[int, ...]):
        """The gradient of an array that `pairs` broadcast from `shape`."""
        x = x.reshape(self.batch, -1, self.q_tokens, self.kv_tokens)
        return x.sum([axis for axis in (0, 1) if shape[axis] == 1], keepdims=True)


def _load(part: _Part, fold: _Fold, config: BlockSparseConfig, dtype):
    """Queries times query_factor, keys and values, in the dtype that tiles compute in."""
    factor = jnp.asarray(online_softmax.query_factor(config.scale, config.softcap), dtype)
    k, v = (fold.keys(x).astype(dtype) for x in isolate_nonfinite(part.k, part.v))
    return fold.queries(part.q).astype(dtype) * factor, k, v


def _visible(part: _Part, layout: BlockLayout):
    """Pair mask [B or 1, Hq or 1, Tq, Tk]; None if all pairs are visible."""
    if part.codes is None:
        return None
    codes, heads, allowed = part.codes, part.q.shape[2], _mask_pairs(part, layout)
    if isinstance(codes, np.ndarray) and (codes == 2).all():
        return allowed
    if layout.heads not in (1, heads):
        codes = jnp.repeat(codes, heads // layout.heads, 1)
    codes = jnp.repeat(jnp.repeat(codes, layout.block_q, 2), layout.block_kv, 3)
    codes = codes[:, :, : layout.q_tokens, : layout.kv_tokens]
    return codes > 0 if allowed is None else (codes == 1) | ((codes == 2) & allowed)


def _mask_pairs(part: _Part, layout: BlockLayout) -> Array | None:
    """Pairs that mask and segment ids allow; None if neither is given."""
    heads = part.q.shape[2]
    allows = rule_of_heads(layout.mask, heads, lambda: jnp.arange(heads)[None, :, None, None])
    q = _side(part.q_positions, part.q_segment_ids, layout.q_tokens, (1, 3))
    kv = _side(part.kv_positions, part.kv_segment_ids, layout.kv_tokens, (1, 2))
    return element_mask(q, kv, allows)


def _side(positions: Any, segments: Any, tokens: int, axes: tuple[int, int]) -> ExpandedSide:
    """Tokens [B or 1, T] with `axes` added, for pairs [B, H, Tq, Tk]."""
    if positions is None:
        positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    expand = lambda x: None if x is None else jnp.expand_dims(x, axes)
    return ExpandedSide(TokenBlocks(expand(positions), expand(segments), tokens), tokens, 1)
