"""Build the function of a case, its abstract arguments and its cost."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.certify.case import CompileCase
from xsake.certify.record import PassCost
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.layout import BlockLayout
from xsake.layout.synthetic import ragged_grid
from xsake.masks import Causal

_PASS_NAMES = {"forward": "forward", "dq": "dQ", "dkv": "dK/dV"}


class BuiltCase(NamedTuple):
    """Function to compile, abstract arguments and cost."""

    run: Callable[..., Any]
    arguments: tuple
    cost: PassCost


def build(case: CompileCase, kernels: ModuleType, platform: str) -> BuiltCase:
    """Build the function of a case; a static layout is a constant, a traced one an argument.

    Args:
        case: to build.
        kernels: a block-sparse backend with `forward`, `dq_pass`, `dkv_pass` and `count_passes`.
        platform: argument of `count_passes`.
    """
    problem = BlockSparseConfig(scale=case.head_dim**-0.5, tiles=case.tiles)
    layout = build_layout(case)
    traced_layout = jax.tree.map(_abstract, layout.traced()) if case.traced else None

    def make_operands(traced_layout: BlockLayout | None, q, k, v) -> BlockSparseInputs:
        return BlockSparseInputs(q, k, v, layout if traced_layout is None else traced_layout)

    def run(traced_layout: BlockLayout | None, q, k, v, *residuals):
        operands = make_operands(traced_layout, q, k, v)
        if case.pass_name == "forward":
            return kernels.forward(operands, problem, platform)
        out, lse, *cotangents = residuals
        gradient = {"dq": kernels.dq_pass, "dkv": kernels.dkv_pass}
        return gradient[case.pass_name](operands, problem, out, lse, *cotangents)

    arrays = _arrays(case)
    counted = kernels.count_passes(make_operands(traced_layout, *arrays[:3]), problem, platform)
    arguments = (traced_layout, *arrays)
    arrays_moved = jax.tree.leaves((arguments, jax.eval_shape(run, *arguments)))
    min_bytes = sum(x.size * x.dtype.itemsize for x in arrays_moved)
    return BuiltCase(run, arguments, _find_cost(counted, _PASS_NAMES[case.pass_name], min_bytes))


def build_layout(case: CompileCase) -> BlockLayout:
    """Build the static layout of a case; cached, as the passes of one problem share it."""
    return _layout(case.tokens, case.block, case.budget, case.q_heads, case.seed)


@contextlib.contextmanager
def override_constants(constants: dict[str, int]) -> Iterator[None]:
    """Override module constants temporarily; used by controls to disable a safeguard."""
    with contextlib.ExitStack() as undo:
        for path, value in constants.items():
            module_name, _, name = path.rpartition(".")
            module = importlib.import_module(module_name)
            if not hasattr(module, name):
                raise ArgumentError("Unknown constant.", got=path)
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def head_budget_range(heads: int, blocks: int, mean: float) -> tuple[float, float]:
    """Return the smallest and largest head budget: 10% and 90%, narrowed to allow the mean.

    The minimum of a head is its diagonal.
    """
    diagonal = 2 / (blocks + 1)
    low = max(0.1 if mean >= 0.2 else mean / 5, diagonal)
    return low, min(0.9, low + heads * (mean - low) / 2)


@functools.lru_cache(maxsize=2)
def _layout(tokens: int, block: int, budget: float, heads: int, seed: int) -> BlockLayout:
    if budget == 1:
        return BlockLayout.from_mask(Causal(), q_tokens=tokens, block_q=block, block_kv=block)
    blocks = -(-tokens // block)
    low, high = head_budget_range(heads, blocks, budget)
    grid = ragged_grid(heads, blocks, budget, seed=seed, low=low, high=high)
    return BlockLayout.from_block_mask(
        grid, q_tokens=tokens, kv_tokens=tokens, block_q=block, block_kv=block, mask=Causal()
    )


def _arrays(case: CompileCase) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return abstract q, k, v, and for gradients out, lse and the cotangents of both."""
    dtype = jnp.dtype(case.dtype)
    q = jax.ShapeDtypeStruct((1, case.tokens, case.q_heads, case.head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, case.tokens, case.kv_heads, case.head_dim), dtype)
    lse = jax.ShapeDtypeStruct((1, case.tokens, case.q_heads), jnp.float32)
    return (q, k, k) if case.pass_name == "forward" else (q, k, k, q, lse, q, lse)


def _abstract(array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _find_cost(counted: tuple, name: str, least_bytes: int) -> PassCost:
    cost = next(one for one in counted if one.name == name)
    fields = PassCost.model_fields.keys() - {"least_bytes"}
    return PassCost(least_bytes=least_bytes, **{field: getattr(cost, field) for field in fields})
