"""Element masks of GPU kernels: coordinates of tiles, and the visible pairs of two of them."""

import dataclasses
import functools
from operator import and_
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.schedule import GpuSchedule, RowLists, Tile
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import quotient, remainder


class TileCoords(NamedTuple):
    """Coordinates of a tile."""

    batch: Any
    head: Any
    block: Any
    number: Any  # of the block, among all of its side
    part: Any  # of the block
    start: Any  # first token of the tile, in arrays whose blocks have `Tile.padded` tokens

    def tokens(self, size: int, features: int) -> tuple:
        """Index of the tile in arrays [B, T, H * D]."""
        column = pl.ds(self.head * features, features)
        return self.batch, pl.ds(self.start, size), column

    def vector(self, size: int) -> tuple:
        """Index of the tile in arrays [B, H, T]."""
        return self.batch, self.head, pl.ds(self.start, size)

    def shared_vector(self, x: Any, size: int) -> tuple:
        """Index of the tile in arrays [B or 1, T]."""
        return (self.batch if x.shape[0] > 1 else 0), pl.ds(self.start, size)


def locate_tile(number: Any, part: Any, tile: Tile, heads: int, blocks: int) -> TileCoords:
    """Coordinates of one tile of a block."""
    block, plane = remainder(number, blocks), quotient(number, blocks)
    start = block * tile.padded + part * tile.tile
    return TileCoords(quotient(plane, heads), remainder(plane, heads), block, number, part, start)


@dataclasses.dataclass(frozen=True, eq=False)
class TilePairs:
    """The pairs of an outer tile and an inner one, as a tile [outer, inner].

    Args:
        schedule: of the pass.
        lists: its lists in global memory.
        outer, inner: coordinates of the two tiles.
        item: of the list.
        is_partial: whether the item has an element mask.
        sides: `(query side, key side)`, for positions and segment ids.
        mask_blocks: element masks, or None.
    """

    schedule: GpuSchedule
    lists: RowLists
    outer: TileCoords
    inner: TileCoords
    item: Any
    is_partial: Any
    sides: tuple[Any, Any]
    mask_blocks: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.schedule.outer.tile, self.schedule.inner.tile

    @property
    def _q_axis(self) -> int:
        return 1 if self.schedule.grid.is_kv_major else 0

    def element_mask(self) -> Any:
        """Visible pairs of a masked step; None if all are."""
        schedule, layout = self.schedule, self.schedule.layout
        q_axis, kv_axis = self._q_axis, 1 - self._q_axis
        conditions = []
        if layout.kv_tokens % layout.block_kv:
            conditions.append(self._token(kv_axis) < layout.kv_tokens)
        if layout.q_tokens % layout.block_q:
            # Scores of padded queries with a poisoned key would be NaN.
            conditions.append(self._token(q_axis) < layout.q_tokens)
        if isinstance(schedule.mask_program, MaskProgram):
            q_pos, kv_pos = self._positions(q_axis), self._positions(kv_axis)
            scalars = self._scalars(schedule.mask_program)
            conditions.append(schedule.mask_program.allows(q_pos, kv_pos, scalars))
        if self.mask_blocks is not None:
            conditions.append(self._mask_block() != 0)
        if self.sides[0].segments is not None:
            q_ids, kv_ids = self._ids(q_axis), self._ids(kv_axis)
            conditions.append((q_ids == kv_ids) & (q_ids >= 0))
        inside = [self._block_index(axis) < tile.block for axis, tile in self._padded_tiles()]
        if conditions and not schedule.has_unmasked:
            partial = gpu.full(self.shape, self.is_partial.astype(jnp.int32), jnp.int32)
            conditions = [(partial == 0) | functools.reduce(and_, conditions)]
        conditions = inside + conditions
        return functools.reduce(and_, conditions) if conditions else None

    def _padded_tiles(self) -> list[tuple[int, Tile]]:
        tiles = enumerate((self.schedule.outer, self.schedule.inner))
        return [(axis, tile) for axis, tile in tiles if tile.is_padded]

    def _at(self, axis: int) -> tuple[TileCoords, Tile]:
        if axis == 0:
            return self.outer, self.schedule.outer
        return self.inner, self.schedule.inner

    def _block_index(self, axis: int) -> Any:
        """Indices of tokens within their block."""
        coords, tile = self._at(axis)
        return gpu.indices(self.shape, axis) + coords.part * tile.tile

    def _token(self, axis: int) -> Any:
        """Indices of tokens in their sequence."""
        coords, tile = self._at(axis)
        first = coords.block * tile.block + coords.part * tile.tile
        return gpu.indices(self.shape, axis) + first

    def _positions(self, axis: int) -> Any:
        ref = self.sides[int(axis != self._q_axis)].positions
        return self._token(axis) if ref is None else self._integers(ref, axis)

    def _ids(self, axis: int) -> Any:
        return self._integers(self.sides[int(axis != self._q_axis)].segments, axis)

    def _integers(self, ref: Any, axis: int) -> Any:
        """Integers of the tokens of one side, [B or 1, T], along an axis of the tile."""
        coords, tile = self._at(axis)
        integers = gpu.vector(ref.at[coords.shared_vector(ref, tile.tile)], axis)
        return gpu.along(integers, self.shape, axis)

    def _mask_block(self) -> Any:
        number = self.lists.mask_ids[self.item]
        rows = pl.ds(self.outer.part * self.schedule.outer.tile, self.shape[0])
        columns = pl.ds(self.inner.part * self.schedule.inner.tile, self.shape[1])
        return gpu.fragment(self.mask_blocks.at[number, rows, columns], gpu.accumulator())

    def _scalars(self, program: MaskProgram) -> list:
        """Integers of the mask program for the current head."""
        head = 0
        grid = self.schedule.grid
        if program.heads > 1:
            q_number, _ = grid.q_and_kv(self.outer.number, self.inner.number)
            head = quotient(grid.q_head(q_number), grid.q_heads // program.heads)
        return [self.lists.tables[row * program.heads + head] for row in range(len(program.rows))]
