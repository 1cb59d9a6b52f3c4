"""Drops blocks that segment ids or positions, known only at run time, leave without a pair."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.kernels.block_sparse.problem import Operands
from xsake.layout import BlockLayout
from xsake.layout.ragged import row_of_item
from xsake.masks import Coverage

POSITIONS, SEGMENTS = "positions", "segment ids"


def narrowing(operands: "Operands | Where") -> tuple[str, ...]:
    """The run-time arguments by which `narrowed` would drop blocks."""
    moved = operands.q_positions is not None or operands.kv_positions is not None
    by_positions = (POSITIONS,) if moved and operands.layout.mask is not None else ()
    return by_positions + (() if operands.q_segment_ids is None else (SEGMENTS,))


def narrowed(operands: Operands) -> Operands:
    """The same call with a layout that lists only blocks which may hold a visible pair.

    Blocks are judged by the least and the greatest position and segment id inside them, so it costs
    O(blocks) and the answer errs only towards computing too much.
    """
    if not narrowing(operands):
        return operands
    return operands._replace(layout=_narrowed_layout(Where(*(operands[3:4] + operands[5:]))))


class Where(NamedTuple):
    """The fields of `Operands` that decide which blocks hold a visible pair."""

    layout: BlockLayout
    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any


# Jitted, because outside jit it would otherwise be compiled one small operation at a time.
@jax.jit
def _narrowed_layout(where: Where) -> BlockLayout:
    codes = []
    reasons = narrowing(where)
    if POSITIONS in reasons:
        codes.append(_position_codes(where))
    if SEGMENTS in reasons:
        codes.append(_segment_codes(where))
    batch = max(code.shape[0] for code in codes)
    joint = jnp.broadcast_to(codes[0], (batch, where.layout.capacity))
    for code in codes[1:]:
        joint = jnp.minimum(_ordered(joint), _ordered(code)).astype(jnp.int8)
    return where.layout.refine(joint)


def _ordered(code):
    """Codes with UNKNOWN read as SOME, so that the lesser of two is their intersection."""
    return jnp.where(code == Coverage.UNKNOWN, jnp.int8(Coverage.SOME), code)


def _blocks_of_items(layout: BlockLayout):
    """(batch, head, query block, kv block) of each item."""
    row = row_of_item(jnp, jnp.asarray(layout.row_starts), layout.capacity)
    row = jnp.minimum(row, layout.rows - 1)
    head = row // layout.q_blocks
    return (
        head // layout.heads,
        head % layout.heads,
        row % layout.q_blocks,
        jnp.asarray(layout.kv_block),
    )


def _position_codes(operands: Where):
    """Coverage of each item under the mask at the given positions, [B or 1, W]."""
    layout, mask = operands.layout, operands.layout.mask
    assert mask is not None, "positions matter only to a mask"
    own_batch, head, q_block, kv_block = _blocks_of_items(layout)
    q_span = _span(operands.q_positions, layout.q_tokens, layout.block_q)
    kv_span = _span(operands.kv_positions, layout.kv_tokens, layout.block_kv)
    batch = max(q_span[0].shape[0], kv_span[0].shape[0], layout.batch)
    which = jnp.arange(batch)[:, None] if layout.batch == 1 else own_batch[None]
    ends = [x[which % x.shape[0], q_block[None]] for x in q_span]
    ends += [x[which % x.shape[0], kv_block[None]] for x in kv_span]
    if mask.heads is None:
        return mask.coverage(*ends)
    return mask.coverage(*ends, head=(head * mask.heads // layout.heads)[None])


def _segment_codes(operands: Where):
    """Coverage of each item under equality of segment ids, [B, W]."""
    layout = operands.layout
    own_batch, _, q_block, kv_block = _blocks_of_items(layout)
    q_low, q_high = _span(operands.q_segment_ids, layout.q_tokens, layout.block_q)
    kv_low, kv_high = _span(operands.kv_segment_ids, layout.kv_tokens, layout.block_kv)
    which = jnp.arange(q_low.shape[0])[:, None] if layout.batch == 1 else own_batch[None]
    q_low, q_high = (x[which, q_block[None]] for x in (q_low, q_high))
    kv_low, kv_high = (x[which, kv_block[None]] for x in (kv_low, kv_high))
    # Negative ids are padding: nobody sees it, and it sees nobody.
    low, high = jnp.maximum(jnp.maximum(q_low, kv_low), 0), jnp.minimum(q_high, kv_high)
    one_segment = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low) & (q_low >= 0)
    some = jnp.where(low <= high, Coverage.SOME, Coverage.NONE)
    return jnp.where(one_segment, Coverage.ALL, some).astype(jnp.int8)


def _span(values, tokens: int, block: int):
    """Least and greatest value of each block, [B or 1, N]; token indices if `values` is None."""
    values = jnp.arange(tokens, dtype=jnp.int32)[None] if values is None else values
    missing = -tokens % block
    values = jnp.pad(values, ((0, 0), (0, missing)), mode="edge")
    values = values.reshape(values.shape[0], -1, block)
    return values.min(-1), values.max(-1)
