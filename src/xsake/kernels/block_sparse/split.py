"""Splits a mask's rule into integers per head, computed now, and a formula for inside a kernel.

A kernel reads no tables of tokens and knows its head only as a scalar, so that formulas are
elementwise integer arithmetic and nothing else. Knows no backend.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from xsake.kernels.block_sparse.rule import DTYPES, ON_BOOLEANS, OPERATIONS, Rule, Step, Term
from xsake.masks import AbstractMask
from xsake.masks.algebra import AbstractCombination, AbstractHeadList, Not

_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_LOOK_UPS = ("gather", "dynamic_slice")
_RESHAPES = ("broadcast_in_dim", "concatenate", "reshape", "squeeze", "transpose")


@functools.lru_cache(maxsize=256)
def split_rule(mask: AbstractMask) -> Rule | str:
    """The rule of a mask, or the reason why no kernel can evaluate it.

    The mask is asked once, about positions that stay unknown. What it computes without them is
    computed for every head; the rest becomes the formula.

    Args:
        mask: any mask, a user's own included.

    Returns:
        A `Rule`, or a sentence that names the part at fault.

    Example:
        >>> from xsake.masks import Causal, FromFunction
        >>> split_rule(Causal() & FromFunction(lambda q, kv: jnp.sin(q) > 0))
        'the rule of FromFunction(<lambda>) computes with float32'
    """
    try:
        # Nothing here belongs to a caller's mesh, or to what the caller is tracing.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return _split(mask)
    except _Refused as refused:
        of_parts = (split_rule(part) for part in _parts(mask))
        reasons = (reason for reason in of_parts if isinstance(reason, str))
        return next(reasons, f"the rule of {mask!r} {refused}")


def _split(mask: AbstractMask) -> Rule:
    # Several positions on both axes: values that vary inside a tile must not look like constants.
    position = jax.ShapeDtypeStruct((2, 3), np.int32)
    head = None if mask.heads is None else jax.ShapeDtypeStruct((1, 1), np.int32)
    traced = jax.make_jaxpr(mask.allows)(position, position, head)
    inputs: list[Any] = [Term("position", 0, "int32"), Term("position", 1, "int32")]
    split = _Split(mask.heads or 1)
    with jax.ensure_compile_time_eval():
        if head is not None:
            heads = np.arange(split.heads, dtype=np.int32)[:, None, None]
            inputs.append(_Known(jnp.asarray(heads), by_head=True))
        (answer,) = split.run(traced, inputs)
        answer = split.term(answer)
    return Rule(tuple(split.rows), tuple(split.steps), answer, split.heads)


def _parts(mask: AbstractMask) -> Sequence[AbstractMask]:
    if isinstance(mask, AbstractCombination):
        return mask.parts
    if isinstance(mask, AbstractHeadList):
        return mask.members
    return (mask.part,) if isinstance(mask, Not) else ()


class _Refused(Exception):
    """Tells what a rule does that a formula cannot."""


class _Known(NamedTuple):
    """A value without positions in it; its first axis is the head if `by_head`."""

    array: Array
    by_head: bool

    def by_row(self) -> np.ndarray:
        """One row per head, or a single row."""
        array = np.asarray(self.array)
        return array.reshape(array.shape[0] if self.by_head else 1, -1)


class _Reshaped(NamedTuple):
    """Positions in another shape: no formula has them, but look-ups make them on their way."""


class _Split:
    """Walks through what a mask computes and gathers the rows and steps of its rule."""

    def __init__(self, heads: int):
        self.heads = heads
        # Each with its index; a row or step that the mask repeats is found again.
        self.rows: dict[tuple[int, ...], int] = {}
        self.steps: dict[Step, int] = {}

    def run(self, traced: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a traced function: a `Term`, `_Known` or `_Reshaped` each."""
        jaxpr = traced.jaxpr
        consts = (_Known(jnp.asarray(const), by_head=False) for const in traced.consts)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return _Known(jnp.asarray(atom.val, _aval(atom).dtype), by_head=False)
            return values[atom]

        for equation in jaxpr.eqns:
            outputs = self.outputs(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def outputs(self, equation: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """What one operation of the mask gives."""
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self.run(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], values)
        if all(isinstance(value, _Known) for value in values):
            return _computed(equation, values)
        dtype = _aval(equation.outvars[0]).dtype.name
        if name in _LOOK_UPS:
            raise _Refused("looks positions up in a table")
        if dtype not in DTYPES:
            raise _Refused(f"computes with {dtype}")
        if _is_copy(equation):
            return values
        if name in _RESHAPES:
            return [_Reshaped()]
        if name == "convert_element_type":
            return [self.step(f"to_{dtype}", dtype, *values)]
        if name == "integer_pow" and params["y"] > 0:
            product = lambda x, y: self.step("mul", dtype, x, y)
            return [functools.reduce(product, values * params["y"])]
        if name == "clamp":
            least, value, most = values
            return [self.step("min", dtype, self.step("max", dtype, value, least), most)]
        return [self.step(name, dtype, *values)]

    def step(self, name: str, dtype: str, *values: Any) -> Term:
        """Adds a step to the formula."""
        terms = tuple(self.term(value) for value in values)
        on_booleans = terms[0].dtype == "bool"
        if name not in OPERATIONS or (on_booleans and name not in ON_BOOLEANS):
            raise _Refused(f"uses {name!r}" + " on booleans" * on_booleans)
        if name == "select_n" and not on_booleans:
            raise _Refused("selects by number")
        if (
            name in ("div", "rem")
            and isinstance(values[1], _Known)
            and not values[1].by_row().all()
        ):
            raise _Refused("divides by zero")
        if name.startswith("shift"):
            # Further than the word is long, hardware and compilers disagree.
            amount = values[1].by_row() if isinstance(values[1], _Known) else np.array(-1)
            if amount.min() < 0 or amount.max() > 31:
                raise _Refused("shifts by a number that is not known to be in 0..31")
        step = Step(name, terms)
        return Term("step", self.steps.setdefault(step, len(self.steps)), dtype)

    def term(self, value: Any) -> Term:
        """A value as steps read it: one number for all positions, or one per position."""
        if isinstance(value, Term):
            return value
        if isinstance(value, _Reshaped):
            raise _Refused("gives positions another shape")
        dtype = value.array.dtype.name
        if dtype not in DTYPES:
            raise _Refused(f"computes with {dtype}")
        rows = value.by_row()
        if not (rows == rows[:, :1]).all():
            raise _Refused(f"reads an array of {rows.shape[1]} numbers")
        numbers = rows[:, 0]
        if (numbers == numbers[0]).all():
            return Term("constant", int(numbers[0]), dtype)
        row = tuple(numbers.astype(np.int32).tolist())
        return Term("table", self.rows.setdefault(row, len(self.rows)), dtype)


def _aval(atom: Any) -> Any:
    """Shape and dtype; JAX types them as any kind of value, not as an array's."""
    return atom.aval


def _is_copy(equation: JaxprEqn) -> bool:
    """Whether an operation changes nothing, shapes aside, which formulas leave to broadcasting."""
    source, target = _aval(equation.invars[0]), _aval(equation.outvars[0])
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        kept = tuple(range(target.ndim - source.ndim, target.ndim))
        return equation.params["broadcast_dimensions"] == kept
    return name == "copy" or (name == "convert_element_type" and source.dtype == target.dtype)


def _computed(equation: JaxprEqn, values: Sequence[_Known]) -> list[_Known]:
    """What an operation gives for each head."""

    def bind(*arrays):
        outputs = equation.primitive.bind(*arrays, **equation.params)
        return outputs if equation.primitive.multiple_results else [outputs]

    by_head = any(value.by_head for value in values)
    if by_head:
        bind = jax.vmap(bind, in_axes=tuple(0 if value.by_head else None for value in values))
    return [_Known(output, by_head) for output in bind(*(value.array for value in values))]
