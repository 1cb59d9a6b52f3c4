"""Boolean mask arrays as other arguments of a call: segment ids, `Explicit`, or a bias."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.attention.types import AttentionArgs, reshape
from xsake.errors import ShapeError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.layout.csr import is_concrete
from xsake.masks import Explicit


def convert_booleans(
    args: AttentionArgs, shape: tuple[int, int, int, int], blocks: tuple[int, int]
) -> AttentionArgs:
    """Replace a boolean `mask`, which broadcasts to `shape` [B, Hq, Tq, Tk], by other arguments.

    Booleans on keys alone become segment ids. Concrete booleans that the batch shares become
    `Explicit`. All others become a bias of -inf, added to one of [B or 1, Hq or 1, Tq, Tk], and a
    list of the blocks, of sizes (q, kv), with an allowed pair.
    """
    allowed = args.mask
    sizes = (1,) * (4 - allowed.ndim) + tuple(allowed.shape)
    if len(sizes) > 4 or any(n not in (1, m) for n, m in zip(sizes, shape, strict=True)):
        raise ShapeError(
            "the boolean mask does not broadcast to the logits",
            got=allowed.shape,
            expected=f"[B, Hq, Tq, Tk] = {shape}, any of them may be 1",
            fix="mask[..., i, j] is True where query i may attend to key j",
        )
    if not isinstance(allowed, jax.ShapeDtypeStruct) and is_concrete(allowed):
        allowed = np.asarray(allowed)  # inside `jit`, operations of jnp would be traced
    allowed = reshape(allowed, *sizes)
    if sizes[1:3] == (1, 1):
        return _mask_keys(args, allowed, shape)
    has_positions = args.q_positions is not None or args.kv_positions is not None
    if isinstance(allowed, np.ndarray) and not has_positions:  # of a mask, not of an array
        array = np.broadcast_to(allowed, (*sizes[:2], *shape[2:]))
        if (array == array[:1]).all():
            return dataclasses.replace(args, mask=Explicit(array[0, 0 if sizes[1] == 1 else ...]))
    if args.softcap is not None:
        raise UnsupportedError(
            "softcap is not supported with booleans that are traced or differ within the batch",
            got=f"boolean mask {allowed.shape}, softcap={args.softcap}",
            expected="booleans on keys, concrete booleans, or a mask of xsake.masks",
            fix="express the mask by xsake.masks, segment ids and positions",
        )
    layout = args.layout
    if layout is None:
        layout = _call(lambda x: _list_blocks(x, shape, blocks), allowed)
    bias = np.zeros((1, 1, *shape[2:]), np.float32) if args.bias is None else args.bias
    bias = _call(lambda x, bias: jnp.where(x, bias, -jnp.inf), allowed, bias)
    return dataclasses.replace(args, mask=None, bias=bias, layout=layout, block_size=None)


def _mask_keys(args: AttentionArgs, allowed: Any, shape: tuple[int, int, int, int]):
    """Give masked keys a negative segment id."""
    batch, _, q_tokens, kv_tokens = shape
    q_ids, kv_ids = args.q_segment_ids, args.kv_segment_ids
    if q_ids is None and kv_ids is None:
        q_ids, kv_ids = (np.zeros((batch, n), np.int32) for n in (q_tokens, kv_tokens))
    if kv_ids is None and q_tokens == kv_tokens:
        kv_ids = q_ids
    if q_ids is None or kv_ids is None:  # refused with the other arguments
        return dataclasses.replace(args, mask=None)
    kv_ids = _call(lambda x, ids: jnp.where(x[:, 0, 0], ids, -1), allowed, kv_ids)
    return dataclasses.replace(args, mask=None, q_segment_ids=q_ids, kv_segment_ids=kv_ids)


def _list_blocks(allowed: Array, shape: tuple[int, ...], blocks: tuple[int, int]) -> BlockLayout:
    """The blocks with at least one allowed pair."""
    (q_tokens, kv_tokens), (block_q, block_kv) = shape[2:], blocks
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], q_tokens, kv_tokens))
    padding = (0, 0), (0, 0), (0, -q_tokens % block_q), (0, -kv_tokens % block_kv)
    tiles = jnp.pad(allowed, padding)
    tiles = tiles.reshape(*tiles.shape[:2], -1, block_q, tiles.shape[3] // block_kv, block_kv)
    sizes = {"q_tokens": q_tokens, "kv_tokens": kv_tokens, "block_q": block_q, "block_kv": block_kv}
    return BlockLayout.from_block_mask(tiles.any((3, 5)), **sizes)


def _call(function: Any, *arrays: Any) -> Any:
    """The result of a function; its shape if an array is abstract."""
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    return jax.eval_shape(function, *arrays) if is_abstract else function(*map(jnp.asarray, arrays))
