"""Asks a mask about blocks: none, some or all of their token pairs; tokens only where it must."""

import jax
import numpy as np

from xsake.layout.grid import BlockGrid, Spans
from xsake.masks import AbstractMask, Coverage

# What bounds the memory of a build. Time is the same from 2^16 to 2^20 blocks (131,072 tokens and
# 16 heads on an x86 core: 0.8 s of CPU); 2^14 blocks take up to half longer.
CHUNK_BLOCKS = 2**18
CHUNK_TOKENS = 2**20


def cover_items(
    mask: AbstractMask | None, grid: BlockGrid, q_block: np.ndarray, kv_block: np.ndarray, head=None
) -> np.ndarray:
    """Exact coverage codes (NONE, SOME, ALL) of the listed blocks, in bounded memory.

    Args:
        mask: the rule; None allows every pair.
        q_block, kv_block: int [n], the blocks.
        head: int [n], wanted if and only if the mask has heads.
    """
    codes = np.full(q_block.shape, Coverage.ALL, np.int8)
    if mask is None:
        return codes
    for first in range(0, q_block.size, CHUNK_BLOCKS):
        part = slice(first, first + CHUNK_BLOCKS)
        spans = grid.spans(np, q_block[part], kv_block[part])
        codes[part] = resolve(mask, spans, None if head is None else head[part])
    return codes


def resolve(mask: AbstractMask, spans: Spans, head=None) -> np.ndarray:
    """Coverage codes of flat or broadcast NumPy rectangles, with every UNKNOWN looked up."""
    shape = np.broadcast_shapes(*(edge.shape for edge in spans))
    codes = np.asarray(mask.coverage(*spans, **_head(head)))
    codes = np.broadcast_to(codes, shape)
    unknown = np.nonzero(codes == Coverage.UNKNOWN)
    if unknown[0].size == 0:
        return codes
    codes = codes.copy()
    edges = Spans(*(np.broadcast_to(edge, shape)[unknown] for edge in spans))
    heads = None if head is None else np.broadcast_to(head, shape)[unknown]
    codes[unknown] = look_at_tokens(mask, edges, heads)
    return codes


def look_at_tokens(mask: AbstractMask, spans: Spans, head=None) -> np.ndarray:
    """Coverage codes [n] of rectangles from their token pairs, `CHUNK_TOKENS` at a time."""
    heights = spans.q_last - spans.q_first + 1
    widths = spans.kv_last - spans.kv_first + 1
    tall, wide = int(heights.max()), int(widths.max())
    strip = max(1, min(tall, CHUNK_TOKENS // wide))
    group = max(1, CHUNK_TOKENS // (strip * wide))
    allowed = np.zeros(heights.size, np.int64)
    for first in range(0, heights.size, group):
        part = slice(first, first + group)
        here = Spans(*(edge[part, None, None] for edge in spans))
        kv = here.kv_first + np.arange(wide, dtype=np.int32)
        chosen = None if head is None else head[part, None, None]
        for top in range(0, tall, strip):
            q = here.q_first + np.arange(top, min(top + strip, tall), dtype=np.int32)[:, None]
            inside = (q <= here.q_last) & (kv <= here.kv_last)
            # A rule may be written in jax.numpy; it must run now even while the caller is traced.
            with jax.ensure_compile_time_eval():
                pairs = np.asarray(mask.allows(q, kv, **_head(chosen)))
            allowed[part] += np.count_nonzero(inside & pairs, axis=(1, 2))
    area = heights.astype(np.int64) * widths
    return np.where(
        allowed == 0, Coverage.NONE, np.where(allowed == area, Coverage.ALL, Coverage.SOME)
    ).astype(np.int8)


def _head(head) -> dict:
    return {} if head is None else {"head": head}
