"""The block-sparse operation: one forward and one backward, whichever backend computes them."""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.kernels.block_sparse import reference, xla
from xsake.kernels.block_sparse.problem import Cotangents, Operands, Problem
from xsake.layout import BlockLayout

# Name -> backend. Each has `unsupported`, `passes`, `forward` and `backward`.
BACKENDS: dict[str, ModuleType] = {"xla": xla, "reference": reference}


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is known while tracing; a static layout is the same only if it is the same object."""

    backend: str
    problem: Problem
    layout: BlockLayout | None


def block_sparse(
    operands: Operands,
    problem: Problem,
    *,
    backend: str,
    sinks: Float[Array, "Hq S"] | None = None,
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Attention over the pairs that the layout lists and its mask allows.

    `out = sum_j softmax_j(s) v_j`, `s = softcap(scale * q.k + bias)`; sinks are logits that join
    the denominator and carry no value.

    Args:
        operands: the arrays and the layout.
        problem: the numbers.
        backend: a name of `BACKENDS`.
        sinks: logits of each query head.

    Returns:
        `(out, lse)`, lse being the log of the softmax denominator, sinks included.
    """
    q, k, v, layout, bias, *rest = operands
    static = _Static(backend, problem, layout if layout.is_static else None)
    context = (None if layout.is_static else layout, *rest)
    return _run(static, q, k, v, bias, context, sinks)


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=0)
def _run(static: _Static, q, k, v, bias, context, sinks):
    out, lse = _attend(static, q, k, v, bias, context)
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


def _operands(static: _Static, q, k, v, bias, context) -> Operands:
    layout = context[0] if static.layout is None else static.layout
    return Operands(q, k, v, layout, bias, *context[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q, k, v, bias, context):
    operands = _operands(static, q, k, v, bias, context)
    return BACKENDS[static.backend].forward(operands, static.problem)


def _attend_forward(static: _Static, q, k, v, bias, context):
    out, lse = _attend(static, q, k, v, bias, context)
    return (out, lse), (q, k, v, bias, context, out, lse)


def _attend_backward(static: _Static, saved, cotangents):
    *arrays, out, lse = saved
    operands = _operands(static, *arrays)
    backend = BACKENDS[static.backend]
    gradients = backend.backward(operands, static.problem, out, lse, Cotangents(*cotangents))
    return *gradients, None


_attend.defvjp(_attend_forward, _attend_backward)


def _with_sinks(out, lse, sinks):
    """Let the sinks' logits join a finished softmax: exact, and autodiff does the gradients."""
    sink = jax.nn.logsumexp(sinks.astype(lse.dtype), axis=-1)[None, None]
    empty = lse == -jnp.inf
    safe = jnp.where(empty, 0, lse)
    joint = jnp.where(empty, sink, jnp.logaddexp(safe, sink))
    kept = jnp.where(empty, 0, jnp.exp(safe - joint))
    return (out * kept[..., None].astype(lse.dtype)).astype(out.dtype), joint
