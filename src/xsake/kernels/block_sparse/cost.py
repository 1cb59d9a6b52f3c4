"""Cost of the passes of a call, from its layout and shapes alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xsake.kernels import blocking
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, TileSizes
from xsake.kernels.row_loop import RowTable, count_items
from xsake.kernels.validation import sum_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleCost:
    """Cost of one schedule of a backend."""

    tiles: Any  # TileSizes; None for a dense implementation
    # Blocks really computed, as a short row waits for the longest of its group; None: known at run
    # time only, as for `balance`
    computed: int | None
    launches: int | None = None  # of kernels; None where the compiler makes its own
    steps: int | None = None  # groups of blocks of these kernels; at most, if known at run time
    balance: float | None = None  # steps of the busiest core over their mean
    cores: int = 2  # that share the steps
    # Blocks if every head's row were as long as the longest of any head, over those that there are;
    # None if not counted
    padded: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost(ScheduleCost):
    """Cost of one pass over the layout.

    If the layout is known only at run time, `listed` is the most it can list, and flops and bytes
    are for that many blocks.
    """

    name: str  # "forward", "dQ", "dK/dV", or "backward" where these two are one
    listed: int  # blocks the layout lists, over all batch elements and heads
    flops: int  # of the matrix products of the computed blocks
    bytes_read: int  # between arrays and tiles; what a cache saves is not subtracted
    bytes_written: int


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of one token and flops of one pair."""

    key: int  # flops of one product over D, for one pair
    value: int  # the same over Dv
    q: int  # bytes of a query as the loops read it
    k: int
    v: int
    out: int  # bytes of an output token, or of its cotangent as the loops read it
    row: int  # bytes of one statistic per query
    bias: int  # bytes of one pair's bias


def is_known(*arrays: Any) -> bool:
    """Whether values can be read now; neither a tracer's nor an abstract array's can."""
    return not any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in arrays)


def blockwise(
    inputs: BlockSparseInputs,
    by_query: ScheduleCost,
    by_key: ScheduleCost,
    *,
    widens: bool,
    one_pass: bool = False,
) -> tuple[KernelCost, ...]:
    """Cost of the passes over rows of query blocks, and of kv blocks for dk and dv.

    `widens`: queries are read in the dtype that tiles are computed in. `one_pass`: dq is summed in
    the pass over kv blocks.
    """
    layout, size = inputs.layout, _sizes(inputs, widens)
    batch, q_tokens, q_heads, _ = inputs.q.shape
    kv_tokens, kv_heads = inputs.k.shape[1:3]
    queries, keys = batch * q_heads * q_tokens, batch * kv_heads * kv_tokens
    pairs = layout.block_q * layout.block_kv
    listed = count_blocks(inputs)

    def count(
        name: str,
        schedule: ScheduleCost,
        flops: int,
        per_block: int,
        per_row: int,
        written: int,
        written_by_block: int = 0,
    ) -> KernelCost:
        blocks = listed if schedule.computed is None else schedule.computed
        return KernelCost(
            **vars(schedule),
            name=name,
            listed=listed,
            flops=blocks * pairs * flops,
            bytes_read=blocks * per_block + per_row,
            bytes_written=written + blocks * written_by_block,
        )

    bias = pairs * size.bias
    key_block = layout.block_kv * (size.k + size.v) + bias
    query_block = layout.block_q * (size.q + size.out + 2 * size.row) + bias
    key_bytes = keys * (size.k + size.v)
    q_bytes, sums = queries * size.q, layout.block_q * size.q
    rows, out = queries * (size.q + size.out + 2 * size.row), queries * (size.out + size.row)
    key, value = size.key, size.value
    forward = count("forward", by_query, key + value, key_block, q_bytes, out)
    if one_pass:
        moved = query_block + sums, key_bytes, key_bytes + q_bytes, sums
        return forward, count("backward", by_key, 3 * key + 2 * value, *moved)
    return (
        forward,
        count("dQ", by_query, 2 * key + value, key_block + bias, rows, q_bytes, bias),
        count("dK/dV", by_key, 2 * (key + value), query_block, key_bytes, key_bytes),
    )


