"""Arrays of GPU kernels, padded to whole tiles and features; and back."""

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels.block_sparse.mosaic_gpu.schedule import Tile

# Tensor cores contract this many features at once.
FEATURES = 16


def pad_features(features: int) -> int:
    """Round up to a multiple of `FEATURES`."""
    return -(-features // FEATURES) * FEATURES


def pack_tokens(x: Array, tile: Tile) -> Array:
    """[B, T, H, D] -> [B, T, H * D], with blocks of whole tiles and features of whole steps."""
    x = _pad(x, 3, pad_features(x.shape[-1]) - x.shape[-1], 0)
    return _pad_tiles(x.reshape(*x.shape[:2], -1), tile, 1, 0)


def pack_rows(x: Array, tile: Tile, fill) -> Array:
    """[B, T, H] -> [B, H, T]."""
    return _pad_tiles(jnp.swapaxes(x, 1, 2), tile, 2, fill)


def pack_integers(x, tile: Tile, fill: int):
    """[B or 1, T]; None stays None."""
    return None if x is None else _pad_tiles(x.astype(jnp.int32), tile, 1, fill)


def _pad_tiles(x, tile: Tile, axis: int, fill):
    """Pad an axis to whole blocks, and each of them to whole tiles."""
    x = _pad(x, axis, -x.shape[axis] % tile.block, fill)
    if not tile.is_padded:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, -1, tile.block, *after)
    x = _pad(x, axis + 1, tile.padded - tile.block, fill)
    return x.reshape(*before, -1, *after)


def _pad(x, axis: int, missing: int, fill):
    widths = [(0, missing if number == axis else 0) for number in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill) if missing else x


def unpad(x: Array, tile: Tile, tokens: int, features: int | None):
    """Remove the padding of a result: [B, T, H, ...]."""
    axis = 2 if features is None else 1
    if tile.is_padded:
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, -1, tile.padded, *after)
        x = lax.slice_in_dim(x, 0, tile.block, axis=axis + 1)
        x = x.reshape(*before, -1, *after)
    x = lax.slice_in_dim(x, 0, tokens, axis=axis)
    if features is None:
        return jnp.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], -1, pad_features(features))[..., :features]
