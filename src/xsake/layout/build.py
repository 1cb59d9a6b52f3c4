"""Build CSR block lists from masks, block grids and index lists."""

import jax
import jax.numpy as jnp
import numpy as np

from xsake.errors import LayoutError
from xsake.layout.csr import Items, compact, counts_to_starts, namespace
from xsake.layout.grid import BlockGrid, check_int32_count, count_blocks
from xsake.masks import AbstractMask, Coverage, Full
from xsake.masks.base import require_mask, resolve_coverage

# A bound on memory. Build time is constant from 2^16 to 2^20 blocks (131,072 tokens and 16 heads
# on an x86 core: 0.8 s of CPU); 2^14 blocks take up to 1.5x.
CHUNK_BLOCKS = 2**18


def cover_blocks(
    mask: AbstractMask | None, grid: BlockGrid, chosen: np.ndarray | None = None
) -> Items:
    """List the blocks, among `chosen` [batch, heads, Nq, Nk], in which `mask` allows a pair.

    Equal heads of a mask are built once if all blocks are chosen.
    """
    mask = Full() if mask is None else mask
    rules = [mask.for_head(head) for head in range(grid.heads)]
    if chosen is None:
        built = {rule: _cover_plane(rule, grid) for rule in dict.fromkeys(rules)}
        return _concatenate([built[rule] for rule in rules] * grid.batch)
    planes = (pair for heads in chosen for pair in zip(rules, heads, strict=True))
    return _concatenate([_cover_plane(rule, grid, plane) for rule, plane in planes])


def list_grid(allowed, capacity: int, grid: BlockGrid) -> Items:
    """List the blocks of a JAX bool `allowed[batch, heads, Nq, Nk]` with a fixed capacity."""
    check_int32_count(allowed.size)
    keep = allowed.reshape(-1)
    kv_block = jnp.arange(keep.shape[0], dtype=jnp.int32) % grid.kv_blocks
    starts = np.arange(grid.rows) * grid.kv_blocks
    return Items(*compact(jnp, keep, starts, capacity, kv_block, grid.overhangs(kv_block)))


def list_indices(xp, indices, counts, capacity: int | None, grid: BlockGrid) -> Items:
    """Build rows from slots `indices[rows, A]`; the first `counts[rows]` are used, -1 is unused.

    NumPy input must be in range and free of duplicates; traced input is sanitized.
    """
    slots = indices.shape[-1]
    check_int32_count(grid.rows * slots)
    if xp is np:
        indices = indices.astype(np.int64)
    elif indices.dtype.itemsize < 4 or jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        indices = indices.astype(jnp.int32)
    is_used = (xp.arange(slots)[None, :] < counts[:, None]) & (indices != -1)
    in_range = (indices >= 0) & (indices < grid.kv_blocks)
    if xp is np:
        _check_slots(indices, counts, is_used & ~in_range, grid)
    ordered = xp.sort(xp.where(is_used & in_range, indices, grid.kv_blocks), axis=-1)
    ordered = ordered.astype(xp.int32)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < grid.kv_blocks)
    if xp is np and repeated.any():
        row = int(np.flatnonzero(repeated.any(axis=-1))[0])
        raise LayoutError(
            "duplicate-blocks",
            "a row lists the same kv block twice",
            got=f"{_format_row(grid, row)}: {indices[row][is_used[row]].tolist()[:16]}",
            expected="every kv block at most once per row",
            fix="drop the duplicates, e.g. with numpy.unique",
        )
    keep = ordered < grid.kv_blocks
    keep = keep & ~xp.concatenate([xp.zeros((grid.rows, 1), bool), repeated], axis=-1)
    kv_block = ordered.reshape(-1)
    starts = np.arange(grid.rows) * slots
    partial = grid.overhangs(kv_block)
    return Items(*compact(xp, keep.reshape(-1), starts, capacity, kv_block, partial))


def as_planes(allowed, heads: int | None):
    """Broadcast a bool grid [[B,] H,] Nq, Nk to [B, H, Nq, Nk] with the heads of the mask."""
    _check_array("the block mask", allowed)
    if not 2 <= allowed.ndim <= 4 or allowed.dtype != bool or 0 in allowed.shape:
        raise LayoutError(
            "block-mask-type",
            "the block mask must be a boolean grid",
            got=f"shape {tuple(allowed.shape)}, dtype {allowed.dtype}",
            expected="bool [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], no axis empty",
        )
    xp = namespace(allowed)
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + tuple(allowed.shape))
    batch, grid_heads, *blocks = allowed.shape
    return xp.broadcast_to(allowed, (batch, common_heads(grid_heads, heads), *blocks))


def as_slots(indices, counts):
    """Reshape index lists [[B,] H,] Nq, A to [B, H, Nq, A]."""
    _check_array("indices", indices)
    _check_array("counts", counts)
    if not 2 <= indices.ndim <= 4 or indices.shape[:-1] != counts.shape or 0 in indices.shape:
        raise LayoutError(
            "indices-shape",
            "indices and counts have incompatible shapes",
            got=f"indices {tuple(indices.shape)}, counts {tuple(counts.shape)}",
            expected="[Nq, A], [H, Nq, A] or [B, H, Nq, A] and the same without A, no axis empty",
        )
    for name, array in (("indices", indices), ("counts", counts)):
        if not np.issubdtype(array.dtype, np.integer):
            raise LayoutError(
                "indices-dtype", f"{name} must be integers", got=array.dtype, expected="integers"
            )
    return indices.reshape((1,) * (4 - indices.ndim) + tuple(indices.shape))


