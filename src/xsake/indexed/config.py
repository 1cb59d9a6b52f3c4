"""Configuration of attention with a block indexer."""

import dataclasses
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from xsake._schema import Size
from xsake.errors import ArgumentError
from xsake.kernels.block_selection import BlockSelection
from xsake.kernels.top_blocks.types import Pooling, TopBlocksConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes and scores of the indexer; the defaults are those of MSA (arXiv 2606.13392).

    MoBA (arXiv 2502.13189): `Config(size=512, count=3, pooling="mean")` with `moba_index`. DSA
    (DeepSeek-V3.2) selects tokens; `Config(has_relu=True, is_shared=True)` with index weights
    selects the blocks that hold its best tokens.

    Args:
        size: tokens per block.
        count: blocks selected per query, forced ones included.
        first: forced blocks at the start of the sequence.
        local: forced blocks that end with the block of the query.
        pooling: "max": score of the best key of a block; "mean": score of the mean of its keys.
        has_relu: apply ReLU to the product of each index head.
        is_shared: index heads are added, and all kv heads use the same blocks. False: every kv head
            has its own index heads.

    Example:
        >>> from xsake import indexed
        >>> indexed.Config(size=64).count
        16
    """

    size: Size = 128
    count: Size = 16
    first: Annotated[int, Field(ge=0, le=2**24)] = 0
    local: Size = 1
    pooling: Pooling = "max"
    has_relu: bool = False
    is_shared: bool = False
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("size", "count", "first", "local")}
        wrong = [f"{name}={size}" for name, size in sizes.items() if size < (name != "first")]
        if wrong or self.first + self.local > self.count:
            raise ArgumentError(
                "indexed-sizes",
                "invalid numbers of blocks",
                got=", ".join(f"{name}={size}" for name, size in sizes.items()),
                expected="size, count and local of 1 or more, first + local <= count",
                fix="the defaults are those of MSA: indexed.Config(128, 16, 0, 1)",
            )
        if self.pooling not in ("max", "mean"):
            raise ArgumentError(
                "indexed-pooling", "unknown pooling of scores", got=repr(self.pooling),
                expected="'max' or 'mean'",
            )  # fmt: skip

    def top_blocks(self, kv_tokens: int, kv_heads: int) -> TopBlocksConfig:
        """Return the numbers of the operation that selects blocks."""
        number = -(-kv_tokens // self.size)
        selection = BlockSelection(self.size, number, self.count, self.first, self.local)
        groups = 1 if self.is_shared else kv_heads
        return TopBlocksConfig(selection, groups, self.pooling, self.has_relu)
