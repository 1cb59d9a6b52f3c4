"""Counts what the passes of a call will compute and move, from its layout and shapes alone."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from xsake.kernels.block_sparse import blocked
from xsake.kernels.block_sparse.problem import Operands, Problem, TileSizes, compute_dtype
from xsake.kernels.block_sparse.walk import Rows, walked_items


@dataclasses.dataclass(frozen=True)
class Pass:
    """One walk over the layout.

    If the layout is known only at run time, `listed` is the most it can list, and flops and bytes
    are for that many blocks.

    Attributes:
        name: "forward", "dQ", "dK/dV", or "backward" where these two are one.
        tiles: what is computed at once; None for a dense implementation.
        listed: blocks the layout lists, over all batch elements and heads.
        computed: blocks really computed, as a short row waits for the longest one of its group;
            None if known only at run time.
        flops: of the matrix products of these blocks.
        bytes_read, bytes_written: between arrays and tiles; what a cache saves is not subtracted.
    """

    name: str
    tiles: TileSizes | None
    listed: int
    computed: int | None
    flops: int
    bytes_read: int
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


def is_known(*arrays) -> bool:
    """Whether values can be read now; neither a tracer's nor an abstract array's can."""
    return not any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in arrays)


def blockwise(
    operands: Operands, problem: Problem, tiles_of: Callable[..., TileSizes]
) -> tuple[Pass, ...]:
    """The passes of a backend that walks rows of query blocks, and kv blocks for dK and dV.

    Args:
        operands: the call; only shapes and dtypes of q, k, v and bias are looked at.
        problem: its numbers.
        tiles_of: `(layout, rows) -> TileSizes`, the backend's own choice.
    """
    layout, size = operands.layout, _sizes(operands)
    batch, q_tokens, q_heads, _ = operands.q.shape
    kv_tokens, kv_heads = operands.k.shape[1:3]
    queries, keys = batch * q_heads * q_tokens, batch * kv_heads * kv_tokens
    pairs = layout.block_q * layout.block_kv

    tiles = problem.tiles or tiles_of(layout, batch * q_heads * layout.q_blocks)
    listed, computed = _listed(operands), _rows_of_queries(operands, tiles)
    blocks = listed if computed is None else computed
    per_block = layout.block_kv * (size.k + size.v) + pairs * size.bias
    forward = Pass(
        "forward",
        tiles,
        listed,
        computed,
        blocks * pairs * (size.key + size.value),
        blocks * per_block + queries * size.q,
        queries * (size.out + size.row),
    )
    d_q = Pass(
        "dQ",
        tiles,
        listed,
        computed,
        blocks * pairs * (2 * size.key + size.value),
        blocks * (per_block + pairs * size.bias) + queries * (size.q + size.out + 2 * size.row),
        queries * size.q + blocks * pairs * size.bias,
    )
    tiles = problem.tiles or tiles_of(layout, batch * kv_heads * layout.kv_blocks)
    computed = _rows_of_keys(operands, tiles)
    blocks = listed if computed is None else computed
    per_block = layout.block_q * (size.q + size.out + 2 * size.row) + pairs * size.bias
    d_kv = Pass(
        "dK/dV",
        tiles,
        listed,
        computed,
        blocks * pairs * 2 * (size.key + size.value),
        blocks * per_block + keys * (size.k + size.v),
        keys * (size.k + size.v),
    )
    return forward, d_q, d_kv


def dense(operands: Operands) -> tuple[Pass, ...]:
    """The passes of a backend that computes every pair, in planes of logits in memory."""
    size, layout = _sizes(operands), operands.layout
    batch, q_tokens, q_heads, _ = operands.q.shape
    kv_tokens = operands.k.shape[1]
    pairs = batch * q_heads * q_tokens * kv_tokens
    blocks = batch * q_heads * layout.q_blocks * layout.kv_blocks
    listed = _listed(operands)
    queries, keys = batch * q_heads * q_tokens, batch * q_heads * kv_tokens
    arrays = queries * size.q + keys * (size.k + size.v)
    planes = pairs * (size.row + size.bias)
    return (
        Pass(
            "forward",
            None,
            listed,
            blocks,
            pairs * (size.key + size.value),
            arrays + planes,
            queries * (size.out + size.row) + planes,
        ),
        Pass(
            "backward",
            None,
            listed,
            blocks,
            pairs * (3 * size.key + 2 * size.value),
            arrays + queries * (size.out + 2 * size.row) + 2 * planes,
            arrays + 2 * planes,
        ),
    )


def _sizes(operands: Operands) -> _Sizes:
    wide, own = np.dtype(compute_dtype(operands)).itemsize, np.dtype(operands.q.dtype).itemsize
    dim, value_dim = operands.k.shape[-1], operands.v.shape[-1]
    bias = 0 if operands.bias is None else np.dtype(operands.bias.dtype).itemsize
    return _Sizes(
        key=2 * dim,
        value=2 * value_dim,
        q=dim * wide,
        k=dim * own,
        v=value_dim * own,
        out=value_dim * wide,
        row=wide,
        bias=bias,
    )


def _listed(operands: Operands) -> int:
    """Blocks the layout lists over all batch elements and query heads, or at most lists."""
    layout = operands.layout
    batch, q_heads = operands.q.shape[0], operands.q.shape[2]
    copies = (batch // layout.batch) * (q_heads // layout.heads)
    if is_known(layout.row_starts):
        return int(layout.row_starts[-1]) * copies
    every = batch * q_heads * layout.q_blocks * layout.kv_blocks
    return min(layout.capacity * copies, every)


def _rows_of_queries(operands: Operands, tiles: TileSizes) -> int | None:
    """Blocks that the forward and the dQ pass compute."""
    layout = operands.layout
    if not is_known(*jax.tree.leaves(layout)):
        return None
    lists = blocked.row_lists(layout, operands.q.shape[0], operands.q.shape[2])
    return walked_items(lists.rows, tiles)


def _rows_of_keys(operands: Operands, tiles: TileSizes) -> int | None:
    """Blocks that the dK/dV pass computes."""
    layout = operands.layout
    if not is_known(*jax.tree.leaves(layout)):
        return None
    q_heads, kv_heads = operands.q.shape[2], operands.k.shape[2]
    transposed = layout.transpose(kv_heads, q_heads)
    rows = blocked.column_lists(transposed, operands.k.shape[0], kv_heads).rows
    repeats = q_heads // kv_heads // transposed.group
    return walked_items(Rows(rows.start, rows.partial * repeats, rows.full * repeats), tiles)
