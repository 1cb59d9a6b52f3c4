"""Which spans of keys each chunk of queries has to visit, and which of them need a mask."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels.row_loop import RowTable
from xsake.kernels.statistics.tiles import StatisticsSizes
from xsake.kernels.statistics.types import StatisticsConfig, StatisticsInputs
from xsake.layout.csr import namespace
from xsake.layout.grid import count_blocks
from xsake.masks import AbstractMask, Coverage
from xsake.masks.base import resolve_coverage
from xsake.masks.coverage import Rectangles

NONE, SOME, ALL, UNKNOWN = (np.int8(code) for code in Coverage)


class SpanLists(NamedTuple):
    """The spans of every row (batch, head, chunk): partial ones first, then full ones."""

    rows: RowTable
    span: Any  # int32 [entries]


def list_spans(
    inputs: StatisticsInputs, config: StatisticsConfig, cut: StatisticsSizes
) -> SpanLists:
    """Every span in which a query of the row may see a key.

    Without positions and segments of its own a call knows its spans while it is traced, as NumPy;
    otherwise they are judged at run time, by the ends of what each chunk and span holds.
    """
    codes = _codes(inputs, config, cut)
    xp = namespace(codes)
    partial, full = (codes == SOME) | (codes == UNKNOWN), codes == ALL
    order = xp.argsort(xp.where(partial, 0, xp.where(full, 1, 2)), axis=-1, stable=True)
    lists = np.arange(np.prod(codes.shape[:-1]), dtype=np.int32).reshape(codes.shape[:-1])

    def spread(x: Any):
        x = xp.repeat(x, cut.heads // x.shape[1], axis=1)
        return xp.broadcast_to(x, (inputs.q.shape[0], *x.shape[1:])).reshape(-1)

    counts = (x.sum(-1, dtype=xp.int32) for x in (partial, full))
    rows = RowTable(spread(lists * codes.shape[-1]), *map(spread, counts))
    return SpanLists(rows, order.reshape(-1).astype(xp.int32))


def _codes(inputs: StatisticsInputs, config: StatisticsConfig, cut: StatisticsSizes):
    """Coverage codes [B or 1, mask heads or 1, chunks, spans]; NumPy if they are known now."""
    q_tokens, kv_tokens = inputs.q.shape[1], inputs.k.shape[1]
    codes = _of_mask(
        config.mask,
        _ends(inputs.q_positions, q_tokens, cut.chunk),
        _ends(inputs.kv_positions, kv_tokens, cut.span),
    )
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        codes = _within_segments(
            codes,
            _ends(inputs.q_segment_ids, q_tokens, cut.chunk),
            _ends(inputs.kv_segment_ids, kv_tokens, cut.span),
        )
    sticks_out = np.arange(codes.shape[-1]) == kv_tokens // cut.span
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


def _ends(values: Array | None, tokens: int, size: int) -> Any:
    """Least and greatest value of each piece, [B or 1, pieces]; of token indices if None."""
    if values is None:
        first = np.arange(count_blocks(tokens, size), dtype=np.int32)[None] * size
        return first, np.minimum(first + (size - 1), tokens - 1)
    values = jnp.pad(values, ((0, 0), (0, -tokens % size)), mode="edge")
    values = values.reshape(values.shape[0], -1, size)
    return values.min(-1), values.max(-1)
