"""Exact mask coverage of blocks; evaluates tokens only where a mask returns UNKNOWN."""

import jax
import numpy as np

from xsake.layout.grid import BlockGrid, Spans
from xsake.masks import AbstractMask, Coverage

# Bounds on memory. Build time is constant from 2^16 to 2^20 blocks (131,072 tokens and 16 heads
# on an x86 core: 0.8 s of CPU); 2^14 blocks take up to 1.5x.
CHUNK_BLOCKS = 2**18
CHUNK_TOKENS = 2**20


def cover_items(
    mask: AbstractMask | None, grid: BlockGrid, q_block: np.ndarray, kv_block: np.ndarray, head=None
) -> np.ndarray:
    """Return exact coverage codes (NONE, SOME, ALL) of blocks, in bounded memory.

    Args:
        mask: None allows every pair.
        q_block, kv_block: int [n].
        head: int [n], required if and only if the mask has heads.
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
    """Return coverage codes of NumPy rectangles, with UNKNOWN resolved by token evaluation."""
    shape = np.broadcast_shapes(*(edge.shape for edge in spans))
    codes = np.asarray(mask.coverage(*spans, **_head_kwargs(head)))
    codes = np.broadcast_to(codes, shape)
    unknown = np.nonzero(codes == Coverage.UNKNOWN)
    if unknown[0].size == 0:
        return codes
    codes = codes.copy()
    edges = Spans(*(np.broadcast_to(edge, shape)[unknown] for edge in spans))
    heads = None if head is None else np.broadcast_to(head, shape)[unknown]
    codes[unknown] = evaluate_tokens(mask, edges, heads)
    return codes


def evaluate_tokens(mask: AbstractMask, spans: Spans, head=None) -> np.ndarray:
    """Return coverage codes [n] by evaluating token pairs, `CHUNK_TOKENS` at a time."""
    heights = spans.q_last - spans.q_first + 1
    widths = spans.kv_last - spans.kv_first + 1
    tall, wide = int(heights.max()), int(widths.max())
    strip = max(1, min(tall, CHUNK_TOKENS // wide))
    group = max(1, CHUNK_TOKENS // (strip * wide))
    allowed = np.zeros(heights.size, np.int64)
    for first in range(0, heights.size, group):
        part = slice(first, first + group)
        chunk = Spans(*(edge[part, None, None] for edge in spans))
        kv = chunk.kv_first + np.arange(wide, dtype=np.int32)
        heads = None if head is None else head[part, None, None]
        for top in range(0, tall, strip):
            q = chunk.q_first + np.arange(top, min(top + strip, tall), dtype=np.int32)[:, None]
            inside = (q <= chunk.q_last) & (kv <= chunk.kv_last)
            # A mask may use jax.numpy; evaluate it eagerly even inside jit.
            with jax.ensure_compile_time_eval():
                pairs = np.asarray(mask.allows(q, kv, **_head_kwargs(heads)))
            allowed[part] += np.count_nonzero(inside & pairs, axis=(1, 2))
    area = heights.astype(np.int64) * widths
    return np.where(
        allowed == 0, Coverage.NONE, np.where(allowed == area, Coverage.ALL, Coverage.SOME)
    ).astype(np.int8)


def _head_kwargs(head) -> dict:
    return {} if head is None else {"head": head}
