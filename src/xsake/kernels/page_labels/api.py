"""Scores of pages by labels as an operation: arguments, backends."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from xsake.errors import ShapeError
from xsake.kernels.dispatch import BackendSpec, Implementation, Op, StaticCall
from xsake.kernels.lowering import by_platform
from xsake.kernels.page_labels.types import LabelInputs
from xsake.kernels.validation import no_runtime_typecheck

_PACKAGE = "xsake.kernels.page_labels"
OP = Op(
    BackendSpec.of_native_library(_PACKAGE, "page_labels"),
    BackendSpec("xla", f"{_PACKAGE}.xla", is_portable=True),
)


@no_runtime_typecheck
def label_scores(
    q: Float[Array, "B Hk G R"],
    codes: UInt8[Array, "P Hk R/2 page"],
    factor: Float[Array, "P Hk R"],
    page_table: Int[Array, "B N"],
    lengths: Int[Array, " B"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "B Hk G N"]:
    """Log of the sum of `exp(q.k)` over the keys of each page, by their labels.

    Only pages of the table are read.

    Args:
        q: components of the last query of each sequence that labels hold, times the scale.
        codes: of every page, as `xsake.cache.Labels` makes them.
        factor: of every page, bfloat16.
        page_table: where each page of a sequence lies; negative: it has none.
        lengths: tokens of each sequence.
        implementation: a backend, or several in order of preference; None: the best one.

    Returns:
        float32; -inf for a page without tokens.
    """
    inputs = LabelInputs(
        q.astype(jnp.float32), codes, factor, page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
    )  # fmt: skip
    batch, heads, _, components = q.shape
    if (
        codes.shape[1:3] != (heads, components // 2) or components % 2
        or factor.shape != (codes.shape[0], heads, components)
        or (codes.dtype, factor.dtype) != (jnp.uint8, jnp.bfloat16)
        or page_table.shape[:1] != (batch,) or lengths.shape != (batch,)
    ):  # fmt: skip
        raise ShapeError(
            "label-shapes",
            "arrays of a call that scores pages do not fit together",
            got=", ".join(f"{k} {x.dtype} {x.shape}" for k, x in inputs._asdict().items()),
            expected="q [B, Hk, G, R], codes uint8 [P, Hk, R/2, page], factor bfloat16 [P, Hk, R], "
            "page_table [B, N], lengths [B], R even",
        )
    call = StaticCall(OP.names(implementation), None, LabelInputs)
    OP.check(inputs, None, call.implementation)
    return _run(call, inputs)


# Jitted here so that calls outside of `jit` compile once.
@functools.partial(jax.jit, static_argnums=0)
def _run(call: StaticCall, inputs: LabelInputs) -> Array:
    def score(platform: str, *arrays: Array) -> Array:
        inputs = LabelInputs(*arrays)
        spec = OP.choose(inputs, call.config, platform, call.implementation)
        return spec.load().forward(inputs, call.config, platform)

    return by_platform(*OP.branches(call, score), *inputs)
