"""Block-sparse attention as an operation: one forward, one backward, several backends."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

# `tuning` adds a setting to the key of a trace, so it is imported before one begins.
from xsake.kernels import online_softmax, tuning  # noqa: F401
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, Gradients
from xsake.kernels.dispatch import (
    MOSAIC_RELEASES,
    BackendSpec,
    Implementation,
    Op,
    StaticCall,
    backward_given_lse,
    define_attention,
)
from xsake.kernels.sharding import vary_alike
from xsake.layout import BlockLayout

_PACKAGE = "xsake.kernels.block_sparse"
OP = Op(
    BackendSpec("mosaic_gpu_hopper", f"{_PACKAGE}.mosaic_gpu.hopper", ("cuda",), MOSAIC_RELEASES),
    BackendSpec("mosaic_gpu", f"{_PACKAGE}.mosaic_gpu.ampere", ("cuda",), MOSAIC_RELEASES),
    BackendSpec("mosaic_tpu", f"{_PACKAGE}.mosaic_tpu.kernels", ("tpu",), MOSAIC_RELEASES),
    BackendSpec.of_native_library(_PACKAGE, "forward"),
    BackendSpec("xla", f"{_PACKAGE}.xla.kernels"),
    BackendSpec("reference", f"{_PACKAGE}.reference", is_on_request=True, is_portable=True),
)
_attend = define_attention(OP)
_add_sinks = jax.jit(online_softmax.add_sinks)


@dataclasses.dataclass(frozen=True)
class _Call(StaticCall):
    """Static part of a call; a traced layout is part of the context instead."""

    layout: BlockLayout | None

    def inputs(self, arrays: Any, context: Any) -> BlockSparseInputs:
        """See `StaticCall`."""
        (q, k, v, bias), (layout, *rest) = arrays, context
        layout = layout if self.layout is None else self.layout
        return BlockSparseInputs(q, k, v, layout, bias, *rest)


def block_sparse(
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    *,
    implementation: Implementation = None,
    sinks: Float[Array, "Hq S"] | None = None,
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Attention over the pairs that the layout lists and its mask allows.

    `o = sum_j softmax_j(s) v_j`, `s = softcap(scale * q.k + bias)`; sinks are logits that join the
    denominator and carry no value.

    Args:
        inputs: arrays and layout.
        config: numbers.
        implementation: a backend of `OP`, or several in order of preference, which run or raise;
            None: the best for the platform that the call is compiled for.
        sinks: logits of each query head.

    Returns:
        `(o, lse)`; lse is the log of the softmax denominator, sinks included.
    """
    call, arrays, context = _split(inputs, config, implementation)
    arrays, context, sinks = vary_alike((arrays, context, sinks))
    o, lse = _attend(call, arrays, context)
    return (o, lse) if sinks is None else _add_sinks(o, lse, sinks)


def block_sparse_backward(
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    o: Float[Array, "B Tq Hq Dv"],
    lse: Float[Array, "B Tq Hq"],
    do: Float[Array, "B Tq Hq Dv"],
    dlse: Float[Array, "B Tq Hq"],
    *,
    implementation: Implementation = None,
) -> Gradients:
    """Gradients of a call whose keys are a part of those that `o` and `lse` were computed over."""
    call, arrays, context = _split(inputs, config, implementation)
    return backward_given_lse(OP, call, arrays, context, o, lse, do, dlse)


def _split(inputs: BlockSparseInputs, config: BlockSparseConfig, implementation: Implementation):
    """Split a call into its static part, differentiable arrays and context."""
    q, k, v, layout, bias, *rest = inputs
    names = OP.names(implementation)
    call = _Call(names, config, BlockSparseInputs, layout if layout.is_static else None)
    context = (None if layout.is_static else layout, *rest)
    OP.check(inputs, config, names)
    return call, (q, k, v, bias), context
