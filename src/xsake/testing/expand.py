"""Expand masks and layouts to one bool per (query, key) pair, independently of `xsake.masks`."""

import dataclasses

import numpy as np
from jaxtyping import Bool

from xsake import masks
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


def _window(m, q, k):
    offset = k - q
    allowed = np.ones(offset.shape, bool) if m.left is None else -offset <= m.left
    return allowed if m.right is None else allowed & (offset <= m.right)


def _longformer(m, q, k):
    return (np.abs(q - k) <= m.window) | (np.minimum(q, k) < m.global_tokens)


def _segments(m, q, k):
    q_ids, kv_ids = np.asarray(m.q_ids)[:, None], np.asarray(m.kv_ids)[None, :]
    return _table((q_ids == kv_ids) & (q_ids >= 0), q, k)


def _table(table, q, k):
    """Positions past the end of the table are in its padding, which is False."""
    rows, columns = table.shape
    return np.pad(table, ((0, 1), (0, 1)))[np.minimum(q, rows), np.minimum(k, columns)]


def _scramble(x):
    x = (x ^ x >> 16) * np.uint64(0x85EBCA6B) & _WORD
    x = (x ^ x >> 13) * np.uint64(0xC2B2AE35) & _WORD
    return x ^ x >> 16


_WORD, _GOLDEN = np.uint64(2**32 - 1), np.uint64(0x9E3779B9)


def _random(m, q, k):
    q_cell, kv_cell = (np.floor_divide(x, m.cell).astype(np.uint64) for x in (q, k))
    state = _scramble(np.uint64(m.seed) + _GOLDEN & _WORD)
    state = _scramble(state + q_cell * _GOLDEN & _WORD)
    state = _scramble((state ^ _GOLDEN) + kv_cell * _GOLDEN & _WORD)
    return state >> np.uint64(2) < round(m.keep * 2**30)


# Rules by mask name: (mask, query position, key position) -> bool.
_RULES = {
    "Full": lambda m, q, k: (q >= 0) & (k >= 0),
    "Causal": lambda m, q, k: q >= k,
    "Window": _window,
    "Chunked": lambda m, q, k: np.floor_divide(q, m.size) == np.floor_divide(k, m.size),
    "Sinks": lambda m, q, k: (q >= 0) & (k < m.count),
    "Strided": lambda m, q, k: (q >= 0) & (np.remainder(k, m.stride) < m.width),
    "Longformer": _longformer,
    "BigBird": lambda m, q, k: _longformer(m, q, k) | _random(m, q, k),
    "Segments": _segments,
    "Random": _random,
}


def pairs(mask: AbstractMask | None, q: np.ndarray, k: np.ndarray, head: int = 0) -> np.ndarray:
    """Evaluate `mask` on positions `q` x `k` (broadcast) for one head."""
    q, k = np.asarray(q, np.int64), np.asarray(k, np.int64)
    shape, name = np.broadcast_shapes(q.shape, k.shape), type(mask).__name__
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, masks.PerHead):
        return pairs(mask.members[head], q, k)
    if isinstance(mask, masks.And):
        return np.all([pairs(part, q, k, head) for part in mask.parts], axis=0)
    if isinstance(mask, masks.Or):
        return np.any([pairs(part, q, k, head) for part in mask.parts], axis=0)
    if isinstance(mask, masks.Not):
        return np.logical_not(pairs(mask.part, q, k, head))
    if isinstance(mask, masks.Explicit):
        return _table(mask.array if mask.heads is None else mask.array[head], q, k)
    if isinstance(mask, masks.FromFunction):
        arguments = (q, k) if mask.heads is None else (q, k, head)
        return np.broadcast_to(np.asarray(mask.function(*arguments)), shape)
    if name in _RULES:
        return np.broadcast_to(_RULES[name](mask, q, k), shape)
    return np.asarray(mask.allows(q, k, None if mask.heads is None else head))


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
