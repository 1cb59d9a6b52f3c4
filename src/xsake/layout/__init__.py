"""Block layouts: which kv blocks each query block visits, in what order, full or partial."""

from xsake.layout.block_layout import BlockLayout
from xsake.layout.exported import register_for_export
from xsake.layout.grid import BlockGrid
from xsake.layout.listed import ListedBlocks
from xsake.layout.ragged import capacity_bucket
from xsake.layout.stats import LayoutStats
from xsake.layout.transposed import TransposedLayout

__all__ = [
    "BlockGrid",
    "BlockLayout",
    "LayoutStats",
    "ListedBlocks",
    "TransposedLayout",
    "capacity_bucket",
]

register_for_export()
