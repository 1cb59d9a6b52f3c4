"""Validate and canonicalize the arguments of an attention call before tracing."""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.attention.types import DEFAULT_BLOCK, AttentionArgs, reshape
from xsake.errors import ArgumentError, LayoutError, ShapeError, UnsupportedError
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.validation import (
    check_arrays,
    check_heads,
    positive_softcap,
    scale_or_default,
    sum_dtype,
    token_integers,
)
from xsake.layout import BlockLayout
from xsake.layout.block_layout import cache_live
from xsake.layout.csr import is_concrete
from xsake.masks import AbstractMask, Causal, Explicit, Full, Window, parse
from xsake.masks.base import require_mask


def canonicalize_args(
    q: Any, k: Any, v: Any, args: AttentionArgs
) -> tuple[BlockSparseInputs, BlockSparseConfig, Any]:
    """Return validated `(inputs, config, sinks [Hq, S])`; abstract arrays stay abstract."""
    q, k, v = (_array(x) for x in (q, k, v))
    if q.ndim == k.ndim == v.ndim == 3:
        q, k, v = (reshape(x, 1, *x.shape) for x in (q, k, v))
    check_arrays(q, k, v)
    q, scale = _scale(q, args.scale)
    config = BlockSparseConfig(scale, positive_softcap(args.softcap))
    args = _resolve_mask(dataclasses.replace(args, bias=_bias(args.bias, q, k)), q, k)
    layout = _layout(q, k, args)
    positions, ids = (
        (args.q_positions, args.kv_positions),
        (args.q_segment_ids, args.kv_segment_ids),
    )
    inputs = BlockSparseInputs(q, k, v, layout, args.bias, *token_integers(q, k, *positions, *ids))
    return inputs, config, _sinks(args.sinks, q.shape[2])


def make_output(q: Any, o: Array, lse: Array, return_lse: bool) -> Any:
    """Return the output, without a batch axis if `q` has none, and the log-sum-exp if requested."""
    if np.ndim(q) == 3:
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def _scale(q: Any, scale: Any) -> tuple[Any, float]:
    """Return `(q, factor on q.k)`; a traced scale is multiplied with q."""
    if not isinstance(scale, jax.core.Tracer):
        return q, scale_or_default(scale, q)
    if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ShapeError(
            "traced-scale",
            "a traced scale must be one floating-point number",
            got=f"{scale.dtype} {scale.shape}",
            expected="shape ()",
            fix="multiply q by factors that differ between heads or tokens",
        )
    if isinstance(q, jax.ShapeDtypeStruct):
        return q, 1.0
    dtype = sum_dtype(q.dtype)
    return (q.astype(dtype) * scale.astype(dtype)).astype(q.dtype), 1.0


