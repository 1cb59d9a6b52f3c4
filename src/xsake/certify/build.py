"""Build the function of a case, its abstract arguments and its cost."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.certify.family import TargetFamily
from xsake.certify.record import CompileCase, PassCost
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs
from xsake.kernels.selected import chunking
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.layout import BlockLayout
from xsake.layout.synthetic import ragged_grid
from xsake.masks import Causal

_PASS_NAMES = {"forward": "forward", "dq": "dQ", "dkv": "dK/dV"}


class BuiltCase(NamedTuple):
    """Function to compile, abstract arguments and cost."""

    run: Callable[..., Any]
    arguments: tuple
    cost: PassCost


def build_for_family(case: CompileCase, family: TargetFamily) -> BuiltCase:
    """Build the function of a case with the kernels of a family."""
    if case.pass_name == "paged_decode":
        kernels = importlib.import_module(family.PAGED_KERNELS)
        return build_paged(case, kernels, family.PLATFORM)
    if case.slots is not None:
        return build_selected(case, importlib.import_module(family.SELECTED_KERNELS))
    return build(case, importlib.import_module(family.KERNELS), family.PLATFORM)


def build(case: CompileCase, kernels: ModuleType, platform: str) -> BuiltCase:
    """Build the function of a case; a static layout is a constant, a traced one an argument.

    Args:
        case: to build.
        kernels: a block-sparse backend with `forward`, `dq_pass`, `dkv_pass` and `count_passes`.
        platform: argument of `count_passes`.
    """
    config = BlockSparseConfig(scale=case.head_dim**-0.5, tiles=case.tiles)
    layout = build_layout(case)
    traced_layout = (
        jax.tree.map(lambda x: _array(*x.shape, dtype=x.dtype), layout.traced())
        if case.traced
        else None
    )

    def make_inputs(traced_layout: BlockLayout | None, q, k, v) -> BlockSparseInputs:
        return BlockSparseInputs(q, k, v, layout if traced_layout is None else traced_layout)

    def run(traced_layout: BlockLayout | None, q, k, v, *residuals):
        inputs = make_inputs(traced_layout, q, k, v)
        if case.pass_name == "forward":
            return kernels.forward(inputs, config, platform)
        gradient = kernels.dq_pass if case.pass_name == "dq" else kernels.dkv_pass
        return gradient(inputs, config, *residuals)

    q = _array(1, case.tokens, case.q_heads, case.head_dim, dtype=case.dtype)
    k = _array(1, case.tokens, case.kv_heads, case.head_dim, dtype=case.dtype)
    lse = _array(1, case.tokens, case.q_heads)
    residuals = () if case.pass_name == "forward" else (q, lse, q, lse)  # o, lse, do, dlse
    arguments = (traced_layout, q, k, k, *residuals)
    counted = kernels.count_passes(make_inputs(traced_layout, q, k, k), config, platform)
    cost = next(one for one in counted if one.name == _PASS_NAMES[case.pass_name])
    fields = PassCost.model_fields.keys() - {"least_bytes"}
    moved = _count_bytes((arguments, jax.eval_shape(run, *arguments)))
    return BuiltCase(
        run, arguments, PassCost(least_bytes=moved, **{x: getattr(cost, x) for x in fields})
    )


def build_selected(case: CompileCase, kernels: ModuleType) -> BuiltCase:
    """Build one launch of selected attention over a chunk of queries, for one kv head.

    Block lists are arguments: XLA takes minutes to compile their construction for a TPU, and the
    kernels do not depend on their contents.

    Args:
        case: to build, with slots.
        kernels: a backend of selected attention with `visit_forward`, `visit_backward`, `TUNING`.
    """
    config, dtype = SelectedConfig(case.block, case.head_dim**-0.5), jnp.dtype(case.dtype)
    is_forward = case.pass_name == "selected_forward"
    q = _array(1, case.tokens, case.q_heads, case.head_dim, dtype=dtype)
    k = _array(1, case.tokens, case.kv_heads, case.head_dim, dtype=dtype)
    blocks = _array(1, case.tokens, case.kv_heads, case.slots, dtype=jnp.int32)
    sizes = chunking.chunk_sizes(SelectedInputs(q, k, k, blocks), config, kernels.TUNING)

    def run(chunk, tiles, *rest):
        parts = chunking.Chunk(*chunk), chunking.QueryTiles(*tiles)
        call = chunking.ChunkTiles(sizes, config, dtype, False, *parts)
        if is_forward:
            return kernels.visit_forward(call, chunking.PartialSoftmax(*rest[0]))
        residuals, sums = chunking.ChunkResiduals(*rest[0]), chunking.TileGradients(*rest[1])
        return kernels.visit_backward(call, residuals, sums)

    arguments = _selected_arguments(case, sizes)
    read, written = (_count_bytes(x) for x in (arguments, jax.eval_shape(run, *arguments)))
    products = 2 if is_forward else 5
    cost = PassCost(
        listed=sizes.capacity, computed=None, launches=kernels.LAUNCHES[case.pass_name],
        steps=sizes.slots, balance=None,
        flops=2 * products * sizes.capacity * sizes.rows * case.block * case.head_dim,
        bytes_read=read, bytes_written=written, least_bytes=read + written,
    )  # fmt: skip
    return BuiltCase(run, arguments, cost)


def _selected_arguments(case: CompileCase, sizes: chunking.ChunkSizes) -> tuple:
    """Return abstract arrays: chunk, tiles and the operands of the pass."""
    dim, queries = case.head_dim, sizes.chunk + 1
    integers = functools.partial(_array, dtype=jnp.int32)
    kv = _array(-(-case.tokens // case.block), case.block, dim)
    rows = _array(queries, sizes.group * dim, dtype=case.dtype)
    chunk = rows, integers(queries), kv, kv
    tiles = (
        integers(sizes.capacity, sizes.tile), integers(sizes.capacity), integers(),
        integers(sizes.chunk, case.slots),
    )  # fmt: skip
    acc = _array(sizes.slots, sizes.rows, dim)
    if case.pass_name == "selected_forward":
        line = _array(sizes.slots, sizes.rows)
        return chunk, tiles, (acc, line, line)
    line = _array(queries, sizes.group)
    return chunk, tiles, (_array(queries, sizes.group * dim), line, line), (acc, kv, kv)


def build_paged(case: CompileCase, kernels: ModuleType, platform: str) -> BuiltCase:
    """Build attention of the last queries of one sequence over lists of its pages.

    Args:
        case: to build, with `q_tokens` and slots.
        kernels: a backend of attention over pages with `forward` and `make_sizes`.
        platform: argument of `forward`.
    """
    assert case.q_tokens is not None and case.slots is not None
    config = PagedConfig(case.head_dim**-0.5, None, Causal())
    integers = functools.partial(_array, dtype=jnp.int32)
    q = _array(1, case.q_tokens, case.q_heads, case.head_dim, dtype=case.dtype)
    num_pages = -(-case.tokens // case.block)
    kv = _array(
        num_pages, case.kv_heads, case.block, case.head_dim,
        dtype="int8" if case.is_int8 else case.dtype,
    )  # fmt: skip
    lists = 1, case.kv_heads, case.slots
    scale = _array(num_pages, case.kv_heads) if case.is_int8 else None
    arguments = PagedInputs(
        q, kv, kv, integers(*lists), integers(*lists), _array(*lists, dtype=bool),
        integers(1, case.q_tokens), integers(1), scale, scale,
    )  # fmt: skip

    def run(*arrays):
        return kernels.forward(PagedInputs(*arrays), config, platform)

    sizes = kernels.make_sizes(arguments)
    listed = case.kv_heads * case.slots
    pages = 2 * listed * case.block * case.head_dim * kv.dtype.itemsize
    # Of the pool, only the listed pages are read.
    read = pages + _count_bytes((q, arguments[3:8]))
    written = _count_bytes(jax.eval_shape(run, *arguments))
    pairs = listed * case.block * case.q_tokens * case.q_heads // case.kv_heads
    cost = PassCost(
        listed=listed, computed=listed, launches=1,
        steps=case.kv_heads * sizes.tiles * sizes.splits * sizes.steps, balance=None,
        flops=4 * pairs * case.head_dim, bytes_read=read, bytes_written=written,
        least_bytes=read + written,
    )  # fmt: skip
    return BuiltCase(run, arguments, cost)


def _array(*shape: int | None, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _count_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


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
                raise ArgumentError("constant", "Unknown constant.", got=path)
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
