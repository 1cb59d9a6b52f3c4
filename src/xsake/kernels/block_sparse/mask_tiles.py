"""Element masks of partial blocks as arrays, for rules that a kernel cannot compute itself."""

import numpy as np

from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.kernels.block_sparse.work_list import Items
from xsake.layout.ragged import row_of_item
from xsake.masks import AbstractMask

_CHUNK = 64  # blocks evaluated at once


def mask_tiles(
    mask: AbstractMask, items: Items, grid: RaggedGrid, blocks: tuple[int, int], keys_first: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The different element masks of a static list's partial blocks.

    Args:
        mask: the rule; tokens are at positions 0, 1, 2, ...
        items: the list.
        grid: what its numbers mean.
        blocks: (block_q, block_kv).
        keys_first: tiles are [block_kv, block_q], else [block_q, block_kv].

    Returns:
        `(tiles int8 [P, ...], tile of each item int32 [W])`; full items have tile 0.
    """
    row = row_of_item(np, items.row_starts, items.number.shape[0])
    used = np.flatnonzero(items.is_partial & (row < items.row_starts.shape[0] - 1))
    row, number = row[used], items.number[used]
    if grid.is_kv_major:
        head, heads = number // grid.q_blocks % grid.q_heads, grid.q_heads
    else:
        head, heads = row // grid.q_blocks % grid.list_heads, grid.list_heads
    rule = np.zeros_like(head) if mask.heads is None else head * mask.heads // heads
    q_block, kv_block = grid.q_and_kv(row % grid.own_blocks, number % grid.met_blocks)
    keys, which = np.unique(np.stack([rule, q_block, kv_block], 1), axis=0, return_inverse=True)

    found: dict[bytes, int] = {}
    tiles, of_key = [], np.zeros(len(keys), np.int32)
    for first in range(0, len(keys), _CHUNK):
        for place, tile in enumerate(_evaluate(mask, keys[first : first + _CHUNK], blocks), first):
            tile = np.ascontiguousarray(tile.T if keys_first else tile)
            of_key[place] = found.setdefault(tile.tobytes(), len(tiles))
            if of_key[place] == len(tiles):
                tiles.append(tile)
    shape = blocks[::-1] if keys_first else blocks
    numbers = np.zeros(items.number.shape[0], np.int32)
    numbers[used] = of_key[which.reshape(-1)] if len(keys) else 0
    return np.array(tiles or [np.zeros(shape, bool)], np.int8), numbers


def _evaluate(mask: AbstractMask, keys: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    """[keys, block_q, block_kv] booleans."""
    head, q_block, kv_block = (x[:, None, None] for x in keys.T)
    q = q_block * blocks[0] + np.arange(blocks[0])[None, :, None]
    kv = kv_block * blocks[1] + np.arange(blocks[1])[None, None, :]
    return np.asarray(mask.allows(q, kv, None if mask.heads is None else head))
