"""Short sequences in plain XLA: all pairs of a few batch elements at once, no list is walked.

A single block has nothing to skip, and two or three blocks that mostly stick out cost more than all
pairs that exist.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake.kernels.block_sparse import tiles
from xsake.kernels.block_sparse.call import saved_rows
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Gradients,
    Operands,
    Problem,
    cleaned,
    compute_dtype,
    quarantine,
)
from xsake.layout import BlockLayout
from xsake.layout.ragged import namespace, row_of_item

MAX_BLOCKS = 3  # of a sequence that mostly sticks out
MAX_FILLED = 0.62  # a causal list computes two thirds to three quarters of so few blocks
STEP_LOGITS = 12 * 128 * 512  # of a step, as in the walk over lists


def is_dense(operands: Operands, problem: Problem, platform: str) -> bool:
    """Whether all pairs are computed; shapes alone decide, so no batch changes the answer."""
    layout = operands.layout
    if platform != "cpu" or problem.tiles is not None:
        return False
    if layout.q_blocks == layout.kv_blocks == 1:
        return True
    padded = layout.q_blocks * layout.block_q * layout.kv_blocks * layout.block_kv
    is_short = max(layout.q_blocks, layout.kv_blocks) <= MAX_BLOCKS
    return is_short and layout.q_tokens * layout.kv_tokens <= MAX_FILLED * padded


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    dtype = compute_dtype(operands)

    def run(part: _Part):
        fold = _Fold(part.q, part.k)
        q, k, v = _load(part, fold, problem, dtype)
        bias = None if part.bias is None else fold.pairs(part.bias.astype(q.dtype))
        s = tiles.logits(tiles.products(q, k), bias, problem.softcap)
        visible = _visible(part, operands.layout)
        if visible is not None:
            s = jnp.where(fold.pairs(visible), s, -jnp.inf)
        state = tiles.empty_softmax(q.shape[0], q.shape[1], v.shape[-1], q.dtype)
        out, lse = (fold.undo_queries(x) for x in tiles.settle(tiles.accumulate(state, s, v)))
        return out.astype(part.q.dtype), lse

    return _by_batch(run, _parts(operands))


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k, v and bias; the weights are computed again."""
    dtype, softcap = compute_dtype(operands), problem.softcap

    def run(part: _Part):
        """Tiles are [rows, keys, queries], which no product has to turn."""
        fold = _Fold(part.q, part.k)
        q, k, v = _load(part, fold, problem, dtype)
        d_out, lse, delta = (fold.queries(x) for x in part.saved)
        d_out, turn = d_out.astype(dtype), lambda x: x.swapaxes(1, 2)
        bias = None if part.bias is None else turn(fold.pairs(part.bias.astype(dtype)))
        s = tiles.logits(tiles.products(k, q), bias, softcap)
        visible = _visible(part, operands.layout)
        seen = None if visible is None else turn(fold.pairs(visible))
        keep = lambda x: x if seen is None else jnp.where(seen, x, 0)
        p = keep(tiles.weights(s, lse[:, None]))
        p = tiles.normalised(p, p.sum(1, keepdims=True))  # what lse was rounded by is common to all
        dp, slope = tiles.products(v, d_out), tiles.softcap_slope(s, softcap)
        ds = keep(tiles.logit_gradient(p, dp, delta[:, None], slope))
        q, k = (q, k) if seen is None else (cleaned(q), cleaned(k))
        d_q = turn(tiles.matmul(turn(k), ds)) * jnp.asarray(problem.scale, dtype)
        # The queries came with query_factor, the gradient takes `scale`.
        d_k = tiles.matmul(ds, q) / (tiles.LOG2_E if softcap is None else 1)
        d_k, d_v = fold.undo_keys(d_k), fold.undo_keys(tiles.matmul(p, d_out))
        d_bias = None
        if part.bias is not None:
            d_bias = fold.sum_pairs(turn(ds), part.bias.shape)
        return fold.undo_queries(d_q).astype(part.q.dtype), d_k, d_v, d_bias

    saved = saved_rows(dtype, out, lse, cotangents)
    d_q, d_k, d_v, d_bias = _by_batch(run, _parts(operands, saved))
    if operands.bias is not None:
        shared = operands.bias.shape[0] == 1
        d_bias = d_bias.sum(0, keepdims=True) if shared else d_bias
        d_bias = d_bias.astype(operands.bias.dtype)
    return Gradients(d_q, d_k.astype(operands.k.dtype), d_v.astype(operands.v.dtype), d_bias)


