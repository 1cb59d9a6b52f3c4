"""Block layouts: CSR lists of the kv blocks that each query block computes."""

from xsake.layout.block_layout import BlockLayout
from xsake.layout.csr import capacity_bucket
from xsake.layout.explicit_blocks import ListedBlocks
from xsake.layout.exported import register_for_export
from xsake.layout.grid import BlockGrid
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