def _bias(bias: Any, q: Any, k: Any) -> Any:
    """Return the bias as [B or 1, Hq or 1, Tq, Tk]."""
    if bias is None:
        return None
    bias = _array(bias)
    expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    shape = (1,) * (4 - bias.ndim) + bias.shape
    fits = len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, expected, strict=True))
    if not fits or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ShapeError(
            "bias-shape",
            "bias must be floating-point and broadcast to the logits",
            got=f"{bias.dtype} {bias.shape}",
            expected=f"[B, Hq, Tq, Tk] = {expected}, any of them may be 1",
            fix="pass booleans as `mask`",
        )
    whole = (*shape[:2], *expected[2:])
    bias = reshape(bias, *shape)
    if isinstance(bias, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(whole, bias.dtype)
    return jnp.broadcast_to(bias, whole)


def _sinks(sinks, heads: int):
    if sinks is None:
        return None
    sinks = _array(sinks)
    fits = sinks.ndim in (1, 2) and sinks.shape[0] == heads and sinks.size > 0
    if not fits or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ShapeError(
            "sinks-shape",
            "sinks must be one logit, or S logits, per query head",
            got=f"{sinks.dtype} {sinks.shape}",
            expected=f"floating ({heads},) or ({heads}, S)",
            fix="repeat shared sinks with jnp.broadcast_to(sinks, (Hq, S))",
        )
    return reshape(sinks, heads, sinks.size // heads)


def _resolve_mask(args: AttentionArgs, q: Any, k: Any) -> AttentionArgs:
    """Return the arguments with one mask of `xsake.masks` for mask, `is_causal` and `window`."""
    if getattr(args.mask, "dtype", None) == np.dtype(bool):
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        args = convert_booleans(args, shape, _block_sizes(args, q, k))
    mask = parse(args.mask) if isinstance(args.mask, str) else args.mask
    require_mask(mask)
    if not isinstance(args.is_causal, bool | np.bool):
        raise ArgumentError(
            "is-causal-type",
            "`is_causal` must be a Python bool",
            got=repr(args.is_causal)[:80],
            expected="True or False",
            fix="it is compiled into the program",
        )
    rules = [Causal()] if args.is_causal else []
    rules += [] if args.window is None else [_window(args.window)]
    for rule in rules:
        mask = rule if mask is None else mask & rule
    return dataclasses.replace(args, mask=mask)


def _window(window: Any) -> Window:
    """Return the mask of `window=`: tokens on both sides, or (left, right)."""
    sides: Any = (window, window) if isinstance(window, numbers.Integral) else window
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise ArgumentError(
            "window-type",
            "`window` must be one or two numbers of tokens",
            got=repr(window)[:80],
            expected="(left, right), or one number for both; None for no limit",
            fix="window=(1023, 0) attends to 1024 keys that end with the query's own",
        )
    return Window(*sides)


def _block_sizes(args: AttentionArgs, q: Any, k: Any) -> tuple[int, int]:
    """Return the block sizes (q, kv) of a layout made for the call."""
    size = DEFAULT_BLOCK if args.block_size is None else args.block_size
    sizes = size if isinstance(size, tuple | list) and len(size) == 2 else (size, size)
    for name, each in zip(("block_q", "block_kv"), sizes, strict=True):
        check_block_size(name, each)
    return min(sizes[0], q.shape[1]), min(sizes[1], k.shape[1])


def _layout(q: Any, k: Any, args: AttentionArgs) -> BlockLayout:
    """Return the layout of the call, before run-time pruning by segments and positions.

    With explicit positions, blocks are pruned at run time; the layout then has the mask but still
    lists every block.
    """
    mask, layout = args.mask, args.layout
    has_positions = args.q_positions is not None or args.kv_positions is not None
    if layout is None:
        sizes = dict(zip(("block_q", "block_kv"), _block_sizes(args, q, k), strict=True))
        rule = Full() if has_positions or mask is None else mask
        layout = BlockLayout.from_mask(rule, q_tokens=q.shape[1], kv_tokens=k.shape[1], **sizes)
        layout = _replace_mask(layout, mask) if has_positions and mask is not None else layout
    else:
        _check_layout(layout, q, k, args.block_size)
        if has_positions:
            _check_positions(layout)
        if mask is not None and has_positions:
            layout = _replace_mask(layout, mask if layout.mask is None else layout.mask & mask)
        elif mask is not None:
            intersect = _intersect_static if layout.is_static else BlockLayout.with_mask
            layout = intersect(layout, mask)
    check_heads(layout.heads, q, k)
    return layout


def check_block_size(name: str, size: Any) -> None:
    """Raise ArgumentError unless a block size is a positive number of tokens."""
    if not isinstance(size, numbers.Integral) or size < 1:
        raise ArgumentError(
            "block-size",
            f"{name} must be a positive number of tokens",
            got=repr(size)[:80],
            expected="1 or more, e.g. 128; block_size=(q, kv) for two sizes",
            fix="a size above the number of tokens gives one block",
        )


def _replace_mask(layout: BlockLayout, mask: AbstractMask) -> BlockLayout:
    """Return `layout` with `mask` as element mask, without dropping blocks."""
    if layout.heads == 1 and mask.heads is not None:
        layout = layout.expand(heads=mask.heads)
    return dataclasses.replace(layout, mask=mask)


_intersect_static = cache_live(BlockLayout.with_mask)


def _check_layout(layout: Any, q: Any, k: Any, block_size: Any) -> None:
    if not isinstance(layout, BlockLayout):
        raise LayoutError(
            "layout-type",
            "`layout` has an unsupported type",
            got=f"{type(layout).__name__} {layout!r}"[:80],
            expected="xsake.BlockLayout, or None",
            fix="build one with BlockLayout.from_block_mask(grid, block_q=..., block_kv=...)",
        )
    if block_size is not None:
        raise ArgumentError(
            "block-size-and-layout",
            "`block_size` and `layout` exclude each other",
            got=f"{block_size=}, and a layout of {layout.block_q} x {layout.block_kv} tokens",
            expected="one of them",
            fix="a layout has its own block sizes",
        )
    sizes, tokens = (layout.q_tokens, layout.kv_tokens), (q.shape[1], k.shape[1])
    if sizes != tokens:
        what, expected = "the layout has other lengths than the arrays", "equal lengths"
        got = f"layout of {sizes[0]} x {sizes[1]} tokens, arrays of {tokens[0]} x {tokens[1]}"
        fix = "build the layout with q_tokens=q.shape[1], kv_tokens=k.shape[1]"
        raise ShapeError("layout-length", what, got=got, expected=expected, fix=fix)
    if layout.batch not in (1, q.shape[0]):
        what, expected = "the layout has another batch size than the arrays", f"1 or {q.shape[0]}"
        fix = "build it for this batch, or share one list between batch elements"
        raise ShapeError("layout-batch", what, got=f"{layout.batch=}", expected=expected, fix=fix)


def _check_positions(layout: BlockLayout) -> None:
    """Raise if positions are passed with a layout whose mask has dropped blocks by token index."""
    if not isinstance(layout.mask, Full | None):
        raise ArgumentError(
            "masked-layout-with-positions",
            "a layout built with a mask cannot be combined with positions",
            got=f"layout mask {layout.mask!r}, evaluated at positions 0, 1, 2, ...",
            expected="a layout without a mask",
            fix="build the layout without mask= and pass the mask to the call, which evaluates it "
            "at the given positions",
        )


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
            "boolean-mask-shape",
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
            "softcap-with-booleans",
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
