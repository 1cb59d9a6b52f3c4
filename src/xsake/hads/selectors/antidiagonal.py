"""XAttention selector: softmax over antidiagonal sums of small cells, summed over blocks."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xsake.errors import ArgumentError
from xsake.hads.selectors.base import ScoringContext, Selector, group_heads, split_blocks


@dataclasses.dataclass(frozen=True)
class Antidiagonal(Selector):
    """XAttention selector; the antidiagonal of a cell covers each of its queries and keys once.

    Args:
        stride: side of a cell in tokens; must divide the block.
    """

    stride: int = 8
    name: ClassVar[str] = "antidiagonal"

    def masses(self, q, k, context: ScoringContext, components=None):
        """See `Selector.masses`."""
        if context.block % self.stride:
            raise ArgumentError(
                "stride-block",
                "the stride must divide the block",
                got=f"stride {self.stride}, block {context.block}",
                expected="a block that is a multiple of the stride",
            )
        keys = self._cells(k, context.block, reverse=False)
        queries = group_heads(self._cells(q, context.block, reverse=True), k.shape[2])
        per_block = context.block // self.stride
        cells = keys.shape[1]

        def row(i):
            own = jax.lax.dynamic_slice_in_dim(queries, i * per_block, per_block, axis=1)
            scores = context.scale / self.stride * jnp.einsum("bihgd,bjhd->bhgij", own, keys)
            visible = np.arange(cells)[None] <= i * per_block + np.arange(per_block)[:, None]
            masses = jax.nn.softmax(scores.astype(jnp.float32), axis=-1, where=visible).mean(3)
            return masses.reshape(*masses.shape[:3], -1, per_block).sum(-1)

        rows = jax.lax.map(row, np.arange(cells // per_block))
        return jnp.moveaxis(rows, 0, 3).reshape(q.shape[0], q.shape[2], *2 * rows.shape[:1])

    def _cells(self, x, block: int, *, reverse: bool):
        """Concatenate the tokens of each cell into one vector per head."""
        rows = split_blocks(x, block)
        cells = rows.reshape(x.shape[0], -1, self.stride, *x.shape[2:])
        cells = cells[:, :, ::-1] if reverse else cells
        return jnp.moveaxis(cells, 2, 3).reshape(*cells.shape[:2], x.shape[2], -1)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost: `stride` of the `stride^2` scores of a cell, no values."""
        return 1 / (2 * self.stride)
