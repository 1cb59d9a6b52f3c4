"""Arrays as GPU kernels take them, with room for whole tiles and features; and back again."""

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse.gpu_lists import Tile

# Features come in steps of what tensor cores contract at once.
FEATURES = 16


def room_of(features: int) -> int:
    """Features with what their last step lacks."""
    return -(-features // FEATURES) * FEATURES


def tokens_of(x, tile: Tile):
    """[B, T, H, D] -> [B, T, H * D], with blocks of whole tiles and features of whole steps."""
    x = _padded(x, 3, room_of(x.shape[-1]) - x.shape[-1], 0)
    return _roomy(x.reshape(*x.shape[:2], -1), tile, 1, 0)


def statistic_of(x, tile: Tile, fill):
    """[B, T, H] -> [B, H, T]."""
    return _roomy(jnp.swapaxes(x, 1, 2), tile, 2, fill)


def numbers_of(x, tile: Tile, fill: int):
    """[B or 1, T]; None stays None."""
    return None if x is None else _roomy(x.astype(jnp.int32), tile, 1, fill)


def _roomy(x, tile: Tile, axis: int, fill):
    """`x` with room for whole blocks along an axis, and in each of them for whole tiles."""
    x = _padded(x, axis, -x.shape[axis] % tile.block, fill)
    if not tile.is_padded:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, -1, tile.block, *after)
    x = _padded(x, axis + 1, tile.room - tile.block, fill)
    return x.reshape(*before, -1, *after)


def _padded(x, axis: int, missing: int, fill):
    widths = [(0, missing if number == axis else 0) for number in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill) if missing else x


def restored(x, tile: Tile, tokens: int, features: int | None):
    """A result without its padding, [B, T, H, ...]."""
    axis = 2 if features is None else 1
    if tile.is_padded:
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, -1, tile.room, *after)
        x = lax.slice_in_dim(x, 0, tile.block, axis=axis + 1)
        x = x.reshape(*before, -1, *after)
    x = lax.slice_in_dim(x, 0, tokens, axis=axis)
    if features is None:
        return jnp.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], -1, room_of(features))[..., :features]
