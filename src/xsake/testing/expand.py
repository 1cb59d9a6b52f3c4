"""Expand masks and layouts to one bool per (query, key) pair, independently of `xsake.masks`.

Only `Random` and `FromFunction` are evaluated by the mask itself: they are defined by their code.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool

from xsake import masks
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


def _call_mask(mask: AbstractMask, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.asarray(mask.allows(q, k))


def _window(m, q, k):
    offset = k - q
    allowed = np.ones(offset.shape, bool) if m.left is None else -offset <= m.left
    return allowed if m.right is None else allowed & (offset <= m.right)


def _longformer(m, q, k):
    return (np.abs(q - k) <= m.window) | (np.minimum(q, k) < m.global_tokens)


def _segments(m, q, k):
    q_ids = np.asarray(m.q_ids)
    kv_ids = q_ids if m.kv_ids is None else np.asarray(m.kv_ids)
    grid = np.array([[a == b and a >= 0 for b in kv_ids] for a in q_ids])
    return _table(grid, q, k)


def _table(table, q, k):
    inside = (q < table.shape[0]) & (k < table.shape[1])
    return inside & table[np.minimum(q, table.shape[0] - 1), np.minimum(k, table.shape[1] - 1)]


# Rules by mask name: (mask, query position, key position) -> bool.
_RULES = {
    "Full": lambda m, q, k: (q >= 0) & (k >= 0),
    "Causal": lambda m, q, k: q >= k,
    "Window": _window,
    "Chunked": lambda m, q, k: np.floor_divide(q, m.size) == np.floor_divide(k, m.size),
    "Sinks": lambda m, q, k: (q >= 0) & (k < m.count),
    "Strided": lambda m, q, k: (q >= 0) & (np.remainder(k, m.stride) < m.width),
    "Longformer": _longformer,
    "BigBird": lambda m, q, k: (
        _longformer(m, q, k) | _call_mask(masks.Random(m.keep, m.seed, m.cell), q, k)
    ),
    "Segments": _segments,
    "Explicit": lambda m, q, k: _table(np.asarray(m.array), q, k),
    "Random": _call_mask,
    "FromFunction": _call_mask,
}


def pairs(mask: AbstractMask | None, q: np.ndarray, k: np.ndarray, head: int = 0) -> np.ndarray:
    """Evaluate `mask` on positions `q` x `k` (broadcast) for one head."""
    q, k = np.asarray(q, np.int64), np.asarray(k, np.int64)
    if mask is None:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), bool)
    name = type(mask).__name__
    if isinstance(mask, masks.PerHead):
        return pairs(mask.members[head], q, k)
    if isinstance(mask, masks.And):
        return np.all([pairs(part, q, k, head) for part in mask.parts], axis=0)
    if isinstance(mask, masks.Or):
        return np.any([pairs(part, q, k, head) for part in mask.parts], axis=0)
    if isinstance(mask, masks.Not):
        return np.logical_not(pairs(mask.part, q, k, head))
    if name in _RULES and mask.heads is None:
        return np.broadcast_to(_RULES[name](mask, q, k), np.broadcast_shapes(q.shape, k.shape))
    heads = None if mask.heads is None else np.full((1,) * max(q.ndim, k.ndim), head)
    return np.asarray(mask.allows(q, k, heads))


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Positions [B, T] and segment ids [B, T] or None."""

    q_positions: np.ndarray
    kv_positions: np.ndarray
    q_segment_ids: np.ndarray | None = None
    kv_segment_ids: np.ndarray | None = None

    @property
    def are_moved(self) -> bool:
        """Whether any position differs from its token index."""
        positions = self.q_positions, self.kv_positions
        return any((x != np.arange(x.shape[1])).any() for x in positions)


def _rule_head(mask: AbstractMask | None, head: int, heads: int) -> int:
    """Return the mask head of a query head; under GQA a mask may have kv heads."""
    return head if mask is None or mask.heads is None else head * mask.heads // heads


def mask_tokens(
    mask: AbstractMask | None, at: Coordinates, heads: int
) -> Bool[np.ndarray, "B Hq Tq Tk"]:
    """Expand a mask over explicit positions."""
    rows = [
        [pairs(mask, q[:, None], k[None, :], _rule_head(mask, h, heads)) for h in range(heads)]
        for q, k in zip(at.q_positions, at.kv_positions, strict=True)
    ]
    return np.array(rows)


def layout_tokens(
    layout: BlockLayout, at: Coordinates, heads: int
) -> Bool[np.ndarray, "B Hq Tq Tk"]:
    """Expand a layout item by item."""
    starts, columns, partial = (
        np.asarray(a) for a in (layout.row_starts, layout.kv_block, layout.is_partial)
    )
    q_tokens, kv_tokens = layout.q_tokens, layout.kv_tokens
    bq, bk = layout.block_q, layout.block_kv
    q_blocks = -(-q_tokens // bq)
    batch = at.q_positions.shape[0]
    allowed = np.zeros((batch, heads, q_tokens, kv_tokens), bool)
    for b, h in np.ndindex(batch, heads):
        listed_b = b if layout.batch > 1 else 0
        listed_h = h // (heads // layout.heads)
        for i in range(q_blocks):
            row = (listed_b * layout.heads + listed_h) * q_blocks + i
            for item in range(starts[row], starts[row + 1]):
                ts = np.arange(i * bq, min((i + 1) * bq, q_tokens))
                us = np.arange(columns[item] * bk, min((columns[item] + 1) * bk, kv_tokens))
                tile = np.ones((ts.size, us.size), bool)
                # Full blocks are full at positions 0, 1, 2, ...; otherwise evaluate the mask.
                if partial[item] or at.are_moved:
                    q, k = at.q_positions[b, ts], at.kv_positions[b, us]
                    tile = pairs(
                        layout.mask, q[:, None], k[None, :], _rule_head(layout.mask, h, heads)
                    )
                allowed[b, h, ts[:, None], us[None, :]] = tile
    return allowed


def same_segment(at: Coordinates, heads: int, batch: int) -> np.ndarray:
    """Return [B, Hq or 1, Tq or 1, Tk or 1]: True for equal non-negative segment ids."""
    if at.q_segment_ids is None or at.kv_segment_ids is None:
        return np.ones((batch, 1, 1, 1), bool)
    q, k = at.q_segment_ids[:, None, :, None], at.kv_segment_ids[:, None, None, :]
    return np.broadcast_to((q == k) & (q >= 0), (batch, heads, q.shape[2], k.shape[3]))
