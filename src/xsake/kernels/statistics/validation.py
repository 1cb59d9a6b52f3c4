"""Checks and completes the arguments of a call for statistics, before anything is traced."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake.errors import ArgumentError, ShapeError
from xsake.kernels.statistics.types import StatisticsConfig, StatisticsInputs
from xsake.kernels.validation import check_dtypes, check_sizes, integers, number
from xsake.masks import AbstractMask
from xsake.masks.base import require_mask


def operands_of(
    q: Any, k: Any, q_positions: Any, kv_positions: Any, q_segment_ids: Any, kv_segment_ids: Any
) -> StatisticsInputs:
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
    return StatisticsInputs(
        q,
        k,
        integers("q_positions", q_positions, q, shared=True, least=0),
        integers("kv_positions", kv_positions, k, shared=True, least=0),
        integers("q_segment_ids", q_segment_ids, q),
        integers("kv_segment_ids", kv_segment_ids, k),
    )


def problem_of(
    inputs: StatisticsInputs,
    mask: AbstractMask,
    block_kv: int,
    scale: float | None,
    softcap: float | None,
) -> StatisticsConfig:
    """The checked numbers of a call."""
    require_mask(mask)
    q_heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
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
    root = inputs.q.shape[-1] ** -0.5
    scale = root if scale is None else number("scale", scale, fix="None is 1 / sqrt(D)")
    if softcap is not None:
        softcap = number("softcap", softcap, fix="None switches it off")
    if softcap is not None and softcap <= 0:
        raise ArgumentError(
            "softcap must be positive",
            got=softcap,
            expected="a number above 0",
            fix="None switches it off",
        )
    return StatisticsConfig(mask, min(block_kv, inputs.k.shape[1]), scale, softcap)


def _check_arrays(q: Array, k: Array) -> None:
    check_sizes(q=q, k=k)
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
    check_dtypes(q=q, k=k)
