"""From a case to the function that is compiled, its abstract arguments and its counted cost."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.certify.case import Case
from xsake.certify.record import Cost
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.problem import Cotangents, Operands, Problem
from xsake.layout import BlockLayout
from xsake.layout.synthetic import ragged_grid
from xsake.masks import Causal

_PASS_NAMES = {"forward": "forward", "dq": "dQ", "dkv": "dK/dV"}


class Built(NamedTuple):
    """What there is to compile, and what it would do."""

    run: Callable[..., Any]
    arguments: tuple
    cost: Cost


def build(case: Case, kernels: ModuleType, platform: str) -> Built:
    """The function of a case: a static layout is part of it, a traced one is an argument.

    Args:
        case: what to build.
        kernels: a block-sparse backend with `forward`, `query_gradient`, `key_value_gradient` and
            `passes`.
        platform: what `passes` calls the platform.
    """
    problem = Problem(scale=case.head_dim**-0.5, tiles=case.tiles)
    layout = layout_of(case)
    given = jax.tree.map(_abstract, layout.traced()) if case.traced else None

    def operands_of(given: BlockLayout | None, q, k, v) -> Operands:
        return Operands(q, k, v, layout if given is None else given)

    def run(given: BlockLayout | None, q, k, v, *saved):
        operands = operands_of(given, q, k, v)
        if case.pass_name == "forward":
            return kernels.forward(operands, problem)
        out, lse, *wanted = saved
        gradient = {"dq": kernels.query_gradient, "dkv": kernels.key_value_gradient}
        return gradient[case.pass_name](operands, problem, out, lse, Cotangents(*wanted))

    arrays = _arrays(case)
    counted = kernels.passes(operands_of(given, *arrays[:3]), problem, platform)
    arguments = (given, *arrays)
    moved = jax.tree.leaves((arguments, jax.eval_shape(run, *arguments)))
    least = sum(x.size * x.dtype.itemsize for x in moved)
    return Built(run, arguments, _cost(counted, _PASS_NAMES[case.pass_name], least))


def layout_of(case: Case) -> BlockLayout:
    """The static layout of a case; the passes over one problem share it."""
    return _layout(case.tokens, case.block, case.budget, case.q_heads, case.seed)


@contextlib.contextmanager
def replaced(constants: dict[str, int]) -> Iterator[None]:
    """Numbers of modules replaced for a while, which is how a control takes a safeguard away."""
    with contextlib.ExitStack() as undo:
        for place, value in constants.items():
            module_name, _, name = place.rpartition(".")
            module = importlib.import_module(module_name)
            if not hasattr(module, name):
                raise ArgumentError("There is no such number.", got=place)
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def head_range(heads: int, blocks: int, mean: float) -> tuple[float, float]:
    """Smallest and largest head budget: 10% and 90%, drawn in where the mean does not allow that.

    No head can have less than its diagonal, and a mean near the lower end leaves few heads at the
    upper one.
    """
    diagonal = 2 / (blocks + 1)
    low = max(0.1 if mean >= 0.2 else mean / 5, diagonal)
    return low, min(0.9, low + heads * (mean - low) / 2)


@functools.lru_cache(maxsize=2)
def _layout(tokens: int, block: int, budget: float, heads: int, seed: int) -> BlockLayout:
    if budget == 1:
        return BlockLayout.from_mask(Causal(), q_tokens=tokens, block_q=block, block_kv=block)
    blocks = -(-tokens // block)
    low, high = head_range(heads, blocks, budget)
    grid = ragged_grid(heads, blocks, budget, seed=seed, low=low, high=high)
    return BlockLayout.from_block_mask(
        grid, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block, mask=Causal()
    )


def _arrays(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, and for gradients out, lse and the cotangents of both."""
    dtype = jnp.dtype(case.dtype)
    q = jax.ShapeDtypeStruct((1, case.tokens, case.q_heads, case.head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, case.tokens, case.kv_heads, case.head_dim), dtype)
    lse = jax.ShapeDtypeStruct((1, case.tokens, case.q_heads), jnp.float32)
    return (q, k, k) if case.pass_name == "forward" else (q, k, k, q, lse, q, lse)


def _abstract(array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _cost(counted: tuple, name: str, least_bytes: int) -> Cost:
    found = next(one for one in counted if one.name == name)
    own = Cost.model_fields.keys() - {"least_bytes"}
    return Cost(least_bytes=least_bytes, **{field: getattr(found, field) for field in own})