class _Part(NamedTuple):
    """Arrays of some batch elements; what all elements share has a first axis of 1."""

    q: Any
    k: Any
    v: Any
    codes: Any  # int8 [B or 1, heads, q_blocks, kv_blocks]: 1 full, 2 partial; None: all full
    bias: Any
    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    saved: Any  # of the backward pass: d_out, lse in bits, delta


def _parts(operands: Operands, saved=None) -> _Part:
    arrays = operands._asdict()
    layout = arrays.pop("layout")
    return _Part(**arrays, codes=_codes(layout), saved=saved)


def _codes(layout: BlockLayout):
    xp = namespace(layout.row_starts)
    row = row_of_item(xp, layout.row_starts, layout.capacity)  # `rows` for unused entries
    place, kind = (row, layout.kv_block), layout.is_partial.astype(np.int8) + np.int8(1)
    codes = np.zeros((layout.rows + 1, layout.kv_blocks), np.int8)
    if xp is np:
        codes[place] = kind
        if (codes[:-1] == 1).all():
            return None
    else:
        codes = jnp.asarray(codes).at[place].set(kind)
    return codes[:-1].reshape(layout.batch, layout.heads, layout.q_blocks, layout.kv_blocks)


def _by_batch(run, whole: _Part):
    """`run` over as many batch elements at a time as make `STEP_LOGITS`; results joined."""
    batch, q_tokens, heads, _ = whole.q.shape
    size = max(1, STEP_LOGITS // (heads * q_tokens * whole.k.shape[1]))
    if size >= batch:
        return run(whole)
    flat, tree = jax.tree.flatten(whole)
    own = [x.shape[0] == batch for x in flat]

    def step(parts):
        parts = iter(parts)
        return run(
            tree.unflatten([next(parts) if x else y for x, y in zip(own, flat, strict=True)])
        )

    parts = [jnp.asarray(x) for x, is_own in zip(flat, own, strict=True) if is_own]
    steps = batch // size
    most = [x[: steps * size].reshape(steps, size, *x.shape[1:]) for x in parts]
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(step, most))
    if steps * size == batch:
        return found
    last = step([x[steps * size :] for x in parts])
    return jax.tree.map(lambda *x: jnp.concatenate(x), found, last)


class _Fold:
    """The way between [B, T, H, D] and rows of kv heads: [B * Hk, repeats * Tq or Tk, D]."""

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


def _load(part: _Part, fold: _Fold, problem: Problem, dtype):
    """Queries times query_factor, keys and values, in the dtype that tiles compute in."""
    factor = jnp.asarray(tiles.query_factor(problem.scale, problem.softcap), dtype)
    k, v = (fold.keys(x).astype(dtype) for x in quarantine(part.k, part.v))
    return fold.queries(part.q).astype(dtype) * factor, k, v


def _visible(part: _Part, layout: BlockLayout):
    """Which pairs exist, [B or 1, Hq or 1, Tq, Tk]; None if all do."""
    if part.codes is None:
        return None
    codes, heads, allowed = part.codes, part.q.shape[2], _allowed(part, layout)
    if isinstance(codes, np.ndarray) and (codes == 2).all():
        return allowed
    if layout.heads not in (1, heads):
        codes = jnp.repeat(codes, heads // layout.heads, 1)
    codes = jnp.repeat(jnp.repeat(codes, layout.block_q, 2), layout.block_kv, 3)
    codes = codes[:, :, : layout.q_tokens, : layout.kv_tokens]
    return codes > 0 if allowed is None else (codes == 1) | ((codes == 2) & allowed)


def _allowed(part: _Part, layout: BlockLayout):
    """What mask and segment ids say of each pair; None if nothing."""
    allowed, heads = None, part.q.shape[2]
    if layout.mask is not None:
        index = lambda x, tokens: jnp.arange(tokens, dtype=jnp.int32)[None] if x is None else x
        q_pos = index(part.q_positions, layout.q_tokens)[:, None, :, None]
        kv_pos = index(part.kv_positions, layout.kv_tokens)[:, None, None, :]
        which = None
        if layout.mask.heads is not None:
            which = (jnp.arange(heads) * layout.mask.heads // heads)[None, :, None, None]
        allowed = layout.mask.allows(q_pos, kv_pos, which)
    if part.q_segment_ids is not None:
        q_ids, kv_ids = part.q_segment_ids[:, None, :, None], part.kv_segment_ids[:, None, None]
        same = (q_ids == kv_ids) & (q_ids >= 0)
        allowed = same if allowed is None else allowed & same
    return allowed
