"""Tile sizes that were measured to be fast, by kind of call; they never change a result.

with pin_tiles(table):            # calls that are traced in here take their tiles from the table
    out = xsake.attention(q, k, v, mask=mask)

The table is part of what `jit` compares, so a function that was compiled outside is compiled again.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager

import jax

from xsake.kernels.block_sparse.types import TileSizes
from xsake.layout import BlockLayout

_SMALLEST = 8  # rows below it are one bucket


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Calls that share their tile sizes."""

    platform: str  # "cpu", or "accelerator" for all others
    dtype: str  # of the operands
    head_dim: int  # of queries and keys
    block_q: int  # tokens of a block
    block_kv: int
    rows: int  # rows of blocks, rounded down to a power of two
    blocks: int  # mean blocks of a row, rounded down to a power of two

    @classmethod
    def of(
        cls, layout: BlockLayout, rows: int, platform: str, dtype: str, head_dim: int
    ) -> "Bucket":
        """The bucket of a pass over `rows` rows of a layout; a traced one counts by capacity."""
        items = rows * layout.capacity / (layout.row_starts.shape[0] - 1)
        return cls(
            platform, dtype, head_dim, layout.block_q, layout.block_kv,
            _floor_power(max(rows, _SMALLEST)), _floor_power(max(int(items / max(rows, 1)), 1)),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TileTable:
    """Tile sizes by bucket: immutable, so that `jit` can compare tables.

    Example:
        >>> bucket = Bucket("cpu", "float32", 64, 128, 128, 256, 16)
        >>> table = TileTable.of({bucket: TileSizes(8, 4)})
        >>> table.find(bucket)
        TileSizes(rows=8, blocks=4)
    """

    entries: tuple[tuple[Bucket, TileSizes], ...] = ()

    @classmethod
    def of(cls, entries: Mapping[Bucket, TileSizes]) -> "TileTable":
        """A table, whatever the order of its entries."""
        return cls(tuple(sorted(entries.items(), key=lambda entry: entry[0])))

    def find(self, bucket: Bucket) -> TileSizes | None:
        """The tile sizes of a bucket; None if it was not tuned."""
        return next((sizes for entry, sizes in self.entries if entry == bucket), None)


PINNED = jax.make_user_context(TileTable())


def pin_tiles(table: TileTable) -> AbstractContextManager[None]:
    """Calls that are traced inside take their tiles from this table, where it knows them."""
    return PINNED(table)


def _floor_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)
