"""A call cut into chunks of queries and spans of keys: its tiles of logits, and their mask."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xsake.kernels.block_sparse import tiles
from xsake.kernels.block_sparse.blocked import take
from xsake.kernels.statistics.problem import Operands, Problem, Statistics
from xsake.layout.grid import blocks_of


@dataclasses.dataclass(frozen=True)
class Cut:
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


class Places(NamedTuple):
    """Where tokens are, piece by piece."""

    positions: Any  # [B or 1, pieces, size]
    segments: Any  # [B, pieces, size] or None

    def of(self, batch, piece) -> tuple[Any, Any]:
        """Positions and segment ids of one piece per row, [rows, size] each."""
        pick = lambda x: None if x is None else take(x, (batch % x.shape[0], piece))
        return pick(self.positions), pick(self.segments)


class Call(NamedTuple):
    """The arrays of a call by chunk and span."""

    operands: Operands
    problem: Problem
    cut: Cut
    q: Any  # [B * heads * chunks, D, queries], scaled
    k: Any  # [B * Hk * spans, span, D]
    q_places: Places
    kv_places: Places

    @property
    def chunks(self) -> int:
        return blocks_of(self.operands.q.shape[1], self.cut.chunk)

    @property
    def spans(self) -> int:
        return blocks_of(self.operands.k.shape[1], self.cut.span)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def queries(self) -> int:
        """Queries of a row, all its heads together."""
        return self.q.shape[-1]

    def logits(self, rows, q, span):
        """Logits in bits of the rows' queries against a span each, [rows, span, queries]."""
        kv_head = rows // self.chunks * self.operands.k.shape[2] // self.cut.heads
        k = take(self.k, kv_head * self.spans + span)
        products = jnp.einsum("rnd,rdm->rnm", k, q, precision="highest")
        return tiles.logits(products, None, self.problem.softcap)

    def visible(self, rows, span):
        """The element mask of such a tile."""
        mask, heads = self.problem.mask, self.cut.heads
        head, chunk = rows // self.chunks, rows % self.chunks
        batch, head = head // heads, head % heads
        which = None if mask.heads is None else (head * mask.heads // heads)[:, None, None]
        q_pos, q_ids = self.q_places.of(batch, chunk)
        kv_pos, kv_ids = self.kv_places.of(batch, span)
        token = span[:, None] * self.cut.span + np.arange(self.cut.span)[None]
        visible = (token < self.operands.k.shape[1])[:, :, None]
        visible = visible & mask.allows(q_pos[:, None, :], kv_pos[:, :, None], which)
        if q_ids is not None:
            q_ids, kv_ids = q_ids[:, None, :], kv_ids[:, :, None]
            visible = visible & (q_ids == kv_ids) & (q_ids >= 0)
        return jnp.tile(visible, (1, 1, self.queries // self.cut.chunk))

    def in_order(self, lse, entropy, block_lse) -> Statistics:
        """From rows [rows, ..., queries] to [B, Tq, Hq, ...]."""
        batch, q_tokens, q_heads, _ = self.operands.q.shape
        heads, chunk = self.cut.heads, self.cut.chunk

        def tokens(x):
            x = x.reshape(batch, heads, self.chunks, -1, q_heads // heads, chunk)
            x = x.transpose(0, 2, 5, 1, 4, 3)
            return x.reshape(batch, -1, q_heads, x.shape[-1])[:, :q_tokens]

        blocks = blocks_of(self.operands.k.shape[1], self.problem.block_kv)
        return Statistics(
            tokens(lse)[..., 0], tokens(entropy)[..., 0], tokens(block_lse)[..., :blocks]
        )


def row_heads(operands: Operands, problem: Problem) -> int:
    """Heads that need rows of their own: the query heads of a kv head can share one rule."""
    q_heads, kv_heads = operands.q.shape[2], operands.k.shape[2]
    return kv_heads if problem.mask.heads in (None, 1, kv_heads) else q_heads


def prepare(operands: Operands, problem: Problem, cut: Cut) -> Call:
    """Cut the arrays of a call."""
    batch, q_tokens, q_heads, dim = operands.q.shape
    kv_tokens = operands.k.shape[1]
    factor = tiles.query_factor(problem.scale, problem.softcap)
    q = operands.q.astype(operands.dtype) * jnp.asarray(factor, operands.dtype)
    q = _pieces(q, cut.chunk).reshape(batch, -1, cut.chunk, cut.heads, q_heads // cut.heads, dim)
    q = q.transpose(0, 3, 1, 5, 4, 2)
    k = _pieces(operands.k.astype(operands.dtype), cut.span).transpose(0, 3, 1, 2, 4)
    return Call(
        operands,
        problem,
        cut,
        q.reshape(-1, dim, q_heads // cut.heads * cut.chunk),
        k.reshape(-1, cut.span, dim),
        _places(operands.q_positions, operands.q_segment_ids, q_tokens, cut.chunk),
        _places(operands.kv_positions, operands.kv_segment_ids, kv_tokens, cut.span),
    )


def _pieces(x, size: int):
    """[B, T, ...] -> [B, pieces, size, ...], with zeros at the end."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _places(positions, segments, tokens: int, size: int) -> Places:
    if positions is None:
        positions = jnp.asarray(np.arange(tokens, dtype=np.int32))[None]
    return Places(_pieces(positions, size), None if segments is None else _pieces(segments, size))
