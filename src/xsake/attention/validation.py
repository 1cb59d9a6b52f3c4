"""Validate and canonicalize the arguments of an attention call before tracing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.errors import ArgumentError, LayoutError, ShapeError
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.validation import check_dtypes, check_sizes, integers, number
from xsake.layout import BlockLayout
from xsake.layout.block_layout import cache_live
from xsake.masks import AbstractMask, Full
from xsake.masks.base import require_mask

DEFAULT_BLOCK = 128
AnyArray = Array | np.ndarray | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Masking arguments of a call, not yet validated."""

    mask: Any = None  # AbstractMask
    layout: Any = None  # BlockLayout
    q_segment_ids: Any = None  # [B, Tq]
    kv_segment_ids: Any = None  # [B, Tk]
    q_positions: Any = None  # [Tq] or [B, Tq]
    kv_positions: Any = None  # [Tk] or [B, Tk]
    block_q: int = DEFAULT_BLOCK
    block_kv: int = DEFAULT_BLOCK


@dataclasses.dataclass(frozen=True)
class LogitsSpec:
    """Logit arguments of a call, not yet validated."""

    scale: Any = None
    softcap: Any = None
    bias: Any = None  # [B or 1, Hq or 1, Tq, Tk]
    sinks: Any = None  # [Hq] or [Hq, S]


def no_runtime_typecheck[F: Callable](function: F) -> F:
    """Disable runtime type checking: the function validates its own arguments."""
    setattr(function, "__no_type_check__", True)  # noqa: B010 (unknown to static checkers)
    return function


def canonicalize_args(
    q, k, v, masking: MaskSpec, logits: LogitsSpec
) -> tuple[BlockSparseInputs, BlockSparseConfig, Any]:
    """Return validated `(operands, problem, sinks [Hq, S])`; abstract arrays stay abstract."""
    q, k, v = (_array(x) for x in (q, k, v))
    check_arrays(q, k, v)
    problem = BlockSparseConfig(_scale(logits.scale, q.shape[-1]), _softcap(logits.softcap))
    layout = _layout(q, k, masking)
    q_positions, kv_positions = _positions(masking, q, k)
    q_ids, kv_ids = _segments(masking, q, k)
    bias = _bias(logits.bias, q, k)
    operands = BlockSparseInputs(q, k, v, layout, bias, q_positions, kv_positions, q_ids, kv_ids)
    return operands, problem, _sinks(logits.sinks, q.shape[2])


def _array(x) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def _reshape(x, *shape: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return x.reshape(shape)


def check_arrays(q, k, v) -> None:
    """Raise ShapeError unless shapes and dtypes of q, k and v are compatible."""
    check_sizes(q=q, k=k, v=v)
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(
            "q, k and v must have 4 axes",
            got=shapes,
            expected="q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv]",
            fix="add a batch axis with x[None]; heads come after tokens",
        )
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]):
        raise ShapeError(
            "k and v must agree in batch, tokens and heads, and q in batch",
            got=shapes,
            expected="q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv]",
            fix="repeat or slice the batch; only kv heads may be fewer than query heads",
        )
    if q.shape[3] != k.shape[3]:
        raise ShapeError(
            "q and k must have the same head dimension",
            got=f"{q.shape[3]=}, {k.shape[3]=}",
            expected="equal numbers",
            fix="only v may have another head dimension",
        )
    if min(*q.shape, *k.shape, *v.shape) == 0:
        raise ShapeError(
            "arrays must not have empty axes",
            got=shapes,
            expected="every size at least 1",
            fix="skip the call for an empty batch",
        )
    if q.shape[2] % k.shape[2]:
        raise ShapeError(
            "query heads must be a multiple of kv heads",
            got=f"Hq={q.shape[2]}, Hk={k.shape[2]}",
            expected=f"Hq a multiple of {k.shape[2]}",
            fix="each kv head serves Hq / Hk query heads",
        )
    check_dtypes(q=q, k=k, v=v)


def _scale(scale, dim: int) -> float:
    return dim**-0.5 if scale is None else number("scale", scale, fix="None is 1 / sqrt(D)")


