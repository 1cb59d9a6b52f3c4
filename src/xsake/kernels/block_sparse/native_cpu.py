"""Block-sparse attention by the native kernels of the distribution `xsake-cpu`.

The kernels read arrays in place, compute listed blocks and nothing else, and work in XLA's own
threads. Few queries over many keys are computed by their decode kernel.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels import native_library
from xsake.kernels.batching import fold_batch
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, Gradients
from xsake.kernels.mask_program import MaskProgram, flat_tables, trace_mask, unsupported_mask
from xsake.layout import BlockLayout
from xsake.layout.numbering import RaggedGrid, build_mask_blocks, flat_items

MAX_DECODE_ROWS = 64  # queries of a kv head that one read of a key serves


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if config.tiles is not None:
        return "its tiles follow from the shapes"
    for name, x in (("q", inputs.q), ("bias", inputs.bias)):
        if x is not None and x.dtype.name not in native_library.DTYPES:
            return f"it computes in float32, and {name} is {x.dtype.name}"
    return unsupported_mask(_program(inputs.layout), inputs)


def forward(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return fold_batch(functools.partial(_forward, config), inputs)


def backward(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients for q, k, v and bias from (o, lse, do, dlse)."""
    return Gradients(*fold_batch(functools.partial(_backward, config), inputs, *residuals))


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes: no block is computed that is not listed."""
    known = cost.is_known(*jax.tree.leaves(inputs.layout))
    listed = cost.count_blocks(inputs) if known else None
    schedule = cost.ScheduleCost(tiles=None, computed=listed)
    return cost.blockwise(inputs, schedule, schedule, widens=False, one_pass=True)


def is_decode(inputs: BlockSparseInputs) -> bool:
    """Whether a read of a key serves few queries; shapes alone decide."""
    q_tokens, q_heads = inputs.q.shape[1:3]
    rows = q_tokens * q_heads // inputs.k.shape[2]
    return rows <= MAX_DECODE_ROWS and 2 * q_tokens <= inputs.k.shape[1]


def _forward(config: BlockSparseConfig, inputs: BlockSparseInputs) -> tuple[Array, Array]:
    q, v = inputs.q, inputs.v
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )
    o, lse = _call("decode" if is_decode(inputs) else "forward", inputs, config, (), results)
    return o, lse


def _backward(config: BlockSparseConfig, inputs: BlockSparseInputs, *residuals: Array):
    q, k, v, _, bias, *_ = inputs
    o, lse, do, dlse = residuals
    shape = (0,) * 4 if bias is None else bias.shape
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = (like(q), like(k), like(v), jax.ShapeDtypeStruct(shape, jnp.float32))
    arrays = o, lse.astype(jnp.float32), do.astype(q.dtype), dlse.astype(jnp.float32)
    dq, dk, dv, dbias = _call("backward", inputs, config, arrays, results)
    return dq, dk, dv, None if bias is None else dbias.astype(bias.dtype)


def _call(
    name: str,
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    residuals: tuple[Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> Sequence[Array]:
    layout, mask = inputs.layout, _element_masks(inputs)
    or_empty = native_library.or_empty
    operands = (
        inputs.q, inputs.k, inputs.v, *layout_lists(layout), mask.tables, mask.blocks, mask.index,
        or_empty(inputs.bias, 4, inputs.q.dtype), *(or_empty(x, 2, np.int32) for x in inputs[5:]),
        *residuals,
    )  # fmt: skip
    return native_library.call(
        name, operands, results,
        sizes=native_library.sizes_of(inputs.q, inputs.v) | {
            "block_q": layout.block_q,
            "block_kv": layout.block_kv,
            "program_steps": mask.num_steps,
        },
        scale=np.float32(config.scale), softcap=np.float32(config.softcap or 0),
        block_q=layout.block_q, block_kv=layout.block_kv,
        layout_batch=layout.batch, layout_heads=layout.heads,
        program=mask.program, program_heads=mask.program_heads,
    )  # fmt: skip


def layout_lists(layout: BlockLayout) -> tuple[Any, Any, Any]:
    """Row starts, kv blocks, and whether each is partial."""
    return layout.row_starts, layout.kv_block, layout.is_partial


class _ElementMasks(NamedTuple):
    """The rule of partial blocks: a program with its integers, or precomputed blocks."""

    program: np.ndarray  # encoded; empty without a program
    num_steps: int
    program_heads: int
    tables: np.ndarray
    blocks: np.ndarray
    index: np.ndarray


def _element_masks(inputs: BlockSparseInputs) -> _ElementMasks:
    layout, program = inputs.layout, _program(inputs.layout)
    empty = np.zeros((0, layout.block_q, layout.block_kv), np.uint8), np.zeros(0, np.int32)
    if not isinstance(program, str):
        return _ElementMasks(*native_library.encode(program), flat_tables(program), *empty)
    grid = RaggedGrid.of(layout, inputs.q.shape, inputs.k.shape)
    blocks = _mask_blocks(layout, grid)
    return _ElementMasks(*native_library.encode(None), flat_tables(None), *blocks)


@functools.lru_cache(maxsize=16)
def _mask_blocks(layout: BlockLayout, grid: RaggedGrid) -> tuple[np.ndarray, np.ndarray]:
    """Element masks of a static layout's partial blocks, and the mask of each item."""
    assert layout.mask is not None
    sizes = layout.block_q, layout.block_kv
    blocks, index = build_mask_blocks(layout.mask, flat_items(layout, grid), grid, sizes, False)
    return blocks.astype(np.uint8), index


def _program(layout: BlockLayout) -> MaskProgram | str | None:
    return None if layout.mask is None else trace_mask(layout.mask)
