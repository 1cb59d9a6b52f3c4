"""Element masks of TPU kernels, in the orientation of a pass's tiles."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels.block_sparse.mosaic_tpu.schedule import LIVE, PARTIAL, TpuSchedule
from xsake.kernels.blocking import KeyArrays, QueryArrays
from xsake.kernels.element_mask import TileSide, element_mask
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import remainder

type Ref = Any  # memory that a kernel reads by `ref[...]`
type Scalar = Any  # int32 in scalar memory or registers, or an int


@dataclasses.dataclass(frozen=True, eq=False)
class GroupMasks:
    """Element masks of the blocks of a group."""

    schedule: TpuSchedule  # of the pass
    outer: Scalar  # number of the row's outer block
    inner: Sequence[Scalar]  # numbers of the blocks
    entries: Sequence[Scalar]  # their packed entries
    mask_blocks: Sequence[Ref]  # refs of their precomputed element masks, or None each
    tables: Ref  # integers of the mask program
    keys_first: bool  # tiles of scores are [keys, queries]

    def of_slot(self, slot: int, queries: QueryArrays, keys: KeyArrays) -> Array:
        """Element mask of a slot, in the orientation of the pass's tiles."""
        layout, grid, program = self.schedule.layout, self.schedule.grid, self.schedule.mask_program
        q_number, kv_number = grid.q_and_kv(self.outer, self.inner[slot])
        shape, q_axis = (layout.block_q, layout.block_kv), 0
        if self.keys_first:
            shape, q_axis = shape[::-1], 1
        first = remainder(q_number, grid.q_blocks) * layout.block_q
        q = TpuTileSide(queries, layout.q_tokens, layout.block_q, first, shape, q_axis)
        first = remainder(kv_number, grid.kv_blocks) * layout.block_kv
        kv = TpuTileSide(keys, layout.kv_tokens, layout.block_kv, first, shape, 1 - q_axis)
        allows, load_block, mask_block = None, None, self.mask_blocks[slot]
        if isinstance(program, MaskProgram):
            allows = program.of_query_block(self.tables, grid, q_number)
        if mask_block is not None:
            load_block = lambda: mask_block[...].astype(jnp.int32)
        mask = element_mask(q, kv, allows, load_block)
        is_live = _is_set(self.entries[slot], LIVE, shape)
        if mask is None:
            return is_live
        return is_live & (jnp.logical_not(_is_set(self.entries[slot], PARTIAL, shape)) | mask)


@dataclasses.dataclass(frozen=True, eq=False)
class TpuTileSide(TileSide):
    """A block of queries or keys along an axis of a tile of scores."""

    first: Scalar  # token
    shape: tuple[int, int]  # of the tile
    axis: int

    def token_index(self) -> Array:
        """See `TileSide`."""
        return self.first + lax.broadcasted_iota(jnp.int32, self.shape, self.axis)

    def along_axis(self, integers: Ref) -> Array:
        """[1, n] along the axis of the tile."""
        x = integers[...]
        return jnp.broadcast_to(x, self.shape) if self.axis == 1 else to_column(x, self.shape[1])


def _is_set(entry: Scalar, flag: int, shape: tuple[int, int]) -> Array:
    """A flag as a tile: Mosaic does not broadcast scalar booleans."""
    return jnp.full(shape, entry & flag, jnp.int32) != 0


def to_column(numbers: Array, width: int) -> Array:
    """[1, n] -> [n, width]: from lanes to sublanes."""
    return jnp.broadcast_to(numbers, (width, numbers.shape[1])).T
