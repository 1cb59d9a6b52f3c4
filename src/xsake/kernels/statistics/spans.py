"""Which spans of keys a chunk of queries may see."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake.kernels.blocking import block_ranges
from xsake.kernels.statistics.types import StatisticsInputs
from xsake.layout.csr import namespace
from xsake.masks import AbstractMask
from xsake.masks.base import resolve_coverage
from xsake.masks.coverage import ALL, NONE, SOME, Rectangles


def span_codes(inputs: StatisticsInputs, mask: AbstractMask, chunk: int, span: int):
    """Coverage codes [B or 1, mask heads or 1, chunks, spans]; NumPy if they are known now.

    Without positions and segments of its own a call knows them while it is traced; otherwise they
    are judged at run time, by the ends of what each chunk of queries and span of keys holds.
    """
    q_tokens, kv_tokens = inputs.q.shape[1], inputs.k.shape[1]
    codes = _of_mask(
        mask,
        block_ranges(inputs.q_positions, q_tokens, chunk),
        block_ranges(inputs.kv_positions, kv_tokens, span),
    )
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        codes = _within_segments(
            codes,
            block_ranges(inputs.q_segment_ids, q_tokens, chunk),
            block_ranges(inputs.kv_segment_ids, kv_tokens, span),
        )
    sticks_out = np.arange(codes.shape[-1]) == kv_tokens // span
    cut_off = sticks_out.reshape(1, 1, 1, -1) & (codes == ALL)
    return namespace(codes).where(cut_off, SOME, codes)


def _of_mask(mask: AbstractMask, q_ends: Any, kv_ends: Any):
    """What the mask says of each chunk and span."""
    ends = _rectangles(q_ends, kv_ends)
    if namespace(*ends) is np:
        rules = [mask.for_head(head) for head in range(mask.heads or 1)]
        return np.concatenate([resolve_coverage(rule, Rectangles(*ends)) for rule in rules], axis=1)
    if mask.heads is None:
        return mask.coverage(*ends)
    return mask.coverage(*ends, head=np.arange(mask.heads).reshape(1, -1, 1, 1))


def _within_segments(codes: Any, q_ends: Any, kv_ends: Any):
    """The codes for pairs that are also in one segment."""
    q_low, q_high, kv_low, kv_high = _rectangles(q_ends, kv_ends)
    # Negative ids are padding: it sees nothing and is not seen.
    meet = jnp.maximum(jnp.maximum(q_low, kv_low), 0) <= jnp.minimum(q_high, kv_high)
    alone = meet & (q_low == q_high) & (kv_low == kv_high)
    narrowed = jnp.where(alone | (codes == NONE), codes, SOME)
    return jnp.where(meet, narrowed, NONE)


def _rectangles(q_ends: Any, kv_ends: Any):
    """`(q_first, q_last, kv_first, kv_last)`, broadcast against [B, heads, chunks, spans]."""
    return *(x[:, None, :, None] for x in q_ends), *(x[:, None, None, :] for x in kv_ends)
