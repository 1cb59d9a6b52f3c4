"""Checks and completes the arguments of a call for statistics, before anything is traced."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from xsake.errors import ArgumentError, ShapeError
from xsake.kernels.statistics.problem import Operands, Problem
from xsake.masks import AbstractMask


def operands_of(q, k, q_positions, kv_positions, q_segment_ids, kv_segment_ids) -> Operands:
    """The checked arrays of a call, positions and segment ids as [B or 1, T]."""
    q, k = jnp.asarray(q), jnp.asarray(k)
    _check_arrays(q, k)
    if q_segment_ids is not None and kv_segment_ids is None and q.shape[1] == k.shape[1]:
        kv_segment_ids = q_segment_ids
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ArgumentError(
            "segment ids are needed for queries and for keys",
            got="only one of q_segment_ids and kv_segment_ids",
            expected="both",
            fix="with as many queries as keys q_segment_ids alone is enough",
        )
    return Operands(
        q,
        k,
        _integers("q_positions", q_positions, q, shared=True),
        _integers("kv_positions", kv_positions, k, shared=True),
        _integers("q_segment_ids", q_segment_ids, q),
        _integers("kv_segment_ids", kv_segment_ids, k),
    )


def problem_of(
    operands: Operands,
    mask: AbstractMask,
    block_kv: int,
    scale: float | None,
    softcap: float | None,
) -> Problem:
    """The checked numbers of a call."""
    q_heads, kv_heads = operands.q.shape[2], operands.k.shape[2]
    if mask.heads not in (None, 1, kv_heads, q_heads):
        raise ShapeError(
            "the mask has a number of heads that fits neither queries nor keys",
            got=f"{mask.heads} heads",
            expected=f"one of {sorted({1, kv_heads, q_heads})}",
            fix="give one rule for all heads, one per kv head or one per query head",
        )
    if block_kv < 1:
        raise ArgumentError(
            "block_kv must be positive",
            got=block_kv,
            expected="64, say",
            fix="a size above the number of keys means one block",
        )
    scale = operands.q.shape[-1] ** -0.5 if scale is None else _number("scale", scale)
    softcap = None if softcap is None else _number("softcap", softcap)
    if softcap is not None and softcap <= 0:
        raise ArgumentError(
            "softcap must be positive",
            got=softcap,
            expected="a number above 0",
            fix="None switches it off",
        )
    return Problem(mask, min(block_kv, operands.k.shape[1]), scale, softcap)


def _check_arrays(q, k) -> None:
    shapes = f"q {q.dtype} {q.shape}, k {k.dtype} {k.shape}"
    fits = q.ndim == k.ndim == 4 and min(*q.shape, *k.shape) > 0
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[2] % k.shape[2]:
        raise ShapeError(
            "q and k do not fit each other",
            got=shapes,
            expected="q [B, Tq, Hq, D] and k [B, Tk, Hk, D], no axis empty, Hq a multiple of Hk",
            fix="heads come after tokens; each kv head serves Hq / Hk query heads",
        )
    if q.dtype != k.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ShapeError(
            "q and k must share one floating dtype",
            got=shapes,
            expected="float32, bfloat16, float16 or float64 for both",
            fix="cast them with x.astype(...) before the call",
        )


def _number(name: str, value) -> float:
    if isinstance(value, jax.core.Tracer) or not math.isfinite(value):
        raise ArgumentError(
            f"{name} is compiled into the program, so it must be a finite Python number",
            got=value,
            expected="a number",
            fix="multiply q by a traced scale instead",
        )
    return float(value)


def _integers(name: str, values, like, shared: bool = False) -> Any:
    """`values` as int32 [B, T], or [1, T] if `shared` allows one row for all."""
    if values is None:
        return None
    values = jnp.asarray(values)
    batch, tokens = like.shape[:2]
    if shared and values.ndim == 1:
        values = values[None]
    fits = values.ndim == 2 and values.shape[1] == tokens
    fits = fits and values.shape[0] in ((1, batch) if shared else (batch,))
    if not fits or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ShapeError(
            f"`{name}` does not fit",
            got=f"{values.dtype} {values.shape}",
            expected=f"integers ({batch}, {tokens})" + (f" or ({tokens},)" if shared else ""),
            fix="one integer per token of each batch element",
        )
    return values.astype(jnp.int32)
