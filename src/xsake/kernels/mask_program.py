"""Masks as integer programs on positions, for kernels.

A kernel reads no tables of tokens and knows its head as a scalar only. `trace_mask` partially
evaluates a mask: what does not depend on positions is computed at trace time for every head, the
rest becomes the program, which kernels evaluate by `MaskProgram.allows`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jaxtyping import Bool, Int32

from xsake.layout.numbering import RaggedGrid, quotient
from xsake.masks import AbstractMask
from xsake.masks.algebra import AbstractCombination, Not, PerHead


def _broadcast(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast the operands of an operation that requires equal shapes."""
    return lambda *values: operation(*jnp.broadcast_arrays(*values))


def _compare_signed(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Compare unsigned numbers by way of signed ones in the same order."""

    def sortable(x: Any) -> Any:
        return (x ^ np.uint32(1 << 31)).astype(np.int32) if x.dtype == np.uint32 else x

    return lambda x, y: compare(sortable(x), sortable(y))


_less, _greater = _compare_signed(jnp.less), _compare_signed(jnp.greater)


def _sign(x: Any) -> Any:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _select(which: Any, no: Any, yes: Any) -> Any:
    if no.dtype == bool:
        return (which & yes) | (~which & no)
    return jnp.where(which, yes, no)


# Operations of programs, by the names of their primitives. All of them compile for TPU on int32
# and uint32. What would not (libtpu 0.0.50) is rewritten: selecting between booleans, and the
# minimum of unsigned numbers, also where the compiler itself recognises one in a comparison and a
# selection. The primitive `sign` needs a device to be lowered.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "not": jnp.bitwise_not,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": _less,
    "le": _compare_signed(jnp.less_equal),
    "gt": _greater,
    "ge": _compare_signed(jnp.greater_equal),
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": _sign,
    "min": lambda x, y: jnp.where(_less(x, y), x, y),
    "max": lambda x, y: jnp.where(_greater(x, y), x, y),
    "div": _broadcast(jax.lax.div),
    "rem": _broadcast(jax.lax.rem),
    "shift_left": _broadcast(jax.lax.shift_left),
    "shift_right_arithmetic": _broadcast(jax.lax.shift_right_arithmetic),
    "shift_right_logical": _broadcast(jax.lax.shift_right_logical),
    "population_count": jax.lax.population_count,
    "clz": jax.lax.clz,
    "select_n": _select,
    "to_bool": lambda x: x != 0,
    "to_int32": lambda x: x.astype(np.int32),
    "to_uint32": lambda x: x.astype(np.uint32),
}
DTYPES = ("bool", "int32", "uint32")
# The operations that also take booleans.
ON_BOOLEANS = ("and", "or", "xor", "not", "eq", "ne", "select_n", "to_int32", "to_uint32")


class Term(NamedTuple):
    """What a step reads.

    | kind     | number                               |
    |----------|--------------------------------------|
    | position | 0 for queries, 1 for keys            |
    | constant | the value                            |
    | table    | the row of `MaskProgram.tables`             |
    | step     | the index of an earlier step         |
    """

    kind: str
    number: int
    dtype: str


class ProgramStep(NamedTuple):
    """One elementwise operation of a program."""

    operation: str
    terms: tuple[Term, ...]


@dataclasses.dataclass(frozen=True)
class MaskProgram:
    """A mask as an elementwise program on positions and integers of the head; plain data, hashable.

    Example:
        >>> from xsake.masks import PerHead, Window
        >>> rule = trace_mask(PerHead([Window(3, 0), Window(9, 0)]))
        >>> rule.tables.tolist()
        [[3, 9]]
        >>> bool(rule.allows(jnp.int32(7), jnp.int32(2), [jnp.int32(9)]))
        True
    """

    rows: tuple[tuple[int, ...], ...]  # for each integer its value for every head
    steps: tuple[ProgramStep, ...]  # of the program, each after those it reads
    answer: Term  # result of the program
    heads: int  # number of different heads; 1 if the program is the same for every head

    @property
    def tables(self) -> Int32[np.ndarray, "numbers heads"]:
        """The integers of each head; booleans are 0 and 1, unsigned integers are bits."""
        return np.array(self.rows, np.int32).reshape(len(self.rows), self.heads)

    def of_query_block(
        self, tables: Any, grid: RaggedGrid, q_number: Any
    ) -> Callable[[Array, Array], Array]:
        """`allows` for the head of a query block, with `tables` flat in the memory of a kernel."""
        scalars = lambda: self.scalars(tables, grid, q_number)
        return lambda q_pos, kv_pos: self.allows(q_pos, kv_pos, scalars())

    def scalars(self, tables: Any, grid: RaggedGrid, q_number: Any) -> list[Any]:
        """Integers of the head of a query block."""
        head = 0
        if self.heads > 1:
            head = quotient(grid.q_head(q_number), grid.q_heads // self.heads)
        return [tables[row * self.heads + head] for row in range(len(self.rows))]

    def allows(
        self, q_pos: Int32[Array, "..."], kv_pos: Int32[Array, "..."], scalars: Sequence[Any]
    ) -> Bool[Array, "..."]:
        """Evaluate the mask for one head, by arithmetic that a kernel supports.

        Positions have the same rank and broadcast; `scalars` is the head's column of `tables`.
        """
        done: list[Any] = []
        sources = {"position": (q_pos, kv_pos), "table": scalars, "step": done}

        def value(term: Term) -> Any:
            if term.kind == "constant":
                return np.dtype(term.dtype).type(term.number)
            operand = sources[term.kind][term.number]
            return OPERATIONS[f"to_{term.dtype}"](operand) if term.kind == "table" else operand

        for step in self.steps:
            done.append(OPERATIONS[step.operation](*map(value, step.terms)))
        shape = np.broadcast_shapes(q_pos.shape, kv_pos.shape)
        return jnp.broadcast_to(value(self.answer), shape)


def flat_tables(program: MaskProgram | str | None) -> Int32[np.ndarray, " numbers"]:
    """The integers of a program for every head; at least one, for memory of a fixed size."""
    if isinstance(program, MaskProgram) and program.rows:
        return program.tables.reshape(-1)
    return np.zeros(1, np.int32)


_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_LOOK_UPS = ("gather", "dynamic_slice")
_RESHAPES = ("broadcast_in_dim", "concatenate", "reshape", "squeeze", "transpose")


@functools.lru_cache(maxsize=256)
def trace_mask(mask: AbstractMask) -> MaskProgram | str:
    """The program of a mask, or the reason why no kernel can evaluate it.

    The mask is traced once, with abstract positions. What does not depend on them is computed for
    every head; the rest becomes the program.

    Example:
        >>> from xsake.masks import Causal, FromFunction
        >>> trace_mask(Causal() & FromFunction(lambda q, kv: jnp.sin(q) > 0))
        'the rule of FromFunction(<lambda>) computes with float32'
    """
    try:
        # Nothing here belongs to a caller's mesh, or to what the caller is tracing.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return _trace(mask)
    except _Refused as refused:
        of_parts = (trace_mask(part) for part in _parts(mask))
        reasons = (reason for reason in of_parts if isinstance(reason, str))
        return next(reasons, f"the rule of {mask!r} {refused}")


def _trace(mask: AbstractMask) -> MaskProgram:
    # Several positions on both axes: values that vary inside a tile must not look like constants.
    position = jax.ShapeDtypeStruct((2, 3), np.int32)
    head = None if mask.heads is None else jax.ShapeDtypeStruct((1, 1), np.int32)
    traced = jax.make_jaxpr(mask.allows)(position, position, head)
    inputs: list[Any] = [Term("position", 0, "int32"), Term("position", 1, "int32")]
    split = _Tracer(mask.heads or 1)
    with jax.ensure_compile_time_eval():
        if head is not None:
            heads = np.arange(split.heads, dtype=np.int32)[:, None, None]
            inputs.append(_Constant(jnp.asarray(heads), by_head=True))
        (answer,) = split.run(traced, inputs)
        answer = split.term(answer)
    return MaskProgram(tuple(split.rows), tuple(split.steps), answer, split.heads)


def _parts(mask: AbstractMask) -> Sequence[AbstractMask]:
    if isinstance(mask, AbstractCombination):
        return mask.parts
    if isinstance(mask, PerHead):
        return mask.members
    return (mask.part,) if isinstance(mask, Not) else ()


class _Refused(Exception):
    """A mask that has no program; the message says why."""


class _Constant(NamedTuple):
    """A value without positions in it; its first axis is the head if `by_head`."""

    array: Array
    by_head: bool

    def by_row(self) -> np.ndarray:
        """One row per head, or a single row."""
        array = np.asarray(self.array)
        return array.reshape(array.shape[0] if self.by_head else 1, -1)


class _Reshaped(NamedTuple):
    """Positions in another shape: not supported in programs, but used by look-ups."""


class _Tracer:
    """Interpreter of a mask's jaxpr that collects the rows and steps of its program."""

    def __init__(self, heads: int):
        self.heads = heads
        # Each with its index; repeated rows and steps are shared.
        self.rows: dict[tuple[int, ...], int] = {}
        self.steps: dict[ProgramStep, int] = {}

    def run(self, traced: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a traced function: a `Term`, `_Constant` or `_Reshaped` each."""
        jaxpr = traced.jaxpr
        consts = (_Constant(jnp.asarray(const), by_head=False) for const in traced.consts)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return _Constant(jnp.asarray(atom.val, _aval(atom).dtype), by_head=False)
            return values[atom]

        for equation in jaxpr.eqns:
            outputs = self.outputs(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def outputs(self, equation: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Outputs of one equation of the mask."""
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self.run(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], values)
        if all(isinstance(value, _Constant) for value in values):
            return _evaluate(equation, values)
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
        """Add a step to the program."""
        terms = tuple(self.term(value) for value in values)
        on_booleans = terms[0].dtype == "bool"
        if name not in OPERATIONS or (on_booleans and name not in ON_BOOLEANS):
            raise _Refused(f"uses {name!r}" + " on booleans" * on_booleans)
        if name == "select_n" and not on_booleans:
            raise _Refused("selects by number")
        known = values[-1].by_row() if isinstance(values[-1], _Constant) else None
        if name in ("div", "rem") and known is not None and not known.all():
            raise _Refused("divides by zero")
        if name.startswith("shift"):
            # Further than the word is long, hardware and compilers disagree.
            amount = np.array(-1) if known is None else known
            if amount.min() < 0 or amount.max() > 31:
                raise _Refused("shifts by a number that is not known to be in 0..31")
        step = ProgramStep(name, terms)
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
    """Whether an equation changes nothing but shapes, which programs leave to broadcasting."""
    source, target = _aval(equation.invars[0]), _aval(equation.outvars[0])
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        kept = tuple(range(target.ndim - source.ndim, target.ndim))
        return equation.params["broadcast_dimensions"] == kept
    return name == "copy" or (name == "convert_element_type" and source.dtype == target.dtype)


def _evaluate(equation: JaxprEqn, values: Sequence[_Constant]) -> list[_Constant]:
    """Evaluate an equation for each head."""

    def bind(*arrays: Any):
        outputs = equation.primitive.bind(*arrays, **equation.params)
        return outputs if equation.primitive.multiple_results else [outputs]

    by_head = any(value.by_head for value in values)
    if by_head:
        bind = jax.vmap(bind, in_axes=tuple(0 if value.by_head else None for value in values))
    return [_Constant(output, by_head) for output in bind(*(value.array for value in values))]


def unsupported_mask(program: MaskProgram | str | None, inputs: Any) -> str | None:
    """Why a kernel cannot apply the mask of a block-sparse call; None if it can.

    Precomputed element masks replace a program; they need a static layout and know no positions.
    """
    if not isinstance(program, str):
        return None
    if not inputs.layout.is_static:
        return f"{program}, and a traced layout cannot hold element masks"
    has_positions = inputs.q_positions is not None or inputs.kv_positions is not None
    return f"{program}, and positions are not known before the call" if has_positions else None
