"""Checks and completes the arguments of an attention call, before anything is traced."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.errors import ArgumentError, LayoutError, ShapeError
from xsake.kernels.arguments import check_dtypes, check_sizes, integers, number
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.layout import BlockLayout
from xsake.layout.identity import reuse_live
from xsake.masks import AbstractMask, Full
from xsake.masks.base import require_mask

DEFAULT_BLOCK = 128
AnyArray = Array | np.ndarray | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Rules:
    """Who may see whom, by any mixture of mask, layout, segments, positions; not yet checked."""

    mask: Any = None  # AbstractMask
    layout: Any = None  # BlockLayout
    q_segment_ids: Any = None  # [B, Tq]
    kv_segment_ids: Any = None  # [B, Tk]
    q_positions: Any = None  # [Tq] or [B, Tq]
    kv_positions: Any = None  # [Tk] or [B, Tk]
    block_q: int = DEFAULT_BLOCK
    block_kv: int = DEFAULT_BLOCK


@dataclasses.dataclass(frozen=True)
class Scores:
    """How logits are made; not yet checked."""

    scale: Any = None
    softcap: Any = None
    bias: Any = None  # [B or 1, Hq or 1, Tq, Tk]
    sinks: Any = None  # [Hq] or [Hq, S]


def checks_itself[F: Callable](function: F) -> F:
    """Marks a function whose own checks say more than a run-time type checker, which then rests."""
    setattr(function, "__no_type_check__", True)  # noqa: B010 (unknown to static checkers)
    return function


def complete(q, k, v, rules: Rules, scores: Scores) -> tuple[Operands, Problem, Any]:
    """Checked `(operands, problem, sinks [Hq, S])` of a call; abstract arrays stay abstract."""
    q, k, v = (_array(x) for x in (q, k, v))
    check_arrays(q, k, v)
    problem = Problem(_scale(scores.scale, q.shape[-1]), _softcap(scores.softcap))
    layout = _layout(q, k, rules)
    q_positions, kv_positions = _positions(rules, q, k)
    q_ids, kv_ids = _segments(rules, q, k)
    bias = _bias(scores.bias, q, k)
    operands = Operands(q, k, v, layout, bias, q_positions, kv_positions, q_ids, kv_ids)
    return operands, problem, _sinks(scores.sinks, q.shape[2])


def _array(x) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def _reshaped(x, *shape: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    return x.reshape(shape)


def check_arrays(q, k, v) -> None:
    """Refuse shapes and dtypes that do not fit."""
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
            fix="only v may have a head dimension of its own",
        )
    if min(*q.shape, *k.shape, *v.shape) == 0:
        raise ShapeError(
            "no axis may be empty",
            got=shapes,
            expected="every size at least 1",
            fix="skip the call for a batch of nothing",
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
    softcap = number("softcap", softcap, fix="None switches it off")
    if softcap <= 0:
        raise ArgumentError(
            "softcap must be positive",
            got=softcap,
            expected="a number above 0",
            fix="None switches it off",
        )
    return softcap


def _bias(bias, q, k) -> Any:
    if bias is None:
        return None
    bias = _array(bias)
    wanted = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    fits = bias.ndim == 4 and bias.shape[2:] == wanted[2:]
    fits = fits and all(n in (1, m) for n, m in zip(bias.shape[:2], wanted[:2], strict=True))
    if not fits or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ShapeError(
            "bias must be floating, [B or 1, Hq or 1, Tq, Tk]",
            got=f"{bias.dtype} {bias.shape}",
            expected=f"{wanted}, the first two may be 1",
            fix="jnp.broadcast_to(bias, ...) for the last two axes; booleans belong in a mask",
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
    return _reshaped(sinks, heads, sinks.size // heads)


def _positions(rules: Rules, q, k) -> tuple[Any, ...]:
    pairs = (("q_positions", rules.q_positions, q), ("kv_positions", rules.kv_positions, k))
    return tuple(integers(name, x, y, shared=True, least=0) for name, x, y in pairs)


def _segments(rules: Rules, q, k) -> tuple[Any, Any]:
    q_ids = integers("q_segment_ids", rules.q_segment_ids, q)
    kv_ids = integers("kv_segment_ids", rules.kv_segment_ids, k)
    if q_ids is not None and kv_ids is None and q.shape[1] == k.shape[1]:
        kv_ids = q_ids
    if (q_ids is None) != (kv_ids is None):
        raise ArgumentError(
            "segment ids are needed for queries and for keys",
            got="only one of q_segment_ids and kv_segment_ids",
            expected="both",
            fix="with as many queries as keys q_segment_ids alone is enough",
        )
    return q_ids, kv_ids


def _layout(q, k, rules: Rules) -> BlockLayout:
    """The blocks of the call, before run-time segments and positions narrow them.

    With positions of its own a call judges blocks by these, at run time: then the mask stands
    beside the list and has dropped nothing yet.
    """
    sizes = {"q_tokens": q.shape[1], "kv_tokens": k.shape[1]}
    moved = rules.q_positions is not None or rules.kv_positions is not None
    mask = rules.mask
    require_mask(mask)
    if rules.layout is None:
        sizes["block_q"] = min(rules.block_q, q.shape[1])
        sizes["block_kv"] = min(rules.block_kv, k.shape[1])
        layout = BlockLayout.from_mask(Full() if moved or mask is None else mask, **sizes)
        layout = _under(layout, mask) if moved and mask is not None else layout
    else:
        layout = rules.layout
        _check_layout(layout, q, k)
        if moved:
            _check_positions(layout)
        if mask is not None:
            joint = mask if layout.mask is None else layout.mask & mask
            layout = _under(layout, joint) if moved else _narrowed_by(layout, mask)
    _check_heads(layout, q, k)
    return layout


def check_block(name: str, size: int) -> None:
    """Refuse block sizes below 1."""
    if size < 1:
        raise ArgumentError(
            f"{name} must be positive",
            got=size,
            expected="128, say",
            fix="a size above the number of tokens means one block",
        )


def _under(layout: BlockLayout, mask: AbstractMask) -> BlockLayout:
    """All blocks of `layout`, with `mask` as their rule."""
    if layout.heads == 1 and mask.heads is not None:
        layout = layout.expand(heads=mask.heads)
    return dataclasses.replace(layout, mask=mask)


def _narrowed_by(layout: BlockLayout, mask: AbstractMask) -> BlockLayout:
    return _static_narrowed_by(layout, mask) if layout.is_static else layout.with_mask(mask)


@reuse_live
def _static_narrowed_by(layout: BlockLayout, mask: AbstractMask) -> BlockLayout:
    return layout.with_mask(mask)


def _check_layout(layout: Any, q, k) -> None:
    if not isinstance(layout, BlockLayout):
        raise LayoutError(
            "`layout` must be a list of blocks",
            got=f"{type(layout).__name__} {layout!r}"[:80],
            expected="xsake.BlockLayout, or None",
            fix="make one with BlockLayout.from_block_mask(grid, block_q=..., block_kv=...)",
        )
    own, tokens = (layout.q_tokens, layout.kv_tokens), (q.shape[1], k.shape[1])
    if own != tokens:
        raise ShapeError(
            "the layout was made for other lengths",
            got=f"layout of {own[0]} x {own[1]} tokens, arrays of {tokens[0]} x {tokens[1]}",
            expected="equal lengths",
            fix="build the layout with q_tokens=q.shape[1], kv_tokens=k.shape[1]",
        )
    if layout.batch not in (1, q.shape[0]):
        raise ShapeError(
            "the layout was made for another batch",
            got=f"{layout.batch=}",
            expected=f"1 or {q.shape[0]}",
            fix="build it for this batch, or share one list by all batch elements",
        )


def _check_positions(layout: BlockLayout) -> None:
    """Refuse positions where a mask has already dropped blocks by token index."""
    if not isinstance(layout.mask, Full | None):
        raise ArgumentError(
            "a layout built with a mask cannot be combined with positions",
            got=f"layout mask {layout.mask!r}, which judged blocks at positions 0, 1, 2, ...",
            expected="a layout of chosen blocks, without a mask of its own",
            fix="build the layout without mask=, and pass the mask to the call: it then judges "
            "pairs and blocks at the given positions",
        )


def _check_heads(layout: BlockLayout, q, k) -> None:
    accepted = sorted({1, k.shape[2], q.shape[2]})
    if layout.heads not in accepted:
        raise ShapeError(
            "the mask or layout has a number of heads that fits neither queries nor keys",
            got=f"{layout.heads} heads",
            expected=f"one of {accepted}",
            fix="give one rule for all heads, one per kv head or one per query head",
        )
