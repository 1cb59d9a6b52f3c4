"""Attention over the pages of a cache as an operation: arguments, lists, backends."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from xsake.errors import ArgumentError, ShapeError, UnsupportedError
from xsake.kernels import online_softmax
from xsake.kernels.dispatch import (
    MOSAIC_RELEASES,
    BackendSpec,
    Implementation,
    Op,
    StaticCall,
)
from xsake.kernels.lowering import by_platform
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs
from xsake.kernels.sharding import vary_alike
from xsake.kernels.validation import (
    FLOATS,
    check_sizes,
    no_runtime_typecheck,
    positive_softcap,
    scale_or_default,
)
from xsake.masks import AbstractMask, Causal
from xsake.masks.base import require_mask
from xsake.masks.coverage import ALL, NONE

_PACKAGE = "xsake.kernels.paged_decode"
OP = Op(
    BackendSpec("mosaic_gpu", f"{_PACKAGE}.mosaic_gpu", ("cuda",), MOSAIC_RELEASES),
    BackendSpec("mosaic_tpu", f"{_PACKAGE}.mosaic_tpu", ("tpu",), MOSAIC_RELEASES),
    BackendSpec.of_native_library(_PACKAGE, "paged"),
    BackendSpec("xla", f"{_PACKAGE}.xla"),
    BackendSpec("reference", f"{_PACKAGE}.reference", is_on_request=True, is_portable=True),
)


@no_runtime_typecheck
def paged_attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k_pages: Num[Array | np.ndarray, "P Hk page D"],
    v_pages: Num[Array | np.ndarray, "P Hk page Dv"],
    page_table: Int[Array | np.ndarray, "B N"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    pages: Int[Array | np.ndarray, "B Hl S"] | None = None,
    k_scale: Float[Array | np.ndarray, "P Hk"] | None = None,
    v_scale: Float[Array | np.ndarray, "P Hk"] | None = None,
    mask: AbstractMask = Causal(),  # noqa: B008 (frozen)
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array | np.ndarray, "Hq *S"] | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Any:
    """Attention of the last Tq tokens of each sequence over the pages of its keys.

    Query t of a sequence is at position `lengths - Tq + t`; queries before position 0 are padding
    and give zeros. Page n of a sequence holds positions `n * page_size` up to `(n + 1) * page_size`
    and lies in `k_pages[page_table[b, n]]`. Only listed pages are read.

    Args:
        q: queries [B, Tq, Hq, D]; their keys are in the pages already.
        k_pages: keys of all sequences, [pages, Hk, page_size, D], in the dtype of q or int8.
        v_pages: values likewise, [pages, Hk, page_size, Dv].
        page_table: where each page of a sequence lies; negative: it has none, and none is read.
        lengths: tokens of each sequence, those of q included.
        pages: the pages that each kv head reads, by number in the sequence, [B, Hk, S], or
            [B, 1, S] for all heads; negative numbers are unused slots. None: every page.
        k_scale: factor of each page and kv head, for int8 keys.
        v_scale: likewise for values.
        mask: who may see whom, by position (`xsake.masks`).
        scale: factor on q.k; None is 1 / sqrt(D).
        softcap: logits become `softcap * tanh(logits / softcap)`.
        sinks: logits [Hq] or [Hq, S] of keys without a value, in every denominator.
        return_lse: whether to return the log of the softmax denominator as well.
        implementation: a backend, or several in order of preference; None: the best one.

    Returns:
        [B, Tq, Hq, Dv] in the dtype of q; with `return_lse` also float32 [B, Tq, Hq]. No gradient
        is defined.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake.kernels.paged_decode import paged_attention
        >>> k_pages = v_pages = jnp.ones((8, 2, 4, 16))  # 8 pages of 4 tokens
        >>> q, table = jnp.ones((1, 1, 6, 16)), jnp.array([[5, 2, -1]])
        >>> paged_attention(q, k_pages, v_pages, table, jnp.array([7])).shape
        (1, 1, 6, 16)
    """
    q, k, v, page_table, lengths = map(jnp.asarray, (q, k_pages, v_pages, page_table, lengths))
    require_mask(mask)
    _check_arrays(q, k, v, page_table, lengths, mask)
    scales = _scales(k, k_scale, v_scale)
    numbers = jnp.arange(page_table.shape[1])[None, None] if pages is None else jnp.asarray(pages)
    _check_pages(numbers, q, k, pages is None)
    positions = lengths[:, None] + jnp.arange(-q.shape[1], 0)[None]
    lists = _list_pages(numbers, page_table, positions, lengths, mask, k.shape[2])
    positions, lengths = positions.astype(jnp.int32), lengths.astype(jnp.int32)
    inputs = PagedInputs(q, k, v, *lists, positions, lengths, *scales)
    config = PagedConfig(scale_or_default(scale, q), positive_softcap(softcap), mask)
    call = StaticCall(OP.names(implementation), config, PagedInputs)
    OP.check(inputs, config, call.implementation)
    o, lse = _attend(call, vary_alike(inputs))
    if sinks is not None:
        sinks = jnp.asarray(sinks).reshape(q.shape[2], -1)
        o, lse = online_softmax.add_sinks(o, lse, sinks)
    return (o, lse) if return_lse else o


def _list_pages(
    numbers: Int[Array, "#B Hl S"], page_table: Int[Array, "B N"], positions: Int[Array, "B Tq"],
    lengths: Int[Array, " B"], mask: AbstractMask, page_size: int,
) -> tuple[Int[Array, "B Hl S"], Int[Array, "B Hl S"], Bool[Array, "B Hl S"]]:  # fmt: skip
    """Page in memory, number and whether it is partial, of every slot that a query can see."""
    numbers = jnp.broadcast_to(numbers, (page_table.shape[0], *numbers.shape[1:]))
    inside = (numbers >= 0) & (numbers < page_table.shape[1])
    number = jnp.where(inside, numbers, 0).astype(jnp.int32)
    page = jnp.take_along_axis(page_table[:, None].astype(jnp.int32), number, axis=2)
    first, length = number * page_size, lengths[:, None, None]
    last = jnp.minimum(first + page_size, length) - 1
    q_first, q_last = (jnp.maximum(positions[:, i], 0)[:, None, None] for i in (0, -1))
    area = q_first, q_last, first, jnp.maximum(last, first)
    if mask.heads is None:
        codes = jnp.asarray(mask.coverage(*area))
        is_hidden, is_full = codes == NONE, codes == ALL
    else:
        is_hidden = is_full = jnp.zeros((), bool)
    is_used = inside & (page >= 0) & (first < length) & ~is_hidden
    has_padding = (positions[:, 0] < 0)[:, None, None]
    is_partial = jnp.broadcast_to(~is_full | has_padding, page.shape)
    return jnp.where(is_used, page, -1), number, is_partial


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: StaticCall, inputs: PagedInputs) -> tuple[Array, Array]:
    return _run(call, inputs)


@_attend.defjvp
def _refuse_derivative(*_: Any):
    raise UnsupportedError(
        "paged-gradient",
        "attention over pages has no gradient",
        got="a derivative of paged_attention",
        fix="use xsake.attention on contiguous keys and values, or jax.lax.stop_gradient",
    )


# Jitted here so that calls outside of `jit` compile once.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: StaticCall, inputs: PagedInputs) -> tuple[Array, Array]:
    def attend(platform: str, *arrays: Any) -> tuple[Array, Array]:
        inputs = PagedInputs(*arrays)
        spec = OP.choose(inputs, call.config, platform, call.implementation)
        return spec.load().forward(inputs, call.config, platform)

    return by_platform(*OP.branches(call, attend), *inputs)


def _check_arrays(q: Any, k: Any, v: Any, page_table: Any, lengths: Any, mask: Any) -> None:
    check_sizes(q=q, k_pages=k, v_pages=v, page_table=page_table)
    fits = (
        q.ndim == k.ndim == v.ndim == 4 and page_table.ndim == 2 and min(*q.shape, *k.shape) > 0
        and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
        and q.shape[2] % k.shape[1] == 0 and page_table.shape[0] == q.shape[0]
        and lengths.shape == q.shape[:1]
    )  # fmt: skip
    shapes = {
        "q": q, "k_pages": k, "v_pages": v, "page_table": page_table, "lengths": lengths,
    }  # fmt: skip
    if not fits:
        raise ShapeError(
            "paged-shapes",
            "arrays of a call over pages do not fit together",
            got=", ".join(f"{name} {x.shape}" for name, x in shapes.items()),
            expected="q [B, Tq, Hq, D], k_pages [P, Hk, page, D], v_pages [P, Hk, page, Dv], "
            "page_table [B, N], lengths [B], Hq a multiple of Hk",
            fix="a page holds the tokens of one kv head next to each other: heads come second",
        )
    pool = {k.dtype, v.dtype}
    if q.dtype.name not in FLOATS or pool not in ({q.dtype}, {jnp.dtype(jnp.int8)}):
        raise ShapeError(
            "paged-dtypes",
            "pages must have the dtype of q, or int8",
            got=f"q {q.dtype}, k_pages {k.dtype}, v_pages {v.dtype}",
            expected=f"one of {', '.join(FLOATS)} for all, or int8 pages",
            fix="cast the pages once, when they are created",
        )
    if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in (page_table, lengths)):
        raise ArgumentError(
            "paged-integers",
            "page_table and lengths must be integers",
            got=f"{page_table.dtype} and {lengths.dtype}",
            expected="int32",
        )
    if mask.heads not in (None, 1, k.shape[1], q.shape[2]):
        raise ShapeError(
            "paged-mask-heads",
            "the heads of the mask match neither query nor kv heads",
            got=f"{mask.heads} heads",
            expected=f"1, {k.shape[1]} or {q.shape[2]}",
        )


def _check_pages(numbers: Any, q: Any, k: Any, is_default: bool) -> None:
    fits = numbers.ndim == 3 and numbers.shape[1] in (1, k.shape[1])
    if is_default or (fits and numbers.shape[0] == q.shape[0]):
        return
    raise ShapeError(
        "paged-lists",
        "pages must be lists per kv head, or one list for all",
        got=f"{numbers.dtype} {numbers.shape}",
        expected=f"integers ({q.shape[0]}, {k.shape[1]}, S) or ({q.shape[0]}, 1, S)",
        fix="heads that share a kv head share its list",
    )


def _scales(k: Any, k_scale: Any, v_scale: Any) -> tuple[Any, Any]:
    """Factors of int8 pages, float32 [P, Hk]; None for floats."""
    scales = [None if x is None else jnp.asarray(x) for x in (k_scale, v_scale)]
    expected = k.shape[:2] if k.dtype == jnp.int8 else None
    if any((None if x is None else x.shape) != expected for x in scales):
        raise ShapeError(
            "paged-scales",
            "int8 pages need a factor per page and kv head, and other pages have none",
            got=f"{k.dtype} pages, k_scale {getattr(k_scale, 'shape', None)}, "
            f"v_scale {getattr(v_scale, 'shape', None)}",
            expected="None for both" if expected is None else f"{expected} for both",
        )
    k_scale, v_scale = (None if x is None else x.astype(jnp.float32) for x in scales)
    return k_scale, v_scale