def grouped_rows(
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    tiles_of: Callable[..., TileSizes],
    *,
    sets: int = 1,
) -> tuple[ScheduleCost, ScheduleCost]:
    """`(by_query, by_key)` of a backend that computes rows in groups of about equal length.

    `tiles_of(layout, rows)` is the backend's own choice; `sets` equal parts of the rows of kv
    blocks are computed separately.
    """
    layout = inputs.layout
    batch, _, q_heads, _ = inputs.q.shape
    queries = config.tiles or tiles_of(layout, batch * q_heads * layout.q_blocks)
    rows = batch * inputs.k.shape[2] * layout.kv_blocks
    keys = config.tiles or tiles_of(layout, rows // sets)
    return (
        ScheduleCost(tiles=queries, computed=_rows_of_queries(inputs, queries)),
        ScheduleCost(tiles=keys, computed=_rows_of_keys(inputs, keys, sets)),
    )


def dense(inputs: BlockSparseInputs) -> tuple[KernelCost, ...]:
    """The passes of a backend that computes every pair, in planes of logits in memory."""
    size, layout = _sizes(inputs, True), inputs.layout
    batch, q_tokens, q_heads, _ = inputs.q.shape
    kv_tokens = inputs.k.shape[1]
    pairs = batch * q_heads * q_tokens * kv_tokens
    blocks = batch * q_heads * layout.q_blocks * layout.kv_blocks
    listed = count_blocks(inputs)
    queries, keys = batch * q_heads * q_tokens, batch * q_heads * kv_tokens
    arrays = queries * size.q + keys * (size.k + size.v)
    planes = pairs * (size.row + size.bias)
    known: dict[str, Any] = {"tiles": None, "computed": blocks, "listed": listed}
    return (
        KernelCost(
            **known,
            name="forward",
            flops=pairs * (size.key + size.value),
            bytes_read=arrays + planes,
            bytes_written=queries * (size.out + size.row) + planes,
        ),
        KernelCost(
            **known,
            name="backward",
            flops=pairs * (3 * size.key + 2 * size.value),
            bytes_read=arrays + queries * (size.out + 2 * size.row) + 2 * planes,
            bytes_written=arrays + 2 * planes,
        ),
    )


def _sizes(inputs: BlockSparseInputs, widens: bool) -> _Sizes:
    wide, own = np.dtype(sum_dtype(inputs.q.dtype)).itemsize, np.dtype(inputs.q.dtype).itemsize
    read = wide if widens else own
    dim, value_dim = inputs.k.shape[-1], inputs.v.shape[-1]
    bias = 0 if inputs.bias is None else np.dtype(inputs.bias.dtype).itemsize
    return _Sizes(
        2 * dim, 2 * value_dim, dim * read, dim * own, value_dim * own, value_dim * read, wide, bias
    )


def count_blocks(inputs: BlockSparseInputs) -> int:
    """Blocks the layout lists over all batch elements and query heads, or at most lists."""
    layout = inputs.layout
    batch, q_heads = inputs.q.shape[0], inputs.q.shape[2]
    copies = (batch // layout.batch) * (q_heads // layout.heads)
    if is_known(layout.row_starts):
        return int(np.asarray(layout.row_starts)[-1]) * copies
    every = batch * q_heads * layout.q_blocks * layout.kv_blocks
    return min(layout.capacity * copies, every)


def _rows_of_queries(inputs: BlockSparseInputs, tiles: TileSizes) -> int | None:
    """Blocks that the forward and the dQ pass compute."""
    layout = inputs.layout
    if not is_known(*jax.tree.leaves(layout)):
        return None
    lists = blocking.list_rows(layout, inputs.q.shape[0], inputs.q.shape[2])
    return count_items(lists.rows, tiles)


def _rows_of_keys(inputs: BlockSparseInputs, tiles: TileSizes, sets: int) -> int | None:
    """Blocks that the pass over kv blocks computes."""
    layout = inputs.layout
    if not is_known(*jax.tree.leaves(layout)):
        return None
    q_heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    transposed = layout.transpose(kv_heads, q_heads)
    rows = blocking.list_columns(transposed, inputs.k.shape[0], kv_heads).rows
    repeats = q_heads // kv_heads // transposed.group
    rows = RowTable(rows.start, rows.partial * repeats, rows.full * repeats)
    return count_items(rows, tiles, sets)