def _check_array(name: str, value) -> None:
    """Raise unless `value` is a NumPy array (static layout) or a JAX array (traced layout)."""
    if not isinstance(value, np.ndarray | jax.Array):
        raise LayoutError(
            "indices-type",
            f"{name} must be an array",
            got=f"{type(value).__name__} {value!r}"[:80],
            expected="a NumPy array for a static layout, a JAX array for a traced one",
            fix="pass numpy.asarray(...) or jax.numpy.asarray(...)",
        )


def mask_heads(mask: AbstractMask | None) -> int | None:
    """Validate a user's mask and return its number of heads; None if heads share one rule."""
    require_mask(mask)
    return None if mask is None else mask.heads


def common_heads(layout_heads: int, heads: int | None) -> int:
    """Return the heads of a layout under a mask with `heads` heads."""
    if heads is None or heads == layout_heads:
        return layout_heads
    if layout_heads == 1:
        return heads
    raise LayoutError(
        "build-heads",
        "mask and layout have different numbers of heads",
        got=f"mask heads {heads}, layout heads {layout_heads}",
        expected="equal numbers, or one of them shared by all heads",
        fix="use a mask with one rule per head of the layout",
    )


def infer_grid(
    planes: tuple[int, ...],
    q_tokens: int | None,
    kv_tokens: int | None,
    block_q: int,
    block_kv: int,
) -> BlockGrid:
    """Infer the grid of arrays [B, H, Nq, ...]; lengths default to whole query blocks."""
    batch, heads, q_blocks = planes
    q_tokens = q_blocks * block_q if q_tokens is None else q_tokens
    kv_tokens = q_tokens if kv_tokens is None else kv_tokens
    grid = BlockGrid(q_tokens, kv_tokens, block_q, block_kv, batch, heads)
    check_num_blocks("query", q_blocks, q_tokens, block_q)
    return grid


def check_num_blocks(axis: str, blocks: int, tokens: int, block: int) -> None:
    """Raise if the number of blocks contradicts the lengths."""
    if blocks != count_blocks(tokens, block):
        raise LayoutError(
            "num-blocks",
            f"the number of {axis} blocks contradicts the lengths",
            got=f"{blocks} blocks, {tokens} tokens in blocks of {block}",
            expected=f"{count_blocks(tokens, block)} blocks",
            fix="pass the block sizes of the arrays",
        )


def cover_items(
    mask: AbstractMask, grid: BlockGrid, q_block: np.ndarray, kv_block: np.ndarray, head=None
) -> np.ndarray:
    """Return exact coverage codes of blocks [n] in bounded memory; masks with heads need `head`."""
    codes = np.empty(q_block.shape, np.int8)
    for first in range(0, q_block.size, CHUNK_BLOCKS):
        part = slice(first, first + CHUNK_BLOCKS)
        spans = grid.spans(np, q_block[part], kv_block[part])
        codes[part] = resolve_coverage(mask, spans, None if head is None else head[part])
    return codes


def _cover_plane(rule: AbstractMask, grid: BlockGrid, chosen: np.ndarray | None = None) -> Items:
    """List the blocks of one head in chunks of query blocks."""
    parts = []
    rows = max(1, CHUNK_BLOCKS // grid.kv_blocks)
    for first in range(0, grid.q_blocks, rows):
        if chosen is None:
            q = np.arange(first, min(first + rows, grid.q_blocks), dtype=np.int32)[:, None]
            kv = np.arange(grid.kv_blocks, dtype=np.int32)[None, :]
            codes = resolve_coverage(rule, grid.spans(np, q, kv))
        else:
            codes = chosen[first : first + rows].astype(np.int8)
            q, kv = (index.astype(np.int32) for index in np.nonzero(codes))
            codes[q, kv] = cover_items(rule, grid, q + np.int32(first), kv)
        listed = codes != Coverage.NONE
        kv_block = np.nonzero(listed)[1].astype(np.int32)
        is_partial = (codes[listed] != Coverage.ALL) | grid.overhangs(kv_block)
        row_starts = counts_to_starts(np, np.count_nonzero(listed, axis=-1))
        parts.append(Items(row_starts, kv_block, is_partial))
    return _concatenate(parts)


def _concatenate(parts: list[Items]) -> Items:
    if len(parts) == 1:
        return parts[0]
    check_int32_count(sum(part.kv_block.size for part in parts))
    return Items(
        counts_to_starts(np, np.concatenate([np.diff(part.row_starts) for part in parts])),
        np.concatenate([part.kv_block for part in parts]),
        np.concatenate([part.is_partial for part in parts]),
    )


def _check_slots(indices, counts, stray, grid: BlockGrid) -> None:
    slots = indices.shape[-1]
    if ((counts < 0) | (counts > slots)).any():
        raise LayoutError(
            "count-range",
            "a count exceeds its row of indices",
            got=f"counts from {counts.min()} to {counts.max()}",
            expected=f"0 to {slots}, the slots of a row",
            fix="count only the used slots of each row",
        )
    if stray.any():
        row, slot = (int(edge[0]) for edge in np.nonzero(stray))
        raise LayoutError(
            "kv-block-range",
            "a kv block index is out of range",
            got=f"{int(indices[row, slot])} in {_format_row(grid, row)}, slot {slot}",
            expected=f"0 to {grid.kv_blocks - 1}, or -1 for an unused slot",
            fix="check kv_tokens and block_kv",
        )


def _format_row(grid: BlockGrid, row: int) -> str:
    head, q_block = grid.row_to_head(row), grid.row_to_q_block(row)
    return f"batch {grid.row_to_batch(row)}, head {head}, query block {q_block}"
