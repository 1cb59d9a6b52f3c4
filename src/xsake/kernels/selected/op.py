"""The selected operation: one forward and one backward, whichever backend computes them."""

import functools
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from xsake.errors import ArgumentError
from xsake.kernels.selected import reference, xla
from xsake.kernels.selected.problem import Cotangents, Gradients, Operands, Problem


@runtime_checkable
class Backend(Protocol):
    """What a backend's module offers; each serves every call on every platform."""

    def forward(self, operands: Operands, problem: Problem) -> tuple[Any, Any]:
        """`(out, lse)`."""
        ...

    def backward(
        self, operands: Operands, problem: Problem, out: Any, lse: Any, cotangents: Cotangents
    ) -> Gradients:
        """Gradients from the saved results."""
        ...


# Best first.
BACKENDS: dict[str, Backend] = {"xla": xla, "reference": reference}


def selected(
    operands: Operands, problem: Problem, *, implementation: str | None = None
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Attention of every query over the keys of its own blocks, up to its own position.

    `out = sum_j softmax_j(scale * q.k_j) v_j`; the query heads of a kv head share their blocks.
    A query without a key gets zeros, lse -inf, and no gradient.

    Args:
        operands: the arrays; see there for what may be in the lists.
        problem: the numbers.
        implementation: a name of `BACKENDS`; None picks the first.

    Returns:
        `(out, lse)`, lse being the log of the softmax denominator.
    """
    q, k, v, *context = operands
    return _run((_named(implementation), problem), q, k, v, tuple(context))


def _named(name: str | None) -> str:
    if name is not None and name not in BACKENDS:
        raise ArgumentError(
            "no such implementation",
            got=repr(name),
            expected=" or ".join(map(repr, BACKENDS)),
            fix="pass implementation=None to let xsake pick",
        )
    return next(iter(BACKENDS)) if name is None else name


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=0)
def _run(static: tuple[str, Problem], q, k, v, context):
    return _attend(static, q, k, v, context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: tuple[str, Problem], q, k, v, context):
    name, problem = static
    return BACKENDS[name].forward(Operands(q, k, v, *context), problem)


def _attend_forward(static, q, k, v, context):
    out, lse = _attend(static, q, k, v, context)
    return (out, lse), (q, k, v, context, out, lse)


def _attend_backward(static, saved, cotangents):
    name, problem = static
    q, k, v, context, out, lse = saved
    operands = Operands(q, k, v, *context)
    found = BACKENDS[name].backward(operands, problem, out, lse, Cotangents(*cotangents))
    return *found, None


_attend.defvjp(_attend_forward, _attend_backward)
