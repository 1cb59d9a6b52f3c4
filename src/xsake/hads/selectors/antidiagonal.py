"""Softmax over small cells of the scores on their antidiagonals, summed over blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from xsake.errors import ArgumentError
from xsake.hads.selectors.selector import Look, by_block, grouped


@dataclasses.dataclass(frozen=True)
class Antidiagonal:
    """The selector of XAttention: each antidiagonal meets every query and key of its cell once.

    Args:
        stride: tokens along the side of a cell; must divide the block.
    """

    stride: int = 8
    name: str = dataclasses.field(default="antidiagonal", init=False)

    def masses(
        self, q: Float[Array, "B T Hq D"], k: Float[Array, "B T Hk D"], look: Look, dims=None
    ) -> Float[Array, "B Hq Nq Nk"]:
        """See `Selector.masses`."""
        if look.block % self.stride:
            raise ArgumentError(
                "cells must fill blocks",
                got=f"stride {self.stride}, block {look.block}",
                expected="a block that is a multiple of the stride",
            )
        keys = self._cells(k, look.block, backwards=False)
        queries = grouped(self._cells(q, look.block, backwards=True), k.shape[2])
        per_block = look.block // self.stride
        cells = keys.shape[1]

        def row(i):
            own = jax.lax.dynamic_slice_in_dim(queries, i * per_block, per_block, axis=1)
            scores = look.scale / self.stride * jnp.einsum("bihgd,bjhd->bhgij", own, keys)
            seen = np.arange(cells)[None] <= i * per_block + np.arange(per_block)[:, None]
            found = jax.nn.softmax(scores.astype(jnp.float32), axis=-1, where=seen).mean(3)
            return found.reshape(*found.shape[:3], -1, per_block).sum(-1)

        found = jax.lax.map(row, np.arange(cells // per_block))
        return jnp.moveaxis(found, 0, 3).reshape(q.shape[0], q.shape[2], *2 * found.shape[:1])

    def _cells(self, x, block: int, *, backwards: bool):
        """One long vector per cell and head: its tokens one after the other."""
        rows = by_block(x, block)
        cells = rows.reshape(x.shape[0], -1, self.stride, *x.shape[2:])
        cells = cells[:, :, ::-1] if backwards else cells
        return jnp.moveaxis(cells, 2, 3).reshape(*cells.shape[:2], x.shape[2], -1)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """`stride` of the `stride^2` scores of a cell, and no values."""
        return 1 / (2 * self.stride)
