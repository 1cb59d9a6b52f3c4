"""Checks of arguments that several operations share: sizes, dtypes, numbers, integer arrays."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.errors import ArgumentError, ShapeError, UnsupportedError

FLOATS = ("float32", "bfloat16", "float16", "float64")
_INT32 = np.iinfo(np.int32)


def no_runtime_typecheck[F: Callable](function: F) -> F:
    """Disable runtime type checking: the function validates its own arguments."""
    setattr(function, "__no_type_check__", True)  # noqa: B010 (unknown to static checkers)
    return function


def check_sizes(**arrays: Any) -> None:
    """Refuse axes whose size is a symbol: blocks and lists need numbers."""
    symbols = [
        f"{name} {tuple(map(str, x.shape))}"
        for name, x in arrays.items()
        if not all(isinstance(size, numbers.Integral) for size in x.shape)
    ]
    if symbols:
        raise UnsupportedError(
            "symbolic-size",
            "every size must be a number while a call is traced",
            got=", ".join(symbols),
            expected="numbers",
            fix="export one function for each size, and pad to the next larger one",
        )


def check_dtypes(**arrays: Any) -> None:
    """Refuse arrays that do not share one dtype of `FLOATS`."""
    dtypes = {x.dtype for x in arrays.values()}
    if len(dtypes) == 1 and dtypes.pop().name in FLOATS:
        return
    *names, last = arrays
    raise ShapeError(
        "dtypes",
        f"{', '.join(names)} and {last} must share one floating dtype",
        got=", ".join(f"{name} {x.dtype}" for name, x in arrays.items()),
        expected=f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]} for all",
        fix="cast them with x.astype(...) before the call",
    )


def check_arrays(q: Any, k: Any, v: Any = None) -> None:
    """Raise ShapeError unless shapes and dtypes of q, k and, if there is one, v are compatible."""
    arrays = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    check_sizes(**arrays)
    v = k if v is None else v
    if not q.ndim == k.ndim == v.ndim == 4:
        slug = "axes"
        what, fix = "arrays must have 4 axes, or 3 without a batch", "heads come after tokens"
    elif not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]):
        slug, what = "sizes", "k and v must agree in batch, tokens and heads, and q in batch"
        fix = "repeat or slice the batch; only kv heads may be fewer than query heads"
    elif q.shape[3] != k.shape[3]:
        slug = "head-dim"
        what, fix = "q and k must have the same head dimension", "only v may have another one"
    elif min(*q.shape, *k.shape, *v.shape) == 0:
        slug = "empty-axes"
        what, fix = "arrays must not have empty axes", "skip the call for an empty batch"
    elif q.shape[2] % k.shape[2]:
        slug, what = "groups", "query heads must be a multiple of kv heads"
        fix = "each kv head serves Hq / Hk query heads"
    else:
        return check_dtypes(**arrays)
    raise ShapeError(
        slug,
        what,
        got=", ".join(f"{name} {x.shape}" for name, x in arrays.items()),
        expected="q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv], Hq a multiple of Hk, "
        "every size at least 1",
        fix=fix,
    )


def check_heads(heads: int | None, q: Any, k: Any) -> None:
    """Raise ShapeError unless a mask or layout has one head, those of k or those of q."""
    accepted = sorted({1, k.shape[2], q.shape[2]})
    if heads not in (None, *accepted):
        raise ShapeError(
            "mask-heads",
            "the heads of the mask or layout match neither query nor kv heads",
            got=f"{heads} heads",
            expected=f"one of {accepted}",
            fix="use one rule for all heads, one per kv head or one per query head",
        )


def scale_or_default(scale: Any, q: Any) -> float:
    """The factor on q.k: a finite number, 1 / sqrt(D) if it is None."""
    return q.shape[-1] ** -0.5 if scale is None else number("scale", scale, "None is 1 / sqrt(D)")


def positive_softcap(softcap: Any) -> float | None:
    """The softcap as a positive number; None stays None."""
    value, fix = None, "None disables it"
    if softcap is not None and (value := number("softcap", softcap, fix)) <= 0:
        raise ArgumentError(
            "softcap-sign", "softcap must be positive", got=value, expected="above 0", fix=fix
        )
    return value


def number(name: str, value: Any, fix: str) -> float:
    """`value` as a finite Python number."""
    if isinstance(value, jax.core.Tracer):
        raise ArgumentError(
            "traced-number",
            f"{name} is compiled into the program, so it cannot be traced",
            got=value,
            expected="a Python number",
            fix=f"multiply q by a traced scale instead; {fix}",
        )
    is_scalar = isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
    if not is_scalar or not math.isfinite(value):
        expected = "a finite number"
        raise ArgumentError(
            "number-type", f"{name} must be a number", got=repr(value), expected=expected, fix=fix
        )
    return float(value)


def integers(
    name: str, values: Any, like: Any, *, shared: bool = False, least: int | None = None
) -> Any:
    """`values` as int32 [B, T] of the array `like`, or [1, T] if `shared` allows one row for all.

    Values that are known are checked: they fit int32, and none is below `least`. Traced ones are
    checked by their dtype, and by `jax.experimental.checkify` where it is 64 bits wide.
    """
    if values is None:
        return None
    values = values if hasattr(values, "dtype") else np.asarray(values)
    batch, tokens = like.shape[:2]
    shared = shared or batch == 1
    fits = values.ndim == 2 and values.shape[0] in ((1, batch) if shared else (batch,))
    fits = (fits or (shared and values.ndim == 1)) and values.shape[-1] == tokens
    if not fits or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ShapeError(
            "array-shape",
            f"`{name}` does not fit",
            got=f"{values.dtype} {values.shape}",
            expected=f"integers ({batch}, {tokens})" + (f" or ({tokens},)" if shared else ""),
            fix="one integer per token of each batch element",
        )
    shape = (1, tokens) if values.ndim == 1 else values.shape
    if isinstance(values, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.int32)
    _check_range(name, values, least)
    return jnp.asarray(values).astype(jnp.int32).reshape(shape)


def token_integers(
    q: Any, k: Any, q_positions: Any, kv_positions: Any, q_ids: Any, kv_ids: Any
) -> tuple[Any, Any, Any, Any]:
    """Checked positions [B or 1, T] and segment ids [B, T] of queries and keys; None stays None."""
    q_positions = integers("q_positions", q_positions, q, shared=True, least=0)
    kv_positions = integers("kv_positions", kv_positions, k, shared=True, least=0)
    q_ids, kv_ids = integers("q_segment_ids", q_ids, q), integers("kv_segment_ids", kv_ids, k)
    if q_ids is not None and kv_ids is None and q.shape[1] == k.shape[1]:
        kv_ids = q_ids
    if (q_ids is None) != (kv_ids is None):
        raise ArgumentError(
            "segment-ids-pair",
            "segment ids are required for both queries and keys",
            got="only one of q_segment_ids and kv_segment_ids",
            expected="both",
            fix="if Tq == Tk, q_segment_ids alone is sufficient",
        )
    return q_positions, kv_positions, q_ids, kv_ids


def _check_range(name: str, values: Any, least: int | None) -> None:
    """Refuse what int32 cannot hold: converted, it would come out as another number."""
    low, high = _INT32.min if least is None else least, _INT32.max
    expected = f"integers from {low} to {high}"
    if not isinstance(values, np.ndarray) and not is_known(values):
        if values.dtype in (jnp.uint32, jnp.uint64):
            raise ArgumentError(
                "int-width",
                f"`{name}` may hold more than int32 can, and is not known while tracing",
                got=f"traced {values.dtype}",
                expected=expected,
                fix=f"pass {name}.astype(jnp.int32), hashes modulo 2**31",
            )
        if values.dtype.itemsize > 4:
            from jax.experimental import checkify  # imports Pallas

            is_inside = (values >= _INT32.min) & (values <= high)
            checkify.debug_check(
                is_inside.all(), f"XSK-102.int-range: `{name}` must hold {expected}"
            )
        return
    known = np.asarray(values)
    if known.min() < low or known.max() > high:
        raise ArgumentError(
            "int-range",
            f"`{name}` has values outside its range",
            got=f"{known.dtype} from {known.min()} to {known.max()}",
            expected=expected,
            fix="count positions from 0, and number segments instead of hashing them",
        )


def is_known(x: Any) -> bool:
    """Whether the values of an array can be read now, in this process."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def sum_dtype(dtype: Any) -> Any:
    """The dtype of statistics and sums: float32 at least, float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
