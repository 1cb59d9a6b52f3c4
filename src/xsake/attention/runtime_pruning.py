"""Run-time pruning: drop blocks that segment ids or positions leave without allowed pairs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.kernels.block_sparse.types import BlockSparseInputs
from xsake.kernels.blocking import block_ranges
from xsake.layout import BlockLayout
from xsake.layout.csr import item_rows
from xsake.masks import Coverage

POSITIONS, SEGMENTS = "positions", "segment ids"


def pruning_sources(operands: "BlockSparseInputs | PruningInputs") -> tuple[str, ...]:
    """Return the run-time arguments by which `prune_blocks` would drop blocks."""
    has_positions = operands.q_positions is not None or operands.kv_positions is not None
    by_positions = (POSITIONS,) if has_positions and operands.layout.mask is not None else ()
    return by_positions + (() if operands.q_segment_ids is None else (SEGMENTS,))


def prune_blocks(operands: BlockSparseInputs) -> BlockSparseInputs:
    """Replace the layout by one that lists only blocks that may have an allowed pair.

    Blocks are tested by the range of their positions and segment ids: O(blocks), conservative.
    """
    if not pruning_sources(operands):
        return operands
    inputs = PruningInputs(*(getattr(operands, name) for name in PruningInputs._fields))
    return operands._replace(layout=_prune_layout(inputs))


class PruningInputs(NamedTuple):
    """Fields of `BlockSparseInputs` that determine which blocks are pruned."""

    layout: BlockLayout
    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any


# Jitted so that calls outside jit do not compile every operation separately.
@jax.jit
def _prune_layout(inputs: PruningInputs) -> BlockLayout:
    codes = []
    reasons = pruning_sources(inputs)
    if POSITIONS in reasons:
        codes.append(_position_codes(inputs))
    if SEGMENTS in reasons:
        codes.append(_segment_codes(inputs))
    batch = max(code.shape[0] for code in codes)
    combined = jnp.broadcast_to(codes[0], (batch, inputs.layout.capacity))
    for code in codes[1:]:
        combined = jnp.minimum(_unknown_as_some(combined), _unknown_as_some(code))
    return inputs.layout.refine(combined.astype(jnp.int8))


def _unknown_as_some(code):
    """Replace UNKNOWN by SOME, so that the minimum of two codes is their intersection."""
    return jnp.where(code == Coverage.UNKNOWN, jnp.int8(Coverage.SOME), code)


def _item_coordinates(layout: BlockLayout):
    """Return (batch, head, query block, kv block) of each item."""
    row = item_rows(jnp, jnp.asarray(layout.row_starts), layout.capacity)
    row = jnp.minimum(row, layout.rows - 1)
    head, q_block = row // layout.q_blocks, row % layout.q_blocks
    return head // layout.heads, head % layout.heads, q_block, jnp.asarray(layout.kv_block)


def _position_codes(operands: PruningInputs):
    """Return the coverage of each item by the mask at the given positions, [B or 1, W]."""
    layout, mask = operands.layout, operands.layout.mask
    assert mask is not None, "positions prune only with a mask"
    item_batch, head, q_block, kv_block = _item_coordinates(layout)
    q_span = block_ranges(operands.q_positions, layout.q_tokens, layout.block_q)
    kv_span = block_ranges(operands.kv_positions, layout.kv_tokens, layout.block_kv)
    batch = max(q_span[0].shape[0], kv_span[0].shape[0], layout.batch)
    batch_index = jnp.arange(batch)[:, None] if layout.batch == 1 else item_batch[None]
    pairs = [(x, q_block) for x in q_span] + [(x, kv_block) for x in kv_span]
    ends = [jnp.asarray(x)[batch_index % x.shape[0], block[None]] for x, block in pairs]
    if mask.heads is None:
        return mask.coverage(*ends)
    return mask.coverage(*ends, head=(head * mask.heads // layout.heads)[None])


def _segment_codes(operands: PruningInputs):
    """Return the coverage of each item by equality of segment ids, [B, W]."""
    layout = operands.layout
    item_batch, _, q_block, kv_block = _item_coordinates(layout)
    q_low, q_high = block_ranges(operands.q_segment_ids, layout.q_tokens, layout.block_q)
    kv_low, kv_high = block_ranges(operands.kv_segment_ids, layout.kv_tokens, layout.block_kv)
    batch_index = jnp.arange(q_low.shape[0])[:, None] if layout.batch == 1 else item_batch[None]
    q_low, q_high = (x[batch_index, q_block[None]] for x in (q_low, q_high))
    kv_low, kv_high = (x[batch_index, kv_block[None]] for x in (kv_low, kv_high))
    # Negative ids are padding and never match.
    low, high = jnp.maximum(jnp.maximum(q_low, kv_low), 0), jnp.minimum(q_high, kv_high)
    one_segment = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low) & (q_low >= 0)
    some = jnp.where(low <= high, Coverage.SOME, Coverage.NONE)
    return jnp.where(one_segment, Coverage.ALL, some).astype(jnp.int8)
