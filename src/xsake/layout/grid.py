"""Block grids: sizes, index arithmetic between blocks, rows and positions; layouts as pytrees."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from xsake.errors import LayoutError
from xsake.masks.coverage import Rectangles

# Positions are int32 in every backend; half the range avoids overflow of sums.
MAX_TOKENS = 2**30
MAX_ITEMS = 2**31 - 2


def count_blocks(tokens: int, block: int) -> int:
    """Return the number of blocks that cover `tokens` tokens."""
    return -(-tokens // block)


def check_int32_count(items: int) -> None:
    """Raise if int32 indices cannot address the items."""
    if items > MAX_ITEMS:
        raise LayoutError(
            "int32-items",
            "the layout has too many work items for int32 indices",
            got=items,
            expected=f"at most {MAX_ITEMS}",
            fix="use larger blocks, or one layout per batch element or group of heads",
        )


class BlockCounts:
    """Mixin: numbers of blocks and rows from lengths and block sizes."""

    @property
    def q_blocks(self: Any) -> int:
        """Number of query blocks; the last one may overhang."""
        return count_blocks(self.q_tokens, self.block_q)

    @property
    def kv_blocks(self: Any) -> int:
        """Number of kv blocks; the last one may overhang."""
        return count_blocks(self.kv_tokens, self.block_kv)

    @property
    def rows(self: Any) -> int:
        """Number of rows: batch * heads * q_blocks."""
        return self.batch * self.heads * self.q_blocks


@dataclasses.dataclass(frozen=True)
class BlockGrid(BlockCounts):
    """`batch` x `heads` planes of `q_blocks` x `kv_blocks` blocks.

    Row `(b * heads + h) * q_blocks + i` is query block `i` of head `h` of batch element `b`.
    """

    q_tokens: int
    kv_tokens: int
    block_q: int
    block_kv: int
    batch: int = 1
    heads: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 1 <= value <= MAX_TOKENS:
                raise LayoutError(
                    "grid-field",
                    f"invalid {field.name}",
                    got=repr(value),
                    expected=f"an int from 1 to {MAX_TOKENS}",
                    fix=f"pass {field.name} as a positive Python int",
                )
        if self.rows > MAX_ITEMS:
            raise LayoutError(
                "int32-rows",
                "the grid has too many rows for int32 indices",
                got=f"batch * heads * q_blocks = {self.rows}",
                expected=f"at most {MAX_ITEMS}",
                fix="use larger query blocks or one layout per batch element",
            )

    def replace(self, **changes: int) -> "BlockGrid":
        return dataclasses.replace(self, **changes)

    def row_to_q_block(self, row):
        return row % self.q_blocks

    def row_to_head(self, row):
        return row // self.q_blocks % self.heads

    def row_to_batch(self, row):
        return row // (self.q_blocks * self.heads)

    def spans(self, xp, q_block, kv_block) -> Rectangles:
        """Return the positions of blocks, clipped to the sequence."""
        q_first = q_block * self.block_q
        kv_first = kv_block * self.block_kv
        return Rectangles(
            q_first,
            xp.minimum(q_first + (self.block_q - 1), self.q_tokens - 1),
            kv_first,
            xp.minimum(kv_first + (self.block_kv - 1), self.kv_tokens - 1),
        )

    def overhangs(self, kv_block):
        """Return whether a kv block extends past `kv_tokens`."""
        return (kv_block >= self.kv_blocks - 1) & (self.kv_tokens % self.block_kv != 0)


SIZES = tuple(field.name for field in dataclasses.fields(BlockGrid))


def register_layout[T](
    leaves: tuple[str, ...], static: tuple[str, ...]
) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that registers `leaves` as children and `static` as aux data.

    Unflattening bypasses `__init__`: JAX passes placeholders instead of arrays, for which neither
    invariants nor run-time type checks hold.
    """

    def flatten(value: T):
        arrays = tuple(getattr(value, name) for name in leaves)
        return arrays, tuple(getattr(value, name) for name in static)

    def flatten_with_keys(value: T):
        arrays, rest = flatten(value)
        keys = (jax.tree_util.GetAttrKey(name) for name in leaves)
        return tuple(zip(keys, arrays, strict=True)), rest

    def decorate(cls: type[T]) -> type[T]:
        def unflatten(rest, arrays) -> T:
            value = object.__new__(cls)
            for name, item in zip(leaves + static, (*arrays, *rest), strict=True):
                object.__setattr__(value, name, item)
            return value

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate
