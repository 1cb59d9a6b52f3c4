"""The pooled operation: one forward and one backward, whichever backend computes them."""

import functools
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError
from xsake.kernels.pooled import reference, xla
from xsake.kernels.pooled.problem import Cotangents, Gradients, Operands, Problem
from xsake.kernels.varying import vary_alike


@runtime_checkable
class Backend(Protocol):
    """What a backend's module offers; each serves every call on every platform."""

    def forward(self, operands: Operands, problem: Problem) -> tuple[Any, Any, Any]:
        """`(out, lse, blocks)`."""
        ...

    def backward(
        self, operands: Operands, problem: Problem, out: Any, lse: Any, cotangents: Cotangents
    ) -> Gradients:
        """Gradients from the saved results."""
        ...


# Best first.
BACKENDS: dict[str, Backend] = {"xla": xla, "reference": reference}


def pooled(
    operands: Operands, problem: Problem, *, implementation: str | None = None
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"], Int[Array, "B Tq Hk Ns"] | None]:
    """Attention of every query over the summaries that it sees, and the blocks that it chooses.

    `out = sum_i p_i v_i` with `p = softmax(scale * q.k)`; a block's score is the sum of `p` over
    the summaries that overlap it, as often as their strides lie in it, and over the query heads of
    a kv head, which share their blocks. A query that sees no summary gets zeros, lse -inf, and no
    gradient. No gradient flows through the choice.

    Args:
        operands: the arrays; see there for who sees what.
        problem: the numbers.
        implementation: a name of `BACKENDS`; None picks the first.

    Returns:
        `(out, lse, blocks)`: lse is the log of the softmax denominator; blocks are best first,
        -1 in slots that are not used, or None if none were asked for.
    """
    q, k, v, *context = operands
    return _run((_named(implementation), problem), *vary_alike((q, k, v, tuple(context))))


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
    out, lse, blocks = _attend(static, q, k, v, context)
    return (out, lse, blocks), (q, k, v, context, out, lse)


def _attend_backward(static, saved, cotangents):
    name, problem = static
    q, k, v, context, out, lse = saved
    operands = Operands(q, k, v, *context)
    found = BACKENDS[name].backward(operands, problem, out, lse, Cotangents(*cotangents[:2]))
    return *found, None


_attend.defvjp(_attend_forward, _attend_backward)
