"""The block-sparse operation: one forward and one backward, whichever backend computes them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.kernels.block_sparse import reference, xla
from xsake.kernels.block_sparse.cost import Pass
from xsake.kernels.block_sparse.problem import Cotangents, Gradients, Operands, Problem
from xsake.kernels.later import Later
from xsake.kernels.platforms import Branch, Refusal, by_platform
from xsake.kernels.varying import vary_alike
from xsake.layout import BlockLayout


@runtime_checkable
class Backend(Protocol):
    """What a backend's module offers."""

    def platforms(self) -> tuple[str, ...] | None:
        """The only platforms it runs on; None if it runs everywhere."""
        ...

    def unsupported(self, operands: Operands, problem: Problem, platform: str) -> str | None:
        """Why it cannot serve a call on one of its platforms; None if it can."""
        ...

    def passes(self, operands: Operands, problem: Problem, platform: str) -> tuple[Pass, ...]:
        """What forward and backward will compute."""
        ...

    def forward(self, operands: Operands, problem: Problem) -> tuple[Any, Any]:
        """`(out, lse)`."""
        ...

    def backward(
        self, operands: Operands, problem: Problem, out: Any, lse: Any, cotangents: Cotangents
    ) -> Gradients:
        """Gradients from the saved results."""
        ...


# Best first.
BACKENDS: dict[str, Backend] = {
    "mosaic_gpu_hopper": Later("xsake.kernels.block_sparse.mosaic_gpu_hopper"),
    "mosaic_gpu": Later("xsake.kernels.block_sparse.mosaic_gpu"),
    "mosaic_tpu": Later("xsake.kernels.block_sparse.mosaic_tpu"),
    "xla": xla,
    "reference": reference,
}

# (platform, backend or why there is none) for every platform; the last pair is for all others.
type Choice = tuple[tuple[str, str | Refusal], ...]


@dataclasses.dataclass(frozen=True)
class _Static:
    """The arguments that are known while tracing: the key of the compiled program."""

    choice: Choice
    problem: Problem
    layout: BlockLayout | None


def block_sparse(
    operands: Operands,
    problem: Problem,
    *,
    backend: str | Choice,
    sinks: Float[Array, "Hq S"] | None = None,
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Attention over the pairs that the layout lists and its mask allows.

    `out = sum_j softmax_j(s) v_j`, `s = softcap(scale * q.k + bias)`; sinks are logits that join
    the denominator and carry no value.

    Args:
        operands: the arrays and the layout.
        problem: the numbers.
        backend: a name of `BACKENDS`, or one for each platform.
        sinks: logits of each query head.

    Returns:
        `(out, lse)`, lse being the log of the softmax denominator, sinks included.
    """
    q, k, v, layout, bias, *rest = operands
    choice = (("every", backend),) if isinstance(backend, str) else backend
    static = _Static(choice, problem, layout if layout.is_static else None)
    context = (None if layout.is_static else layout, *rest)
    return _run(static, *vary_alike((q, k, v, bias, context, sinks)))


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=0)
def _run(static: _Static, q, k, v, bias, context, sinks):
    out, lse = _attend(static, q, k, v, bias, context)
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


def _operands(static: _Static, q, k, v, bias, context) -> Operands:
    layout = context[0] if static.layout is None else static.layout
    return Operands(q, k, v, layout, bias, *context[1:])


def _dispatch(choice: Choice, run: Callable[..., Any], *arrays):
    """`run(backend, *arrays)` with the backend of the platform that the code is lowered for."""
    names = list(dict.fromkeys(name for _, name in choice))
    branches: list[Branch] = [
        name if isinstance(name, Refusal) else functools.partial(run, BACKENDS[name])
        for name in names
    ]
    if len(branches) == 1 and not isinstance(branches[0], Refusal):
        return branches[0](*arrays)
    *pairs, (_, others) = [(platform, branches[names.index(name)]) for platform, name in choice]
    return by_platform(dict(pairs), others, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q, k, v, bias, context):
    def forward(backend: Backend, *arrays):
        return backend.forward(_operands(static, *arrays), static.problem)

    return _dispatch(static.choice, forward, q, k, v, bias, context)


def _attend_forward(static: _Static, q, k, v, bias, context):
    out, lse = _attend(static, q, k, v, bias, context)
    return (out, lse), (q, k, v, bias, context, out, lse)


def _attend_backward(static: _Static, saved, cotangents):
    def backward(backend: Backend, arrays, out, lse, cotangents):
        operands = _operands(static, *arrays)
        return backend.backward(operands, static.problem, out, lse, Cotangents(*cotangents))

    *arrays, out, lse = saved
    gradients = _dispatch(static.choice, backward, arrays, out, lse, cotangents)
    return *gradients, None


_attend.defvjp(_attend_forward, _attend_backward)


def sink_lse(sinks: Float[Array, "Hq S"]) -> Float[Array, " Hq"]:
    """Log-sum-exp of a head's sinks; a sink of -inf is none, and has gradient 0."""
    exists = sinks != -jnp.inf
    peak = jnp.where(exists, sinks, -jnp.inf).max(-1)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    powers = jnp.where(exists, jnp.exp(jnp.where(exists, sinks, 0) - peak[:, None]), 0)
    mass, is_some = powers.sum(-1), exists.any(-1)
    return jnp.where(is_some, peak + jnp.log(jnp.where(is_some, mass, 1)), -jnp.inf)


def _with_sinks(out, lse, sinks):
    """Let the sinks' logits join a finished softmax: exact, and autodiff does the gradients."""
    sink = sink_lse(sinks.astype(lse.dtype))[None, None]
    empty = lse == -jnp.inf
    safe = jnp.where(empty, 0, lse)
    joint = jnp.where(empty, sink, jnp.logaddexp(safe, sink))
    kept = jnp.where(empty, 0, jnp.exp(safe - joint))
    return (out.astype(lse.dtype) * kept[..., None]).astype(out.dtype), joint