def _softcap(softcap) -> float | None:
    if softcap is None:
        return None
    softcap = number("softcap", softcap, fix="None disables it")
    if softcap <= 0:
        raise ArgumentError(
            "softcap must be positive",
            got=softcap,
            expected="a number above 0",
            fix="None disables it",
        )
    return softcap


def _bias(bias, q, k) -> Any:
    if bias is None:
        return None
    bias = _array(bias)
    expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    fits = bias.ndim == 4 and bias.shape[2:] == expected[2:]
    fits = fits and all(n in (1, m) for n, m in zip(bias.shape[:2], expected[:2], strict=True))
    if not fits or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ShapeError(
            "bias must be floating-point, [B or 1, Hq or 1, Tq, Tk]",
            got=f"{bias.dtype} {bias.shape}",
            expected=f"{expected}, the first two may be 1",
            fix="broadcast the last two axes with jnp.broadcast_to; use a mask for booleans",
        )
    return bias


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
    return _reshape(sinks, heads, sinks.size // heads)


def _positions(masking: MaskSpec, q, k) -> tuple[Any, ...]:
    pairs = (("q_positions", masking.q_positions, q), ("kv_positions", masking.kv_positions, k))
    return tuple(integers(name, x, y, shared=True, least=0) for name, x, y in pairs)


def _segments(masking: MaskSpec, q, k) -> tuple[Any, Any]:
    q_ids = integers("q_segment_ids", masking.q_segment_ids, q)
    kv_ids = integers("kv_segment_ids", masking.kv_segment_ids, k)
    if q_ids is not None and kv_ids is None and q.shape[1] == k.shape[1]:
        kv_ids = q_ids
    if (q_ids is None) != (kv_ids is None):
        raise ArgumentError(
            "segment ids are required for both queries and keys",
            got="only one of q_segment_ids and kv_segment_ids",
            expected="both",
            fix="if Tq == Tk, q_segment_ids alone is sufficient",
        )
    return q_ids, kv_ids


def _layout(q, k, masking: MaskSpec) -> BlockLayout:
    """Return the layout of the call, before run-time pruning by segments and positions.

    With explicit positions, blocks are pruned at run time; the layout then has the mask but still
    lists every block.
    """
    sizes = {"q_tokens": q.shape[1], "kv_tokens": k.shape[1]}
    has_positions = masking.q_positions is not None or masking.kv_positions is not None
    mask = masking.mask
    require_mask(mask)
    if masking.layout is None:
        sizes["block_q"] = min(masking.block_q, q.shape[1])
        sizes["block_kv"] = min(masking.block_kv, k.shape[1])
        layout = BlockLayout.from_mask(Full() if has_positions or mask is None else mask, **sizes)
        layout = _replace_mask(layout, mask) if has_positions and mask is not None else layout
    else:
        layout = masking.layout
        _check_layout(layout, q, k)
        if has_positions:
            _check_positions(layout)
        if mask is not None:
            combined = mask if layout.mask is None else layout.mask & mask
            layout = (
                _replace_mask(layout, combined) if has_positions else _intersect_mask(layout, mask)
            )
    _check_heads(layout, q, k)
    return layout


def check_block_size(name: str, size: int) -> None:
    """Raise ArgumentError for block sizes below 1."""
    if size < 1:
        raise ArgumentError(
            f"{name} must be positive",
            got=size,
            expected="1 or more, e.g. 128",
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


def _check_layout(layout: Any, q, k) -> None:
    if not isinstance(layout, BlockLayout):
        raise LayoutError(
            "`layout` has an unsupported type",
            got=f"{type(layout).__name__} {layout!r}"[:80],
            expected="xsake.BlockLayout, or None",
            fix="build one with BlockLayout.from_block_mask(grid, block_q=..., block_kv=...)",
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


def _check_heads(layout: BlockLayout, q, k) -> None:
    accepted = sorted({1, k.shape[2], q.shape[2]})
    if layout.heads not in accepted:
        raise ShapeError(
            "the heads of the mask or layout match neither query nor kv heads",
            got=f"{layout.heads} heads",
            expected=f"one of {accepted}",
            fix="use one rule for all heads, one per kv head or one per query head",
        )
