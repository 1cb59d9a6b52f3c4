"""BlockLayout: CSR lists of kv blocks per (batch, head, query block), validated."""

import dataclasses
import functools
import hashlib
import os
import textwrap
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jaxtyping import Bool, Int8, Int32, Integer

from xsake.errors import LayoutError
from xsake.layout import build, csr, serialization
from xsake.layout.csr import Items, capacity_bucket, is_concrete, namespace
from xsake.layout.draw import ascii_plane, draw_png
from xsake.layout.grid import SIZES, BlockCounts, BlockGrid, register_layout
from xsake.layout.refine import coverage_codes, expand_items, refine_items, resize_items
from xsake.layout.stats import LayoutStats, compute_stats
from xsake.layout.transposed import TransposedLayout, transpose_items, transposed_heads
from xsake.masks import AbstractMask


@register_layout(leaves=("row_starts", "kv_block", "is_partial"), static=(*SIZES, "mask"))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(BlockCounts):
    """CSR lists of kv blocks per (batch, head, query block).

    Row `r = (b * heads + h) * q_blocks + i` lists `kv_block[row_starts[r] : row_starts[r + 1]]`.
    A token pair is computed if its block is listed and, in partial blocks, `mask` allows it and
    both positions are inside `q_tokens` and `kv_tokens`. All pairs of a full block are allowed.
    Blocks that overhang `kv_tokens` are always partial; results of padded queries are dropped.

    A layout is static (NumPy: compiled into the program) or traced (JAX: data of fixed capacity
    that may change between calls without recompilation). It is a pytree of its arrays. Static
    layouts compare by content.

    Args:
        row_starts: CSR row pointers, int32.
        kv_block: kv block indices, strictly ascending in a row; unused after `row_starts[-1]`.
        is_partial: whether the block needs an element mask.
        q_tokens, kv_tokens, block_q, block_kv: sizes in tokens.
        batch: 1 (shared) or the batch size.
        heads: 1 (shared), the kv heads or the query heads.
        mask: element mask of partial blocks; None if only the bounds cut them.

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
        csr.check_shapes(self._items, self.grid, self.mask)
        if self.is_static:
            csr.check_values(self._items, self.grid)
            csr.freeze(self, Items._fields)

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
        """Build the static layout of a mask: every block in which it allows a pair.

        Masks with exact coverage are evaluated per block: O(blocks), not O(tokens^2).

        The layout has `mask.heads` heads, or 1; `kv_tokens` defaults to `q_tokens`.

        Example:
            >>> from xsake.masks import Causal, Window
            >>> BlockLayout.from_mask(Causal() & Window(255, 0), q_tokens=131_072).items
            3069
        """
        kv_tokens = q_tokens if kv_tokens is None else kv_tokens
        sizes = BlockGrid(q_tokens, kv_tokens, block_q, block_kv, heads=build.mask_heads(mask) or 1)
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
        """Build the layout of a boolean block grid, intersected with `mask`.

        Args:
            grid: True for selected blocks, [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk]. NumPy gives a
                static layout, JAX a traced one.
            q_tokens, kv_tokens: lengths; they default to all tokens of the grid.
            mask: element mask; fully masked blocks are dropped, partly masked ones are partial.
            capacity: number of items, every block by default; traced lists are truncated to it.

        Example:
            >>> grid = np.tril(np.ones((4, 4), bool))
            >>> BlockLayout.from_block_mask(grid, block_q=64, block_kv=64).items
            10
        """
        chosen = build.as_planes(grid, build.mask_heads(mask))
        kv_tokens = chosen.shape[-1] * block_kv if kv_tokens is None else kv_tokens
        sizes = build.infer_grid(chosen.shape[:3], q_tokens, kv_tokens, block_q, block_kv)
        build.check_num_blocks("kv", chosen.shape[-1], kv_tokens, block_kv)
        if isinstance(chosen, np.ndarray):
            layout = cls._build(build.cover_blocks(mask, sizes, chosen), sizes, mask)
            return layout if capacity is None else layout.with_capacity(capacity)
        capacity = chosen.size if capacity is None else capacity
        return cls._build(build.list_grid(chosen, capacity, sizes), sizes, None)._restrict(mask)

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
        """Build the layout of index lists: row `i` is `indices[..., i, :counts[..., i]]`.

        Slots may be in any order; -1 is an unused slot. NumPy gives a static layout and raises on
        duplicates and out-of-range indices; JAX gives a traced one, which drops them.

        Args:
            indices: kv blocks, [Nq, A], [H, Nq, A] or [B, H, Nq, A].
            counts: number of used slots of each row.
            q_tokens, kv_tokens: lengths; they default to all query blocks and to `q_tokens`.
            mask: element mask, as for `from_block_mask`.
            capacity: number of items, every slot by default; traced lists are truncated to it.

        Example:
            >>> layout = BlockLayout.from_indices_counts(
            ...     np.array([[0, -1], [1, 0]]), np.array([1, 2]), block_q=16, block_kv=16)
            >>> layout.kv_block.tolist()
            [0, 0, 1]
        """
        slots = build.as_slots(indices, counts)
        width = slots.shape[-1]
        sizes = build.infer_grid(slots.shape[:3], q_tokens, kv_tokens, block_q, block_kv)
        xp = namespace(indices, counts)
        max_items = None if xp is np else sizes.rows * min(width, sizes.kv_blocks)
        rows = xp.asarray(slots).reshape(sizes.rows, width)
        items = build.list_indices(xp, rows, xp.asarray(counts).reshape(-1), max_items, sizes)
        layout = cls._build(items, sizes, None)._restrict(mask)
        return layout if capacity is None else layout.with_capacity(capacity)

    @classmethod
    def _build(cls, items: Items, grid: BlockGrid, mask: AbstractMask | None) -> "BlockLayout":
        return cls(*items, **vars(grid), mask=mask)

    @property
    def grid(self) -> BlockGrid:
        """Sizes without the lists."""
        return BlockGrid(*(getattr(self, name) for name in SIZES))

    @property
    def _items(self) -> Items:
        return Items(self.row_starts, self.kv_block, self.is_partial)

    @property
    def capacity(self) -> int:
        """Length of the item arrays, unused entries included."""
        return self.kv_block.shape[0]

    @property
    def is_static(self) -> bool:
        """Whether the arrays are NumPy, i.e. compile-time constants."""
        return namespace(*self._items) is np

    @property
    def items(self) -> int:
        """Number of listed blocks; raises while the layout is traced."""
        return int(self._values().row_starts[-1])

    def _values(self) -> Items:
        """Return the arrays as NumPy; raises while the layout is traced."""
        if not is_concrete(*self._items):
            raise LayoutError(
                "traced-values",
                "the values of a traced layout are not available inside jit",
                got=f"a traced layout of capacity {self.capacity}",
                expected="a static layout, or a traced one outside jit",
                fix="read it outside jit, or use capacity, the upper bound of items",
            )
        return Items(*(np.asarray(array) for array in self._items))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self) or not (self.is_static and other.is_static):
            return False
        return self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash if self.is_static else object.__hash__(self)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    @functools.cached_property
    def _identity(self) -> tuple[object, ...]:
        digest = hashlib.sha256()
        for array in self._items:
            digest.update(np.ascontiguousarray(array))
        return digest.digest(), self.capacity, self.grid, self.mask

    def validate(self) -> "BlockLayout":
        """Check every invariant, including full blocks against the mask; return the layout.

        Construction checks static layouts, except against the mask. Not available inside jit.

        Example:
            >>> from xsake.masks import Causal
            >>> layout = BlockLayout.from_mask(Causal(), q_tokens=512).traced().validate()
        """
        values = self._values()
        csr.check_values(values, self.grid)
        if self.mask is not None:
            csr.check_full_blocks(values, self.grid, self.mask)
        return self

    def with_capacity(self, capacity: int) -> "BlockLayout":
        """Return the layout with arrays of length `capacity`.

        A capacity below the number of items raises. While the layout is traced, the list is
        truncated instead, and `jax.experimental.checkify` reports it.
        """
        xp = namespace(*self._items)
        csr.check_capacity(self.row_starts[-1], capacity)
        row_starts = xp.minimum(self.row_starts, np.int32(capacity))
        kv_block, is_partial = (
            csr.pad_or_truncate(xp, array, capacity) for array in self._items[1:]
        )
        return self._build(Items(row_starts, kv_block, is_partial), self.grid, self.mask)

    def traced(self, capacity: int | None = None) -> "BlockLayout":
        """Return the layout as JAX arrays, to pass through `jit` as data.

        `capacity` defaults to `capacity_bucket(items)` for a static layout.
        """
        if capacity is None:
            capacity = capacity_bucket(self.items) if self.is_static else self.capacity
        items = Items(*(jnp.asarray(array) for array in self.with_capacity(capacity)._items))
        return self._build(items, self.grid, self.mask)

    def to_block_mask(self) -> Bool[np.ndarray, "B H Nq Nk"]:
        """Return the listed blocks as booleans [batch, heads, q_blocks, kv_blocks]."""
        listed = np.zeros((self.rows, self.kv_blocks), bool)
        row, kv_block, _ = csr.used_items(self._values())
        listed[row, kv_block] = True
        return listed.reshape(self.batch, self.heads, self.q_blocks, self.kv_blocks)

    def expand(self, *, batch: int | None = None, heads: int | None = None) -> "BlockLayout":
        """Copy a shared list to every batch element or head."""
        sizes = self.batch if batch is None else batch, self.heads if heads is None else heads
        if sizes == (self.batch, self.heads):
            return self
        return self._build(*expand_items(self._items, self.grid, *sizes), self.mask)

    def refine(self, codes: Int8[Array | np.ndarray, "B W"]) -> "BlockLayout":
        """Intersect with another rule, given its coverage of each item.

        Items with code NONE are dropped, items whose code is not ALL become partial. The caller
        must apply the rule inside partial blocks: `resize` and `transpose` only handle `mask`.

        Args:
            codes: `Coverage` codes [1, capacity], or [B, capacity] for one list per batch element.
                JAX codes give a traced layout of capacity `B * capacity`.
        """
        xp = namespace(*self._items, codes)
        return self._build(*refine_items(xp, self._items, codes, self.grid), self.mask)

    def with_mask(self, mask: AbstractMask) -> "BlockLayout":
        """Intersect with a mask: masked blocks are dropped, partly masked ones become partial.

        Example:
            >>> from xsake.masks import Causal, Window
            >>> layout = BlockLayout.from_mask(Causal(), q_tokens=1024).with_mask(Window(127, 0))
            >>> layout.items, layout.mask
            (15, Causal() & Window(left=127, right=0))
        """
        return self._restrict(mask if self.mask is None else self.mask & mask)

    def _restrict(self, mask: AbstractMask | None) -> "BlockLayout":
        """Replace the mask by `mask`, which must imply it, and update the lists."""
        if mask is None:
            return self
        expanded = self.expand(heads=build.common_heads(self.heads, build.mask_heads(mask)))
        xp, items, grid = namespace(*expanded._items), expanded._items, expanded.grid
        codes = coverage_codes(xp, items, mask, grid)
        return self._build(*refine_items(xp, items, codes, grid), mask)

    def transpose(self, kv_heads: int, q_heads: int) -> TransposedLayout:
        """Return the kv-major lists for dK and dV; GQA gathers the query heads of a kv head.

        The layout must have 1, `kv_heads` or `q_heads` heads.
        """
        shape = transposed_heads(self.heads, kv_heads, q_heads)
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
        sizes = vars(self.grid) | {"heads": heads}
        return TransposedLayout(*arrays, **sizes, group=group, mask=self.mask)

    def resize(self, block_q: int, block_kv: int) -> "BlockLayout":
        """Return the same token pairs in blocks whose sizes divide the old ones or are multiples.

        A merged block with unlisted parts becomes partial and the mask excludes these parts.
        Resize before `refine`: only `mask` is preserved exactly.

        Example:
            >>> from xsake.masks import Causal
            >>> layout = BlockLayout.from_mask(Causal(), q_tokens=512)
            >>> layout.resize(64, 64).items, layout.resize(256, 256).items
            (36, 3)
        """
        return self._build(*resize_items(self._items, self.grid, self.mask, (block_q, block_kv)))

    def stats(self) -> LayoutStats:
        """Return density, balance and padding statistics."""
        return compute_stats(self._values(), self.grid)

    def to_ascii(self, head: int = 0, *, batch: int = 0, width: int = 64) -> str:
        """Draw one head: `#` full, `+` partial, `.` skipped; large layouts are merged."""
        return ascii_plane(self._values(), self.grid, batch=batch, head=head, width=width)

    def draw(self, path: str | os.PathLike[str], head: int | None = None, *, batch: int = 0):
        """Write a PNG of one head, or of all heads; needs `pip install xsake[viz]`."""
        draw_png(self._values(), self.grid, path, title=self._title, head=head, batch=batch)

    def to_json(self) -> str:
        """Serialize to JSON; the mask must be serializable."""
        return serialization.encode(self._values(), self.grid, self.mask)

    @classmethod
    def from_json(cls, text: str, *, max_items: int = 2**24) -> "BlockLayout":
        """Restore a static layout from `to_json`, validated; `max_items` bounds its size."""
        return cls._build(*serialization.decode(text, max_items=max_items)).validate()

    @property
    def _title(self) -> str:
        tokens = f"{self.q_tokens:,} x {self.kv_tokens:,} tokens"
        blocks = f"blocks of {self.block_q} x {self.block_kv}"
        mask = textwrap.shorten(repr(self.mask), 60, placeholder=" ...")
        return f"{tokens} in {blocks}, mask {mask}"

    def __repr__(self) -> str:
        mode = "static" if self.is_static else "traced"
        sizes = f"batch={self.batch}, heads={self.heads}, capacity={self.capacity}"
        return f"BlockLayout({mode}, {self._title}, {sizes})"

    def __str__(self) -> str:
        if not is_concrete(*self._items):
            return repr(self)
        return f"{self!r}\n{self.stats()}\n{self.to_ascii(width=32)}\nhead 0 of {self.heads}"


export.register_pytree_node_serialization(
    BlockLayout,
    serialized_name="xsake.BlockLayout",
    serialize_auxdata=serialization.encode_static,
    deserialize_auxdata=serialization.decode_static,
)


def cache_live[F: Callable](build: F) -> F:
    """Cache results of `build` while they are referenced elsewhere.

    JAX holds the layout of every cached program, so these take no extra memory. The last 16
    results are always held. The arguments of `build` are positional and hashable.
    """
    live: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    @functools.lru_cache(maxsize=16)
    @functools.wraps(build)
    def reuse(*arguments):
        result = live.get(arguments)
        if result is None:
            result = live[arguments] = build(*arguments)
        return result

    return cast(F, reuse)


@cache_live
def _from_mask(cls: type[BlockLayout], mask: AbstractMask, grid: BlockGrid) -> BlockLayout:
    return cls._build(build.cover_blocks(mask, grid), grid, mask)
