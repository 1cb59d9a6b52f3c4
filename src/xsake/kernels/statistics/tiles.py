"""A call cut into chunks of queries and spans of keys: tiles of scores and their element mask."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xsake.kernels import online_softmax
from xsake.kernels.blocking import take
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.layout.grid import count_blocks


@dataclasses.dataclass(frozen=True)
class StatisticsSizes:
    """How a call is cut into rows (batch, head, chunk); it changes no result beyond rounding.

    Args:
        chunk: queries of a row.
        span: keys that a row meets at once, a whole number of kv blocks.
        heads: heads of a batch element that have rows of their own; the query heads of one row
            stand side by side.
    """

    chunk: int
    span: int
    heads: int


class TokenPieces(NamedTuple):
    """Positions and segment ids of tokens by piece."""

    positions: Any  # [B or 1, pieces, size]
    segments: Any  # [B, pieces, size] or None

    def of(self, batch, piece) -> tuple[Any, Any]:
        """Positions and segment ids of one piece per row, [rows, size] each."""
        pick = lambda x: None if x is None else take(x, (batch % x.shape[0], piece))
        return pick(self.positions), pick(self.segments)


class StatisticsCall(NamedTuple):
    """The arrays of a call by chunk and span."""

    inputs: StatisticsInputs
    config: StatisticsConfig
    cut: StatisticsSizes
    q: Any  # [B * heads * chunks, D, queries], scaled
    k: Any  # [B * Hk * spans, span, D]
    q_tokens: TokenPieces
    kv_tokens: TokenPieces

    @property
    def chunks(self) -> int:
        return count_blocks(self.inputs.q.shape[1], self.cut.chunk)

    @property
    def spans(self) -> int:
        return count_blocks(self.inputs.k.shape[1], self.cut.span)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def queries(self) -> int:
        """Queries of a row, all its heads together."""
        return self.q.shape[-1]

    def scores(self, rows, q, span):
        """Scores in base 2 of the rows' queries against a span each, [rows, span, queries]."""
        kv_head = rows // self.chunks * self.inputs.k.shape[2] // self.cut.heads
        k = take(self.k, kv_head * self.spans + span)
        products = jnp.einsum("rnd,rdm->rnm", k, q, precision="highest")
        return online_softmax.to_scores(products, None, self.config.softcap)

    def element_mask(self, rows, span):
        """Element mask of such a tile."""
        mask, heads = self.config.mask, self.cut.heads
        head, chunk = rows // self.chunks, rows % self.chunks
        batch, head = head // heads, head % heads
        which = None if mask.heads is None else (head * mask.heads // heads)[:, None, None]
        q_pos, q_ids = self.q_tokens.of(batch, chunk)
        kv_pos, kv_ids = self.kv_tokens.of(batch, span)
        token = span[:, None] * self.cut.span + np.arange(self.cut.span)[None]
        visible = (token < self.inputs.k.shape[1])[:, :, None]
        visible = visible & mask.allows(q_pos[:, None, :], kv_pos[:, :, None], which)
        if q_ids is not None:
            q_ids, kv_ids = q_ids[:, None, :], kv_ids[:, :, None]
            visible = visible & (q_ids == kv_ids) & (q_ids >= 0)
        return jnp.tile(visible, (1, 1, self.queries // self.cut.chunk))

    def in_order(self, lse, entropy, block_lse) -> Statistics:
        """From rows [rows, ..., queries] to [B, Tq, Hq, ...]."""
        batch, q_tokens, q_heads, _ = self.inputs.q.shape
        heads, chunk = self.cut.heads, self.cut.chunk

        def tokens(x):
            x = x.reshape(batch, heads, self.chunks, -1, q_heads // heads, chunk)
            x = x.transpose(0, 2, 5, 1, 4, 3)
            return x.reshape(batch, -1, q_heads, x.shape[-1])[:, :q_tokens]

        blocks = count_blocks(self.inputs.k.shape[1], self.config.block_kv)
        return Statistics(
            tokens(lse)[..., 0], tokens(entropy)[..., 0], tokens(block_lse)[..., :blocks]
        )


def row_heads(inputs: StatisticsInputs, config: StatisticsConfig) -> int:
    """Heads that need rows of their own: the query heads of a kv head can share one rule."""
    q_heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    return kv_heads if config.mask.heads in (None, 1, kv_heads) else q_heads


def prepare(
    inputs: StatisticsInputs, config: StatisticsConfig, cut: StatisticsSizes
) -> StatisticsCall:
    """Cut the arrays of a call."""
    batch, q_tokens, q_heads, dim = inputs.q.shape
    kv_tokens = inputs.k.shape[1]
    factor = online_softmax.query_factor(config.scale, config.softcap)
    q = inputs.q.astype(inputs.dtype) * jnp.asarray(factor, inputs.dtype)
    q = _pieces(q, cut.chunk).reshape(batch, -1, cut.chunk, cut.heads, q_heads // cut.heads, dim)
    q = q.transpose(0, 3, 1, 5, 4, 2)
    k = _pieces(inputs.k.astype(inputs.dtype), cut.span).transpose(0, 3, 1, 2, 4)
    return StatisticsCall(
        inputs,
        config,
        cut,
        q.reshape(-1, dim, q_heads // cut.heads * cut.chunk),
        k.reshape(-1, cut.span, dim),
        _token_pieces(inputs.q_positions, inputs.q_segment_ids, q_tokens, cut.chunk),
        _token_pieces(inputs.kv_positions, inputs.kv_segment_ids, kv_tokens, cut.span),
    )


def _pieces(x, size: int):
    """[B, T, ...] -> [B, pieces, size, ...], with zeros at the end."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _token_pieces(positions, segments, tokens: int, size: int) -> TokenPieces:
    if positions is None:
        positions = jnp.asarray(np.arange(tokens, dtype=np.int32))[None]
    return TokenPieces(
        _pieces(positions, size), None if segments is None else _pieces(segments, size)
    )
