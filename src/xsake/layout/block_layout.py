"""BlockLayout: which kv blocks each query block of each head visits, as a checked value."""

import dataclasses
import functools
import os
import textwrap

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int8, Int32, Integer

from xsake.errors import LayoutError
from xsake.layout import build, invariants, json_form
from xsake.layout.draw import ascii_plane, draw_png
from xsake.layout.grid import BlockCounts, BlockGrid
from xsake.layout.identity import ComparableLayout, reuse_live
from xsake.layout.pytree import register_layout
from xsake.layout.ragged import (
    Items,
    capacity_bucket,
    freeze,
    is_concrete,
    namespace,
    pad,
    require_room,
    row_of_item,
)
from xsake.layout.refine import codes_of, expand_items, refine_items
from xsake.layout.resize import resize_items
from xsake.layout.stats import LayoutStats, collect
from xsake.layout.transposed import TransposedLayout, heads_of_transpose, transpose_items
from xsake.masks import AbstractMask

_SIZES = ("q_tokens", "kv_tokens", "block_q", "block_kv", "batch", "heads")


@register_layout(leaves=("row_starts", "kv_block", "is_partial"), static=(*_SIZES, "mask"))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(ComparableLayout, BlockCounts):
    """A ragged list of blocks, for each head and query block the kv blocks to visit.

    Row `r = (b * heads + h) * q_blocks + i` visits `kv_block[row_starts[r] : row_starts[r + 1]]`.
    A pair of tokens exists if its block is listed and, where the block is partial, `mask` allows
    the pair and both positions are inside `q_tokens` and `kv_tokens`. The mask allows every pair of
    a full block. A block that sticks out past `kv_tokens` is always partial; padded queries need no
    such care, because what is computed for them is thrown away.

    A layout is static (NumPy: known while a function is traced) or traced (JAX: data of a fixed
    capacity that may change between calls without compiling again). It is a pytree of its arrays.
    Static layouts are equal if their content is.

    Args:
        row_starts: where rows begin, int32.
        kv_block: kv blocks, strictly ascending in a row; after `row_starts[-1]`: unused capacity.
        is_partial: False if every pair of the block exists.
        q_tokens, kv_tokens, block_q, block_kv: sizes in tokens.
        batch: 1 (shared) or the batch size.
        heads: 1 (shared), the kv heads or the query heads.
        mask: rule inside partial blocks; None if only the bounds cut them.

    Example:
        >>> from xsake.masks import Causal
        >>> layout = BlockLayout.from_mask(Causal(), q_tokens=512)
        >>> layout.row_starts.tolist(), layout.items
        ([0, 1, 3, 6, 10], 10)
    """

    row_starts: Int32[Array | np.ndarray, " R1"]
    kv_block: Int32[Array | np.ndarray, " W"]
    is_partial: Bool[Array | np.ndarray, " W"]
    q_tokens: int
    kv_tokens: int
    block_q: int
    block_kv: int
    batch: int = 1
    heads: int = 1
    mask: AbstractMask | None = None

    def __post_init__(self):
        invariants.check_shapes(self._items, self.grid, self.mask)
        if self.is_static:
            invariants.check_values(self._items, self.grid)
            freeze(self, Items._fields)

    @classmethod
    def from_mask(
        cls,
        mask: AbstractMask,
        *,
        q_tokens: int,
        kv_tokens: int | None = None,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> "BlockLayout":
        """The static layout of a mask: every block in which it allows a pair.

        Structured masks are asked about whole blocks, so the cost is O(blocks) and not O(tokens^2).

        Args:
            mask: the rule; the layout has `mask.heads` heads, or 1.
            q_tokens, kv_tokens: lengths; `kv_tokens` defaults to `q_tokens`.
            block_q, block_kv: block sizes.

        Example:
            >>> from xsake.masks import Causal, Window
            >>> BlockLayout.from_mask(Causal() & Window(255, 0), q_tokens=131_072).items
            3069
        """
        kv_tokens = q_tokens if kv_tokens is None else kv_tokens
        sizes = BlockGrid(q_tokens, kv_tokens, block_q, block_kv, heads=build.heads_of(mask) or 1)
        return _from_mask(cls, mask, sizes)

    @classmethod
    def from_block_mask(
        cls,
        grid: Bool[Array | np.ndarray, "... Nq Nk"],
        *,
        q_tokens: int | None = None,
        kv_tokens: int | None = None,
        block_q: int,
        block_kv: int,
        mask: AbstractMask | None = None,
        capacity: int | None = None,
    ) -> "BlockLayout":
        """The layout of a choice of blocks, less what `mask` forbids.

        Args:
            grid: True for chosen blocks, [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk]. NumPy gives a
                static layout, JAX a traced one.
            q_tokens, kv_tokens: lengths; they default to all tokens of the grid.
            block_q, block_kv: block sizes.
            mask: rule inside the chosen blocks; forbidden ones are dropped, cut ones are partial.
            capacity: room for items, every block by default; a traced list is cut there in silence.

        Example:
            >>> grid = np.tril(np.ones((4, 4), bool))
            >>> BlockLayout.from_block_mask(grid, block_q=64, block_kv=64).items
            10
        """
        chosen = build.as_planes(grid, build.heads_of(mask))
        kv_tokens = chosen.shape[-1] * block_kv if kv_tokens is None else kv_tokens
        sizes = build.sizes_of(chosen.shape[:3], q_tokens, kv_tokens, block_q, block_kv)
        build.require_blocks("kv", chosen.shape[-1], kv_tokens, block_kv)
        if isinstance(chosen, np.ndarray):
            layout = cls._of(build.cover_grid(chosen, mask, sizes), sizes, mask)
            return layout if capacity is None else layout.with_capacity(capacity)
        capacity = chosen.size if capacity is None else capacity
        return cls._of(build.list_grid(chosen, capacity, sizes), sizes, None)._covered(mask)

    @classmethod
    def from_indices_counts(
        cls,
        indices: Integer[Array | np.ndarray, "... A"],
        counts: Integer[Array | np.ndarray, "..."],
        *,
        q_tokens: int | None = None,
        kv_tokens: int | None = None,
        block_q: int,
        block_kv: int,
        mask: AbstractMask | None = None,
        capacity: int | None = None,
    ) -> "BlockLayout":
        """The layout of index lists: query block `i` visits `indices[..., i, :counts[..., i]]`.

        Slots may be in any order and -1 is an unused one. NumPy gives a static layout and refuses
        duplicates and strays; JAX gives a traced one, which merges duplicates and ignores strays.

        Args:
            indices: kv blocks, [Nq, A], [H, Nq, A] or [B, H, Nq, A].
            counts: used slots of each row.
            q_tokens, kv_tokens: lengths; they default to all query blocks and to `q_tokens`.
            block_q, block_kv: block sizes.
            mask: rule inside the listed blocks, as for `from_block_mask`.
            capacity: room for items, every slot by default; a traced list is cut there in silence.

        Example:
            >>> layout = BlockLayout.from_indices_counts(
            ...     np.array([[0, -1], [1, 0]]), np.array([1, 2]), block_q=16, block_kv=16)
            >>> layout.kv_block.tolist()
            [0, 0, 1]
        """
        slots = build.as_slots(indices, counts)
        width = slots.shape[-1]
        sizes = build.sizes_of(slots.shape[:3], q_tokens, kv_tokens, block_q, block_kv)
        xp = namespace(indices, counts)
        room = None if xp is np else sizes.rows * min(width, sizes.kv_blocks)
        rows = xp.asarray(slots).reshape(sizes.rows, width)
        items = build.list_indices(xp, rows, xp.asarray(counts).reshape(-1), room, sizes)
        layout = cls._of(items, sizes, None)._covered(mask)
        return layout if capacity is None else layout.with_capacity(capacity)

    @classmethod
    def _of(cls, items: Items, grid: BlockGrid, mask: AbstractMask | None) -> "BlockLayout":
        return cls(*items, **{name: getattr(grid, name) for name in _SIZES}, mask=mask)

    @property
    def grid(self) -> BlockGrid:
        """The sizes alone."""
        return BlockGrid(*(getattr(self, name) for name in _SIZES))

    @property
    def _items(self) -> Items:
        return Items(self.row_starts, self.kv_block, self.is_partial)

    @property
    def rows(self) -> int:
        """Rows: batch * heads * q_blocks."""
        return self.batch * self.heads * self.q_blocks

    @property
    def capacity(self) -> int:
        """Entries of the arrays, used or not."""
        return self.kv_block.shape[0]

    @property
    def is_static(self) -> bool:
        """Whether the layout is NumPy, so known while a function is traced."""
        return namespace(*self._items) is np

    @property
    def items(self) -> int:
        """Listed blocks. Not known for a layout that is traced right now."""
        return int(self._values().row_starts[-1])

    def _values(self) -> Items:
        """The arrays in NumPy."""
        if not is_concrete(*self._items):
            raise LayoutError(
                "the values of this layout are not known while it is traced",
                got=f"a traced layout of capacity {self.capacity}",
                expected="a static layout, or a traced one outside jit",
                fix="ask before jit, or use capacity, the upper limit of items",
            )
        return Items(*(np.asarray(array) for array in self._items))

    def validate(self) -> "BlockLayout":
        """Check every invariant, full blocks against the mask included; returns the layout.

        Construction checks static layouts, save for the mask; outside jit this serves traced ones.

        Example:
            >>> from xsake.masks import Causal
            >>> layout = BlockLayout.from_mask(Causal(), q_tokens=512).traced().validate()
        """
        values = self._values()
        invariants.check_values(values, self.grid)
        if self.mask is not None:
            invariants.check_full_blocks(values, self.grid, self.mask)
        return self

    def with_capacity(self, capacity: int) -> "BlockLayout":
        """The same blocks with room for `capacity` items.

        Too small a capacity raises. While the layout is traced nobody can count its items: then the
        list is cut, and a program transformed by `jax.experimental.checkify` reports it.
        """
        xp = namespace(*self._items)
        require_room(self.row_starts[-1], capacity, is_concrete(self.row_starts))
        row_starts = xp.minimum(self.row_starts, np.int32(capacity))
        kv_block, is_partial = (pad(xp, array, capacity) for array in self._items[1:])
        return self._of(Items(row_starts, kv_block, is_partial), self.grid, self.mask)

    def traced(self, capacity: int | None = None) -> "BlockLayout":
        """The layout as JAX arrays, to pass through `jit` as data.

        Args:
            capacity: room for items; defaults to `capacity_bucket(items)` for a static layout.
        """
        if capacity is None:
            capacity = capacity_bucket(self.items) if self.is_static else self.capacity
        items = Items(*(jnp.asarray(array) for array in self.with_capacity(capacity)._items))
        return self._of(items, self.grid, self.mask)

    def to_block_mask(self) -> Bool[np.ndarray, "B H Nq Nk"]:
        """The listed blocks as booleans [batch, heads, q_blocks, kv_blocks]."""
        values = self._values()
        listed = np.zeros((self.rows, self.kv_blocks), bool)
        row = row_of_item(np, values.row_starts, self.capacity)[: values.row_starts[-1]]
        listed[row, values.kv_block[: row.size]] = True
        return listed.reshape(self.batch, self.heads, self.q_blocks, self.kv_blocks)

    def expand(self, *, batch: int | None = None, heads: int | None = None) -> "BlockLayout":
        """One list per batch element or head instead of a shared one; the meaning stays."""
        sizes = self.batch if batch is None else batch, self.heads if heads is None else heads
        if sizes == (self.batch, self.heads):
            return self
        return self._of(*expand_items(self._items, self.grid, *sizes), self.mask)

    def refine(self, codes: Int8[Array | np.ndarray, "B W"]) -> "BlockLayout":
        """Intersect with a further rule, given what the rule says about each item.

        Items with code NONE go, items whose code is not ALL become partial. The rule itself is the
        caller's to apply inside partial blocks: resize and transpose know only `mask`.

        Args:
            codes: `Coverage` codes [1, capacity], or [B, capacity] to give every batch element a
                list of its own. JAX codes give a traced layout of capacity `B * capacity`.
        """
        xp = namespace(*self._items, codes)
        return self._of(*refine_items(xp, self._items, codes, self.grid), self.mask)

    def with_mask(self, mask: AbstractMask) -> "BlockLayout":
        """Intersect with a further mask: blocks it forbids go, blocks it cuts become partial.

        Example:
            >>> from xsake.masks import Causal, Window
            >>> layout = BlockLayout.from_mask(Causal(), q_tokens=1024).with_mask(Window(127, 0))
            >>> layout.items, layout.mask
            (15, Causal() & Window(left=127, right=0))
        """
        return self._covered(mask if self.mask is None else self.mask & mask)

    def _covered(self, mask: AbstractMask | None) -> "BlockLayout":
        """The layout under `mask` in place of its own, which `mask` implies."""
        if mask is None:
            return self
        wide = self.expand(heads=build.common_heads(self.heads, build.heads_of(mask)))
        xp = namespace(*wide._items)
        codes = codes_of(xp, wide._items, mask, wide.grid)
        return self._of(*refine_items(xp, wide._items, codes, wide.grid), mask)

    def transpose(self, kv_heads: int, q_heads: int) -> TransposedLayout:
        """The kv-major list that dK and dV walk; under GQA it gathers the query heads of a kv head.

        Args:
            kv_heads, q_heads: heads of the call; the layout has 1, `kv_heads` or `q_heads`.
        """
        shape = heads_of_transpose(self.heads, kv_heads, q_heads)
        if not self.is_static:
            return self._transpose(*shape)
        if shape not in self._transposes:
            self._transposes[shape] = self._transpose(*shape)
        return self._transposes[shape]

    @functools.cached_property
    def _transposes(self) -> dict[tuple[int, int], TransposedLayout]:
        return {}

    def _transpose(self, heads: int, group: int) -> TransposedLayout:
        arrays = transpose_items(self._items, self.grid, heads, group)
        sizes = {name: getattr(self, name) for name in _SIZES} | {"heads": heads}
        return TransposedLayout(*arrays, **sizes, group=group, mask=self.mask)

    def resize(self, block_q: int, block_kv: int) -> "BlockLayout":
        """The same token pairs in other blocks, whose sizes divide the old ones or are multiples.

        A larger block that lacks some of its parts becomes partial, and the mask then says so.
        Resize before `refine`: only what `mask` knows is kept exactly.

        Example:
            >>> from xsake.masks import Causal
            >>> layout = BlockLayout.from_mask(Causal(), q_tokens=512)
            >>> layout.resize(64, 64).items, layout.resize(256, 256).items
            (36, 3)
        """
        return self._of(*resize_items(self._items, self.grid, self.mask, (block_q, block_kv)))

    def stats(self) -> LayoutStats:
        """Budget, balance and waste; see `LayoutStats`."""
        return collect(self._values(), self.grid)

    def to_ascii(self, head: int = 0, *, batch: int = 0, width: int = 64) -> str:
        """A picture of one head: `#` full, `+` partial, `.` skipped; large layouts are merged."""
        return ascii_plane(self._values(), self.grid, batch=batch, head=head, width=width)

    def draw(self, path: str | os.PathLike[str], head: int | None = None, *, batch: int = 0):
        """Write a PNG of one head, or of all in a grid; needs `pip install xsake[viz]`."""
        draw_png(self._values(), self.grid, path, title=self._title, head=head, batch=batch)

    def to_json(self) -> str:
        """The layout as JSON text; its mask must be structured."""
        return json_form.encode(self._values(), self.grid, self.mask)

    @classmethod
    def from_json(cls, text: str, *, max_items: int = 2**24) -> "BlockLayout":
        """A static layout from `to_json`'s text, fully checked; `max_items` bounds its size."""
        return cls._of(*json_form.decode(text, max_items=max_items)).validate()

    @property
    def _title(self) -> str:
        tokens = f"{self.q_tokens:,} x {self.kv_tokens:,} tokens"
        blocks = f"blocks of {self.block_q} x {self.block_kv}"
        mask = textwrap.shorten(repr(self.mask), 60, placeholder=" ...")
        return f"{tokens} in {blocks}, mask {mask}"

    def __repr__(self) -> str:
        kind = "static" if self.is_static else "traced"
        sizes = f"batch={self.batch}, heads={self.heads}, capacity={self.capacity}"
        return f"BlockLayout({kind}, {self._title}, {sizes})"

    def __str__(self) -> str:
        if not is_concrete(*self._items):
            return repr(self)
        return f"{self!r}\n{self.stats()}\n{self.to_ascii(width=32)}\nhead 0 of {self.heads}"


@reuse_live
def _from_mask(cls: type[BlockLayout], mask: AbstractMask, grid: BlockGrid) -> BlockLayout:
    return cls._of(build.cover_mask(mask, grid), grid, mask)
