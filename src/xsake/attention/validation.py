"""Validate and canonicalize the arguments of an attention call before tracing."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.attention.boolean_masks import convert_booleans
from xsake.attention.types import DEFAULT_BLOCK, AttentionArgs, reshape
from xsake.errors import ArgumentError, LayoutError, ShapeError
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
from xsake.masks import AbstractMask, Causal, Full, Window, parse
from xsake.masks.base import require_mask


def no_runtime_typecheck[F: Callable](function: F) -> F:
    """Disable runtime type checking: the function validates its own arguments."""
    setattr(function, "__no_type_check__", True)  # noqa: B010 (unknown to static checkers)
    return function


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
        block_q, block_kv = _block_sizes(args, q, k)
        layout = BlockLayout.from_mask(
            Full() if has_positions or mask is None else mask,
            q_tokens=q.shape[1], kv_tokens=k.shape[1], block_q=block_q, block_kv=block_kv,
        )  # fmt: skip
        layout = _replace_mask(layout, mask) if has_positions and mask is not None else layout
    else:
        _check_layout(layout, q, k, args.block_size)
        if has_positions:
            _check_positions(layout)
        if mask is not None:
            combined = mask if layout.mask is None else layout.mask & mask
            layout = (
                _replace_mask(layout, combined) if has_positions else _intersect_mask(layout, mask)
            )
    check_heads(layout.heads, q, k)
    return layout


def check_block_size(name: str, size: Any) -> None:
    """Raise ArgumentError unless a block size is a positive number of tokens."""
    if not isinstance(size, numbers.Integral) or size < 1:
        raise ArgumentError(
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


def _intersect_mask(layout: BlockLayout, mask: AbstractMask) -> BlockLayout:
    return _intersect_mask_static(layout, mask) if layout.is_static else layout.with_mask(mask)


@cache_live
def _intersect_mask_static(layout: BlockLayout, mask: AbstractMask) -> BlockLayout:
    return layout.with_mask(mask)


def _check_layout(layout: Any, q: Any, k: Any, block_size: Any) -> None:
    if not isinstance(layout, BlockLayout):
        raise LayoutError(
            "`layout` has an unsupported type",
            got=f"{type(layout).__name__} {layout!r}"[:80],
            expected="xsake.BlockLayout, or None",
            fix="build one with BlockLayout.from_block_mask(grid, block_q=..., block_kv=...)",
        )
    if block_size is not None:
        raise ArgumentError(
            "`block_size` and `layout` exclude each other",
            got=f"{block_size=}, and a layout of {layout.block_q} x {layout.block_kv} tokens",
            expected="one of them",
            fix="a layout has its own block sizes",
        )
    sizes, tokens = (layout.q_tokens, layout.kv_tokens), (q.shape[1], k.shape[1])
    if sizes != tokens:
        raise ShapeError(
            "the layout has other lengths than the arrays",
            got=f"layout of {sizes[0]} x {sizes[1]} tokens, arrays of {tokens[0]} x {tokens[1]}",
            expected="equal lengths",
            fix="build the layout with q_tokens=q.shape[1], kv_tokens=k.shape[1]",
        )
    if layout.batch not in (1, q.shape[0]):
        raise ShapeError(
            "the layout has another batch size than the arrays",
            got=f"{layout.batch=}",
            expected=f"1 or {q.shape[0]}",
            fix="build it for this batch, or share one list between batch elements",
        )


def _check_positions(layout: BlockLayout) -> None:
    """Raise if positions are passed with a layout whose mask has dropped blocks by token index."""
    if not isinstance(layout.mask, Full | None):
        raise ArgumentError(
            "a layout built with a mask cannot be combined with positions",
            got=f"layout mask {layout.mask!r}, evaluated at positions 0, 1, 2, ...",
            expected="a layout without a mask",
            fix="build the layout without mask= and pass the mask to the call, which evaluates it "
            "at the given positions",
        )
