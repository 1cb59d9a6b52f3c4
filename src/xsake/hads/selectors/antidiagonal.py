"""XAttention selector: softmax over antidiagonal sums of small cells, summed over blocks."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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
        keys = self._cells(context.split_keys(k), reverse=False)
        queries = self._cells(split_blocks(q, context.block), reverse=True)
        queries = group_heads(queries, k.shape[2])
        per_block = context.block // self.stride
        num_rows, cells = queries.shape[1] // per_block, np.arange(keys.shape[1])
        numbers = jnp.asarray(context.rows(num_rows))

        def row(i):
            own = jax.lax.dynamic_slice_in_dim(queries, i * per_block, per_block, axis=1)
            scores = context.scale / self.stride * jnp.einsum("bihgd,bjhd->bhgij", own, keys)
            first = numbers[:, i, None, None] * per_block
            visible = cells[None, None] <= first + np.arange(per_block)[None, :, None]
            scores = scores.astype(jnp.float32)
            masses = jax.nn.softmax(scores, axis=-1, where=visible[:, None, None]).mean(3)
            return masses.reshape(*masses.shape[:3], -1, per_block).sum(-1)

        rows = jax.lax.map(row, np.arange(num_rows))
        return jnp.moveaxis(rows, 0, 3).reshape(q.shape[0], q.shape[2], num_rows, -1)

    def _cells(self, blocks: Float[Array, "B N b H D"], *, reverse: bool):
        """Concatenate the tokens of each cell into one vector per head."""
        batch, _, _, *sizes = blocks.shape
        cells = blocks.reshape(batch, -1, self.stride, *sizes)
        cells = cells[:, :, ::-1] if reverse else cells
        return jnp.moveaxis(cells, 2, 3).reshape(*cells.shape[:2], sizes[0], -1)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost: `stride` of the `stride^2` scores of a cell, no values."""
        return 1 / (2 * self.stride)
