"""The selected operation: one forward and one backward, whichever backend computes them."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels.later import Later
from xsake.kernels.platforms import Branch, Refusal, by_platform
from xsake.kernels.selected import reference, xla
from xsake.kernels.selected.problem import Cotangents, Gradients, Operands, Problem
from xsake.kernels.varying import vary_alike


@runtime_checkable
class Backend(Protocol):
    """What a backend's module offers."""

    def platforms(self) -> tuple[str, ...] | None:
        """The only platforms it runs on; None if it runs everywhere."""
        ...

    def unsupported(self, operands: Operands) -> str | None:
        """Why it cannot serve a call on one of its platforms; None if it can."""
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
    "mosaic_gpu": Later("xsake.kernels.selected.mosaic_gpu"),
    "mosaic_tpu": Later("xsake.kernels.selected.mosaic_tpu"),
    "xla": xla,
    "reference": reference,
}


def selected(
    operands: Operands, problem: Problem, *, implementation: str | None = None
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Attention of every query over the keys of its own blocks, up to its own position.

    `out = sum_j softmax_j(scale * q.k_j) v_j`; the query heads of a kv head share their blocks.
    A query without a key gets zeros, lse -inf, and no gradient.

    Args:
        operands: the arrays; see there for what may be in the lists.
        problem: the numbers.
        implementation: a name of `BACKENDS`, which runs or raises; None picks for the platform
            that the call is compiled for.

    Returns:
        `(out, lse)`, lse being the log of the softmax denominator.
    """
    _check(operands, implementation)
    q, k, v, *context = operands
    return _run((implementation, problem), *vary_alike((q, k, v, tuple(context))))


def _check(operands: Operands, name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ArgumentError(
            "no such implementation",
            got=repr(name),
            expected=" or ".join(map(repr, BACKENDS)),
            fix="pass implementation=None to let xsake pick",
        )
    reason = None if name is None else BACKENDS[name].unsupported(operands)
    if reason is not None:
        raise UnsupportedError(
            f"the implementation {name!r} cannot serve this call",
            got=reason,
            fix="pass implementation=None to let xsake pick",
        )


def _dispatch(name: str | None, run: Callable[..., Any], operands: Operands, *rest) -> Any:
    """`run(backend, operands, *rest)` with the backend of the platform it is lowered for."""
    named: dict[str, Branch] = {}
    for other, backend in BACKENDS.items():
        own = backend.platforms()
        if own is not None and name in (None, other) and backend.unsupported(operands) is None:
            named |= dict.fromkeys(own, functools.partial(run, backend))
    if not named:
        return run(BACKENDS["xla" if name is None else name], operands, *rest)
    others: Branch = functools.partial(run, BACKENDS["xla"])
    if name is not None:
        others = Refusal(
            f"the implementation {name!r} cannot serve this call on this platform",
            f"it runs on {' and '.join(named)} only",
            "pass implementation=None to let xsake pick",
        )
    return by_platform(named, others, tuple(operands), *rest)


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=0)
def _run(static: tuple[str | None, Problem], q, k, v, context):
    return _attend(static, q, k, v, context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: tuple[str | None, Problem], q, k, v, context):
    name, problem = static

    def forward(backend: Backend, operands):
        return backend.forward(Operands(*operands), problem)

    return _dispatch(name, forward, Operands(q, k, v, *context))


def _attend_forward(static, q, k, v, context):
    out, lse = _attend(static, q, k, v, context)
    return (out, lse), (q, k, v, context, out, lse)


def _attend_backward(static, saved, cotangents):
    name, problem = static
    q, k, v, context, out, lse = saved

    def backward(backend: Backend, operands, out, lse, cotangents):
        return backend.backward(Operands(*operands), problem, out, lse, Cotangents(*cotangents))

    operands = Operands(q, k, v, *context)
    return *_dispatch(name, backward, operands, out, lse, tuple(cotangents)), None


_attend.defvjp(_attend_forward, _attend_backward)
