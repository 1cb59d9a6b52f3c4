"""A call cut into chunks of queries and spans of keys: tiles of scores and their element mask."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from xsake.kernels import online_softmax
from xsake.kernels.blocking import RowTileSide, pad_axis, take
from xsake.kernels.element_mask import element_mask
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.layout.grid import count_blocks


@dataclasses.dataclass(frozen=True)
class StatisticsSizes:
    """How a call is cut into rows (batch, head, chunk); it changes no result beyond rounding."""

    chunk: int  # queries of a row
    span: int  # keys that a row meets at once, a whole number of kv blocks
    # Heads of a batch element that have rows of their own; the query heads of one row stand side by
    # side
    heads: int


class TokenPieces(NamedTuple):
    """Positions and segment ids of tokens by piece, [B or 1, pieces, size]; None without."""

    positions: Array | None
    segments: Array | None


class StatisticsCall(NamedTuple):
    """The arrays of a call by chunk and span."""

    inputs: StatisticsInputs
    config: StatisticsConfig
    cut: StatisticsSizes
    q: Array  # [B * heads * chunks, D, queries], scaled
    k: Array  # [B * Hk * spans, span, D]
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

    def scores(self, rows: Array, q: Array, span: Array) -> Array:
        """Scores in base 2 of the rows' queries against a span each, [rows, span, queries]."""
        kv_head = rows // self.chunks * self.inputs.k.shape[2] // self.cut.heads
        k = take(self.k, kv_head * self.spans + span)
        products = jnp.einsum("rnd,rdm->rnm", k, q, precision="highest")
        return online_softmax.to_scores(products, None, self.config.softcap)

    def element_mask(self, rows: Array, span: Array) -> Array:
        """Element mask of such a tile."""
        mask, heads, cut = self.config.mask, self.cut.heads, self.cut
        head, chunk = rows // self.chunks, rows % self.chunks
        batch, head = head // heads, head % heads
        which = None if mask.heads is None else (head * mask.heads // heads)[:, None, None]
        q_tokens, kv_tokens = self.inputs.q.shape[1], self.inputs.k.shape[1]
        q = RowTileSide(self.q_tokens, q_tokens, cut.chunk, batch, chunk, axis=2)
        kv = RowTileSide(self.kv_tokens, kv_tokens, cut.span, batch, span, axis=1)
        visible = element_mask(q, kv, lambda q_pos, kv_pos: mask.allows(q_pos, kv_pos, which))
        assert visible is not None
        return jnp.tile(visible, (1, 1, self.queries // cut.chunk))

    def in_order(self, lse: Array, entropy: Array, block_lse: Array) -> Statistics:
        """From rows [rows, ..., queries] to [B, Tq, Hq, ...]."""
        batch, q_tokens, q_heads, _ = self.inputs.q.shape
        heads, chunk = self.cut.heads, self.cut.chunk

        def tokens(x: Array) -> Array:
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
    batch, _, q_heads, dim = inputs.q.shape
    factor = online_softmax.query_factor(config.scale, config.softcap)
    q = inputs.q.astype(inputs.dtype) * jnp.asarray(factor, inputs.dtype)
    q = _pieces(q, cut.chunk).reshape(batch, -1, cut.chunk, cut.heads, q_heads // cut.heads, dim)
    q = q.transpose(0, 3, 1, 5, 4, 2)
    tokens = lambda size, *x: TokenPieces(*(y if y is None else _pieces(y, size) for y in x))
    k = _pieces(inputs.k.astype(inputs.dtype), cut.span).transpose(0, 3, 1, 2, 4)
    return StatisticsCall(
        inputs,
        config,
        cut,
        q.reshape(-1, dim, q_heads // cut.heads * cut.chunk),
        k.reshape(-1, cut.span, dim),
        tokens(cut.chunk, inputs.q_positions, inputs.q_segment_ids),
        tokens(cut.span, inputs.kv_positions, inputs.kv_segment_ids),
    )


def _pieces(x: Array, size: int) -> Array:
    """[B, T, ...] -> [B, pieces, size, ...], with zeros at the end."""
    x = pad_axis(x, 1, count_blocks(x.shape[1], size) * size, 0)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])
