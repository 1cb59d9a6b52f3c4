"""Tile sizes that were found to be fast, by kind of call; using them never changes a result.

with pinned(table):            # calls that are traced in here take their tiles from the table
    out = xsake.attention(q, k, v, mask=mask)

The table is part of what `jit` compares, so a function that was compiled outside is compiled again.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager

import jax

from xsake.kernels.block_sparse.problem import TileSizes

_SMALLEST = 8  # rows below it are one bucket


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Calls that share their tile sizes.

    Args:
        platform: "cpu", or "accelerator" for all others.
        dtype: of the operands.
        head_dim: of queries and keys.
        block_q, block_kv: tokens of a block.
        rows: rows of blocks that are walked, to the power of two below.
        blocks: that a row lists in the mean, to the power of two below.
    """

    platform: str
    dtype: str
    head_dim: int
    block_q: int
    block_kv: int
    rows: int
    blocks: int

    @classmethod
    def of(cls, layout, rows: int, platform: str, dtype: str, head_dim: int) -> "Bucket":
        """The bucket of one walk over a layout; a traced one counts with its capacity.

        Args:
            layout: a `BlockLayout`.
            rows: that are walked.
            platform: that the walk is lowered for.
            dtype: of the operands.
            head_dim: of queries and keys.
        """
        walked = rows * layout.capacity / (layout.row_starts.shape[0] - 1)
        return cls(
            platform, dtype, head_dim, layout.block_q, layout.block_kv,
            _below(max(rows, _SMALLEST)), _below(max(int(walked / max(rows, 1)), 1)),
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
        """What was found for such calls; None if nobody looked."""
        return next((sizes for known, sizes in self.entries if known == bucket), None)


_current = jax.make_user_context(TileTable())


def pinned(table: TileTable) -> AbstractContextManager[None]:
    """Calls that are traced inside take their tiles from this table, where it knows them.

    Args:
        table: instead of the one that was pinned before.
    """
    return _current(table)


def tuned(layout, rows: int, platform: str, dtype: str, head_dim: int) -> TileSizes | None:
    """The pinned tile sizes of one walk; None: the backend's own. Arguments as in `Bucket.of`."""
    table: TileTable = _current.value
    if not table.entries:
        return None
    return table.find(Bucket.of(layout, rows, platform, dtype, head_dim))


def _below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
