"""Block layouts: CSR lists of the kv blocks that each query block computes."""

from xsake.layout.block_layout import BlockLayout
from xsake.layout.csr import capacity_bucket
from xsake.layout.grid import BlockGrid
from xsake.layout.stats import LayoutStats
from xsake.layout.transposed import TransposedLayout
from xsake.masks.array_masks import ListedBlocks

__all__ = [
    "BlockGrid",
    "BlockLayout",
    "LayoutStats",
    "ListedBlocks",
    "TransposedLayout",
    "capacity_bucket",
]
