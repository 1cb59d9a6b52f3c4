"""Element masks of GPU kernels: coordinates of tiles, and the visible pairs of two of them."""

import dataclasses
import functools
from operator import and_
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.ops import Ref, Scalar
from xsake.kernels.block_sparse.mosaic_gpu.schedule import GpuSchedule, RowLists, Tile
from xsake.kernels.element_mask import TileSide, element_mask
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import quotient, remainder


class TileCoords(NamedTuple):
    """Coordinates of a tile."""

    batch: Scalar
    head: Scalar
    block: Scalar
    number: Scalar  # of the block, among all of its side
    part: Scalar  # of the block
    start: Scalar  # first token of the tile, in arrays whose blocks have `Tile.padded` tokens

    def tokens(self, size: int, features: int) -> tuple[Any, ...]:
        """Index of the tile in arrays [B, T, H * D]."""
        column = pl.ds(self.head * features, features)
        return self.batch, pl.ds(self.start, size), column

    def vector(self, size: int) -> tuple[Any, ...]:
        """Index of the tile in arrays [B, H, T]."""
        return self.batch, self.head, pl.ds(self.start, size)


def locate_tile(number: Scalar, part: Scalar, tile: Tile, heads: int, blocks: int) -> TileCoords:
    """Coordinates of one tile of a block."""
    block, plane = remainder(number, blocks), quotient(number, blocks)
    start = block * tile.padded + part * tile.tile
    return TileCoords(quotient(plane, heads), remainder(plane, heads), block, number, part, start)


@dataclasses.dataclass(frozen=True, eq=False)
class GpuTileSide(TileSide):
    """A tile of queries or keys along an axis of a tile of scores."""

    tile: int  # tokens of a tile
    coords: TileCoords
    shape: tuple[int, int]  # of the tile of scores
    axis: int

    def block_index(self) -> Array:
        """Indices of the tokens in their block."""
        return gpu.indices(self.shape, self.axis) + self.coords.part * self.tile

    def token_index(self) -> Array:
        """See `TileSide`."""
        first = self.coords.block * self.block + self.coords.part * self.tile
        return gpu.indices(self.shape, self.axis) + first

    def along_axis(self, integers: Ref) -> Array:
        """[B or 1, T] along the axis of the tile."""
        batch = self.coords.batch if integers.shape[0] > 1 else 0
        x = gpu.vector(integers.at[batch, pl.ds(self.coords.start, self.tile)], self.axis)
        return gpu.along(x, self.shape, self.axis)


@dataclasses.dataclass(frozen=True, eq=False)
class TilePairs:
    """The pairs of an outer tile and an inner one, as a tile [outer, inner]."""

    schedule: GpuSchedule  # of the pass
    lists: RowLists  # its lists in global memory
    coords: tuple[TileCoords, TileCoords]  # of the two tiles
    item: Scalar  # of the list
    is_partial: Scalar  # whether the item has an element mask
    sides: tuple[Any, Any]  # `(outer, inner)`, whole arrays, for positions and segment ids
    mask_blocks: Ref  # element masks, or None

    @property
    def shape(self) -> tuple[int, int]:
        return self.schedule.outer.tile, self.schedule.inner.tile

    def element_mask(self) -> Array | None:
        """Visible pairs of a masked step; None if all are."""
        schedule, grid, program = self.schedule, self.schedule.grid, self.schedule.mask_program
        parts = zip(self.sides, schedule.tokens, schedule.tiles, self.coords, strict=True)
        sides = [
            GpuTileSide(integers, tokens, tile.block, tile.tile, coords, self.shape, axis)
            for axis, (integers, tokens, tile, coords) in enumerate(parts)
        ]
        allows = None
        if isinstance(program, MaskProgram):
            q_number, _ = grid.q_and_kv(*(x.number for x in self.coords))
            allows = program.of_query_block(self.lists.tables, grid, q_number)
        mask_block = None if self.mask_blocks is None else self._mask_block
        mask = element_mask(*grid.q_and_kv(*sides), allows, mask_block)
        if mask is not None and not schedule.has_unmasked:
            partial = gpu.full(self.shape, self.is_partial.astype(jnp.int32), jnp.int32)
            mask = (partial == 0) | mask
        # Tokens that pad a block to whole tiles.
        padded = [side for side in sides if side.block % side.tile]
        conditions = [side.block_index() < side.block for side in padded]
        conditions += [] if mask is None else [mask]
        return functools.reduce(and_, conditions) if conditions else None

    def _mask_block(self) -> Array:
        assert self.mask_blocks is not None
        parts = zip(self.coords, self.schedule.tiles, strict=True)
        rows, columns = (pl.ds(x.part * tile.tile, tile.tile) for x, tile in parts)
        tile = self.mask_blocks.at[self.lists.mask_ids[self.item], rows, columns]
        return gpu.fragment(tile, gpu.accumulator())
