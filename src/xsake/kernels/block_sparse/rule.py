"""What is left of a mask inside a kernel: a short formula on positions and integers of the head."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32


def _alike(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that wants equal shapes, for shapes that broadcast."""
    return lambda *values: operation(*jnp.broadcast_arrays(*values))


def _ordered(compare: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison by order, of unsigned numbers by way of signed ones in the same order."""

    def sortable(x: Any) -> Any:
        return (x ^ np.uint32(1 << 31)).astype(np.int32) if x.dtype == np.uint32 else x

    return lambda x, y: compare(sortable(x), sortable(y))


_less, _greater = _ordered(jnp.less), _ordered(jnp.greater)


def _sign(x: Any) -> Any:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _chosen(which: Any, no: Any, yes: Any) -> Any:
    if no.dtype == bool:
        return (which & yes) | (~which & no)
    return jnp.where(which, yes, no)


# What formulas consist of, by the names of the primitives they stand for. All of it compiles for
# TPU on int32 and uint32. What would not (libtpu 0.0.50) takes a detour: selecting between
# booleans, and the minimum of unsigned numbers, also where the compiler itself finds one in a
# comparison and a selection. The primitive `sign` needs a device to be lowered.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "not": jnp.bitwise_not,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": _less,
    "le": _ordered(jnp.less_equal),
    "gt": _greater,
    "ge": _ordered(jnp.greater_equal),
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": _sign,
    "min": lambda x, y: jnp.where(_less(x, y), x, y),
    "max": lambda x, y: jnp.where(_greater(x, y), x, y),
    "div": _alike(jax.lax.div),
    "rem": _alike(jax.lax.rem),
    "shift_left": _alike(jax.lax.shift_left),
    "shift_right_arithmetic": _alike(jax.lax.shift_right_arithmetic),
    "shift_right_logical": _alike(jax.lax.shift_right_logical),
    "population_count": jax.lax.population_count,
    "clz": jax.lax.clz,
    "select_n": _chosen,
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
    | table    | the row of `Rule.tables`             |
    | step     | the index of an earlier step         |
    """

    kind: str
    number: int
    dtype: str


class Step(NamedTuple):
    """One elementwise operation of a formula."""

    operation: str
    terms: tuple[Term, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A mask as a formula on positions and on integers of the head; plain data, hashable.

    Args:
        rows: for each integer its value for every head.
        steps: the formula, each step after those it reads.
        answer: what the formula gives.
        heads: number of heads the rule tells apart; 1 if it is the same for every head.

    Example:
        >>> from xsake.kernels.block_sparse.split import split_rule
        >>> from xsake.masks import PerHead, Window
        >>> rule = split_rule(PerHead([Window(3, 0), Window(9, 0)]))
        >>> rule.tables.tolist()
        [[3, 9]]
        >>> bool(rule.allows(jnp.int32(7), jnp.int32(2), [jnp.int32(9)]))
        True
    """

    rows: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    answer: Term
    heads: int

    @property
    def tables(self) -> Int32[np.ndarray, "numbers heads"]:
        """The integers of each head; truth values are 0 and 1, unsigned numbers are bits."""
        return np.array(self.rows, np.int32).reshape(len(self.rows), self.heads)

    def allows(
        self, q_pos: Int32[Array, "..."], kv_pos: Int32[Array, "..."], scalars: Sequence[Any]
    ) -> Bool[Array, "..."]:
        """What the mask answers for one head, by arithmetic that a kernel can do.

        Args:
            q_pos: query positions.
            kv_pos: key positions, of the same rank; both broadcast.
            scalars: the head's column of `tables`, each an int32 of rank 0.

        Returns:
            Booleans of the shape the positions broadcast to.
        """
        done: list[Any] = []
        sources = {"position": (q_pos, kv_pos), "table": scalars, "step": done}

        def value(term: Term) -> Any:
            if term.kind == "constant":
                return np.dtype(term.dtype).type(term.number)
            found = sources[term.kind][term.number]
            return OPERATIONS[f"to_{term.dtype}"](found) if term.kind == "table" else found

        for step in self.steps:
            done.append(OPERATIONS[step.operation](*map(value, step.terms)))
        shape = np.broadcast_shapes(q_pos.shape, kv_pos.shape)
        return jnp.broadcast_to(value(self.answer), shape)
