"""A call cut into blocks, and what every pass over it needs: tiles of logits and their mask."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from xsake.kernels.block_sparse import blocked, tiles
from xsake.kernels.block_sparse.blocked import Lists, Places, take
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Operands,
    Problem,
    cleaned,
    compute_dtype,
    quarantine,
)
from xsake.kernels.block_sparse.walk import Step
from xsake.kernels.varying import axes_of


class Call(NamedTuple):
    """The operands by block, `[blocks, block, D]` each, and where their tokens are."""

    operands: Operands
    problem: Problem
    k: Any  # NaN where the value is not finite
    v: Any  # finite
    bias: Any  # [pairs of blocks, block_q, block_kv] or None
    q_places: Places
    kv_places: Places

    @property
    def layout(self):
        return self.operands.layout

    @property
    def dtype(self):
        return compute_dtype(self.operands)

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes of `shard_map` that the operands vary over."""
        return axes_of(self.operands.q)

    @property
    def q_heads(self) -> int:
        return self.operands.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.operands.k.shape[2]

    def scaled(self, q):
        """Queries as the tiles want them."""
        factor = tiles.query_factor(self.problem.scale, self.problem.softcap)
        return q.astype(self.dtype) * jnp.asarray(factor, self.dtype)

    def bias_tile(self, rows, kv_block):
        """The bias of q rows [rows, K] against kv blocks, [rows, K, block_q, block_kv]; or None."""
        if self.bias is None:
            return None
        return take(self.bias, self.bias_index(rows, kv_block)).astype(self.dtype)

    def bias_index(self, rows, kv_block):
        """Which block of `bias` belongs to a q row and a kv block; any for items that are not."""
        bias, layout = self.operands.bias, self.layout
        assert bias is not None
        head = rows // layout.q_blocks
        plane = head // self.q_heads % bias.shape[0] * bias.shape[1]
        plane = plane + head % self.q_heads % bias.shape[1]
        kv_block = jnp.minimum(kv_block, layout.kv_blocks - 1)
        return (plane * layout.q_blocks + rows % layout.q_blocks) * layout.kv_blocks + kv_block

    def visible(self, rows, kv_block, step: Step):
        """The element mask of a step with one block per row, [rows, block_q or 1, block_kv or 1].

        None if no pair has to be masked. Rows without an item weigh nothing anyway, but under a
        bias their gradient may still be 0 * NaN.
        """
        if step.masked:
            return self._visible_pairs(rows, kv_block, step.exists)
        return None if self.bias is None else step.exists[..., None]

    def _visible_pairs(self, rows, kv_block, exists):
        layout, mask = self.layout, self.layout.mask
        head, q_block = rows // layout.q_blocks, rows % layout.q_blocks
        batch, head = head // self.q_heads, head % self.q_heads
        kv_block = jnp.minimum(kv_block, layout.kv_blocks - 1)
        token = kv_block[:, None] * layout.block_kv + jnp.arange(layout.block_kv)[None]
        visible = ((token < self.kv_places.tokens) & exists)[:, None, :]
        if layout.q_tokens % layout.block_q:
            # Padded queries exist as little as padded keys: their logits may be NaN.
            q_token = q_block[:, None] * layout.block_q + jnp.arange(layout.block_q)[None]
            visible = visible & (q_token < layout.q_tokens)[:, :, None]
        if mask is not None:
            q_pos = _place(self.q_places.positions, batch, q_block)[:, :, None]
            kv_pos = _place(self.kv_places.positions, batch, kv_block)[:, None, :]
            which = None if mask.heads is None else head * mask.heads // self.q_heads
            which = None if which is None else which[:, None, None]
            visible = visible & mask.allows(q_pos, kv_pos, which)
        if self.q_places.segments is not None:
            q_ids = _place(self.q_places.segments, batch, q_block)[:, :, None]
            kv_ids = _place(self.kv_places.segments, batch, kv_block)[:, None, :]
            visible = visible & (q_ids == kv_ids) & (q_ids >= 0)
        return visible


def _place(blocks, batch, block):
    return take(blocks, (batch % blocks.shape[0], block))


def prepare(operands: Operands, problem: Problem) -> Call:
    """Cut the arrays of a call into blocks."""
    layout, bias = operands.layout, operands.bias
    k, v = quarantine(operands.k, operands.v)
    if bias is not None:
        bias = blocked.pairs_to_blocks(bias, layout.block_q, layout.block_kv)
    return Call(
        operands,
        problem,
        blocked.to_blocks(k, layout.block_kv),
        blocked.to_blocks(v, layout.block_kv),
        bias,
        blocked.q_places(operands, layout.block_q),
        blocked.kv_places(operands, layout.block_kv),
    )


def saved_rows(dtype, out, lse, cotangents: Cotangents, unit: tiles.Unit = tiles.BITS):
    """What the backward passes need of each query: `(d_out, lse in the tiles' unit, delta)`.

    `d_out` is finite; a query whose cotangent is not has NaN as lse, which spoils what it sees and
    only that. `delta` is what the softmax subtracts from every weight's gradient.
    """
    lse = jnp.where(jnp.isfinite(cotangents.out).all(-1), tiles.lse_in_unit(lse, unit), jnp.nan)
    d_out = cleaned(cotangents.out)
    delta = (d_out.astype(dtype) * out.astype(dtype)).sum(-1) - cotangents.lse.astype(dtype)
    return d_out, lse, delta


def fetch_kv_blocks(call: Call, lists: Lists):
    """What rows of query blocks meet: kv blocks, [rows, K]; the zero block where there is none."""
    start, block = jnp.asarray(lists.rows.start), jnp.asarray(lists.block)

    def fetch(rows, turns, exists):
        place = jnp.minimum(take(start, rows)[:, None] + turns, block.shape[0] - 1)
        return jnp.where(exists, take(block, place), call.layout.kv_blocks)

    return fetch


class RowTile(NamedTuple):
    """One step of rows of query blocks."""

    logits: Any  # [rows, block_q, K * block_kv], bits, of visible pairs and others
    visible: Any  # broadcasts against logits; None if all pairs of existing items are visible
    k: Any  # [rows, K * block_kv, D]
    v: Any  # [rows, K * block_kv, Dv]


def row_tile(call: Call, rows, q, step: Step) -> RowTile:
    """Logits of `rows` against the kv blocks of a step."""
    layout = call.layout
    head = rows // layout.q_blocks
    head = head // call.q_heads * call.kv_heads + head % call.q_heads // (
        call.q_heads // call.kv_heads
    )
    index = blocked.block_index(head[:, None], step.items, layout.kv_blocks)
    k, v = (joined(take(x, index)).astype(call.dtype) for x in (call.k, call.v))
    bias = call.bias_tile(rows[:, None], step.items)
    if bias is not None:
        bias = jnp.moveaxis(bias, 1, 2).reshape(rows.shape[0], layout.block_q, -1)
    logits = tiles.logits(tiles.products(q, k), bias, call.problem.softcap)
    return RowTile(logits, call.visible(rows, step.items[:, 0], step), k, v)


def joined(x):
    """[rows, K, block, D] -> [rows, K * block, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])
