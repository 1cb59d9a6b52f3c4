"""Block-sparse attention in plain XLA loops that compute listed blocks and nothing else.

`forward_pass.py` and the dq pass loop over rows of query blocks, the dk and dv pass over rows of kv
blocks of the transposed layout, so every sum has one owner and one order. Groups of rows are small
on CPUs, whose cache is the limit, and as large as memory allows elsewhere. On a CPU few queries are
computed by `decode.py`, short sequences by `dense.py`.
"""

import functools

from jax import Array

from xsake.kernels import tuning
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import (
    BlockSparseConfig,
    BlockSparseInputs,
    Gradients,
    TileSizes,
)
from xsake.kernels.block_sparse.xla import backward_pass, decode, dense, forward_pass
from xsake.kernels.block_sparse.xla.tiles import cut_call

# Scores per step. Measured on 2 cores with 2 MB of L2 each: 12 rows of 128 x 512 are fastest, a
# quarter of that loses 20% to dispatch, four times that loses 10% to memory.
CPU_TILE_SCORES = 12 * 128 * 512
CPU_TILE_KEYS = 512
ACCELERATOR_TILE_SCORES = 2**24


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call: it serves every call."""
    return None


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    if dense.is_dense(inputs, config, platform):
        return dense.forward(inputs, config)
    sizes = _row_sizes(inputs, config, platform)
    if decode.is_decode(inputs, platform):
        return decode.forward(inputs, config, sizes)
    return forward_pass.forward(inputs, config, sizes)


def backward(
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    platform: str,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array,
) -> Gradients:
    """Gradients for q, k, v and bias; the probabilities of the listed blocks are recomputed."""
    if dense.is_dense(inputs, config, platform):
        return dense.backward(inputs, config, o, lse, do, dlse)
    call = cut_call(inputs, config)
    queries = backward_pass.cut_queries(call, o, lse, do, dlse)
    one_pass = _is_one_pass(inputs, platform)
    batch, _, kv_heads, _ = inputs.k.shape
    num_rows = (1 if one_pass else batch) * kv_heads * inputs.layout.kv_blocks
    sizes = (
        _row_sizes(inputs, config, platform),
        config.tiles or _sizes(inputs, inputs.layout, num_rows, platform),
    )
    return backward_pass.backward(call, queries, sizes, one_pass=one_pass)


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes."""
    if dense.is_dense(inputs, config, platform):
        return cost.dense(inputs)
    sizes = functools.partial(_sizes, inputs, platform=platform)
    one_pass = _is_one_pass(inputs, platform)
    sets = inputs.q.shape[0] if one_pass else 1
    schedules = cost.grouped_rows(inputs, config, sizes, sets=sets)
    counts = cost.blockwise(inputs, *schedules, widens=True, one_pass=one_pass)
    if decode.is_decode(inputs, platform):
        return decode.count_forward(inputs, schedules[0].tiles), *counts[1:]
    return counts


def default_sizes(layout, rows: int, platform: str) -> TileSizes:
    """Tile sizes of a platform.

    Many groups of rows, so that their lengths stay close, but no group of fewer than four rows if
    there are more.
    """
    if platform == "cpu":
        scores, blocks = CPU_TILE_SCORES, max(1, CPU_TILE_KEYS // layout.block_kv)
    else:
        scores, blocks = ACCELERATOR_TILE_SCORES, 1
    fitting = scores // (layout.block_q * layout.block_kv * blocks)
    return TileSizes(max(1, min(fitting, rows, max(4, rows // 16))), blocks)


def _sizes(inputs: BlockSparseInputs, layout, rows: int, platform: str) -> TileSizes:
    """Pinned tile sizes, or the default ones."""
    where = "cpu" if platform == "cpu" else "accelerator"
    q = inputs.q
    pinned = tuning.pinned_sizes(layout, rows, where, q.dtype.name, q.shape[-1])
    return pinned or default_sizes(layout, rows, platform)


def _row_sizes(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str) -> TileSizes:
    """Tile sizes of a pass over rows of query blocks."""
    rows = inputs.q.shape[0] * inputs.q.shape[2] * inputs.layout.q_blocks
    return config.tiles or _sizes(inputs, inputs.layout, rows, platform)


def _is_one_pass(inputs: BlockSparseInputs, platform: str) -> bool:
    """Whether dq is summed in the pass over kv blocks: batch elements are computed apart then."""
    return platform == "cpu" and inputs.bias is None
