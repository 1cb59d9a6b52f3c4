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
        launches: kernels that are launched; None where the compiler makes its own of it.
        steps: groups of blocks that these kernels take; at most, if known only at run time.
        balance: steps of the busiest core over their mean; None if known at run time only.
        cores: how many cores share the steps for `balance`; two unless told.
        padded: how many times more blocks there would be if every head's row were as long as the
            longest one of any head; None if known only at run time, or if nobody asked.
    """

    name: str
    tiles: TileSizes | None
    listed: int
    computed: int | None
    flops: int
    bytes_read: int
    bytes_written: int
    launches: int | None = None
    steps: int | None = None
    balance: float | None = None
    cores: int = 2
    padded: float | None = None


@dataclasses.dataclass(frozen=True)
class Walked:
    """How a backend walks one list.

    Attributes:
        tiles: what it computes at once.
        computed: blocks it computes; None if known only at run time.
        fetches_all: whether it also reads the blocks that it computes in vain.
        launches, steps, balance, cores, padded: as in `Pass`.
    """

    tiles: TileSizes
    computed: int | None
    fetches_all: bool
    launches: int | None = None
    steps: int | None = None
    balance: float | None = None
    cores: int = 2
    padded: float | None = None


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
    operands: Operands,
    by_query: Walked,
    by_key: Walked,
    *,
    widens: bool,
    is_one_pass: bool = False,
) -> tuple[Pass, ...]:
    """The passes of a backend that walks rows of query blocks, and kv blocks for dK and dV.

    Args:
        operands: the call; only shapes and dtypes of q, k, v and bias are looked at.
        by_query, by_key: how the two lists are walked.
        widens: whether queries are read in the dtype that tiles are computed in.
        is_one_pass: whether dQ is summed, block by block, in the pass over kv blocks.
    """
    layout, size = operands.layout, _sizes(operands, widens)
    batch, q_tokens, q_heads, _ = operands.q.shape
    kv_tokens, kv_heads = operands.k.shape[1:3]
    queries, keys = batch * q_heads * q_tokens, batch * kv_heads * kv_tokens
    pairs = layout.block_q * layout.block_kv
    listed = _listed(operands)

    def counted(name, walked: Walked, flops, per_block, per_row, written, written_by_block=0):
        blocks = listed if walked.computed is None else walked.computed
        read = blocks if walked.fetches_all else listed
        return Pass(
            name,
            walked.tiles,
            listed,
            walked.computed,
            blocks * pairs * flops,
            read * per_block + per_row,
            written + read * written_by_block,
            walked.launches,
            walked.steps,
            walked.balance,
            walked.cores,
            walked.padded,
        )

    bias = pairs * size.bias
    key_block = layout.block_kv * (size.k + size.v) + bias
    query_block = layout.block_q * (size.q + size.out + 2 * size.row) + bias
    key_bytes = keys * (size.k + size.v)
    q_bytes, sums = queries * size.q, layout.block_q * size.q
    rows, out = queries * (size.q + size.out + 2 * size.row), queries * (size.out + size.row)
    key, value = size.key, size.value
    forward = counted("forward", by_query, key + value, key_block, q_bytes, out)
    if is_one_pass:
        moved = query_block + sums, key_bytes, key_bytes + q_bytes, sums
        return forward, counted("backward", by_key, 3 * key + 2 * value, *moved)
    return (
        forward,
        counted("dQ", by_query, 2 * key + value, key_block + bias, rows, q_bytes, bias),
        counted("dK/dV", by_key, 2 * (key + value), query_block, key_bytes, key_bytes),
    )


def grouped_rows(
    operands: Operands, problem: Problem, tiles_of: Callable[..., TileSizes], *, sets: int = 1
) -> tuple[Walked, Walked]:
    """`(by_query, by_key)` of a backend that computes rows in groups of about equal length.

    Args:
        operands: the call.
        problem: its numbers.
        tiles_of: `(layout, rows) -> TileSizes`, the backend's own choice.
        sets: equal parts of the rows of kv blocks that are walked apart.
    """
    layout = operands.layout
    batch, _, q_heads, _ = operands.q.shape
    queries = problem.tiles or tiles_of(layout, batch * q_heads * layout.q_blocks)
    rows = batch * operands.k.shape[2] * layout.kv_blocks
    keys = problem.tiles or tiles_of(layout, rows // sets)
    return (
        Walked(queries, _rows_of_queries(operands, queries), fetches_all=True),
        Walked(keys, _rows_of_keys(operands, keys, sets), fetches_all=True),
    )


def dense(operands: Operands) -> tuple[Pass, ...]:
    """The passes of a backend that computes every pair, in planes of logits in memory."""
    size, layout = _sizes(operands, True), operands.layout
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


def _sizes(operands: Operands, widens: bool) -> _Sizes:
    wide, own = np.dtype(compute_dtype(operands)).itemsize, np.dtype(operands.q.dtype).itemsize
    read = wide if widens else own
    dim, value_dim = operands.k.shape[-1], operands.v.shape[-1]
    bias = 0 if operands.bias is None else np.dtype(operands.bias.dtype).itemsize
    return _Sizes(
        key=2 * dim,
        value=2 * value_dim,
        q=dim * read,
        k=dim * own,
        v=value_dim * own,
        out=value_dim * read,
        row=wide,
        bias=bias,
    )


def _listed(operands: Operands) -> int:
    """Blocks the layout lists over all batch elements and query heads, or at most lists."""
    layout = operands.layout
    batch, q_heads = operands.q.shape[0], operands.q.shape[2]
    copies = (batch // layout.batch) * (q_heads // layout.heads)
    if is_known(layout.row_starts):
        return int(np.asarray(layout.row_starts)[-1]) * copies
    every = batch * q_heads * layout.q_blocks * layout.kv_blocks
    return min(layout.capacity * copies, every)


def _rows_of_queries(operands: Operands, tiles: TileSizes) -> int | None:
    """Blocks that the forward and the dQ pass compute."""
    layout = operands.layout
    if not is_known(*jax.tree.leaves(layout)):
        return None
    lists = blocked.row_lists(layout, operands.q.shape[0], operands.q.shape[2])
    return walked_items(lists.rows, tiles)


def _rows_of_keys(operands: Operands, tiles: TileSizes, sets: int) -> int | None:
    """Blocks that the pass over kv blocks computes."""
    layout = operands.layout
    if not is_known(*jax.tree.leaves(layout)):
        return None
    q_heads, kv_heads = operands.q.shape[2], operands.k.shape[2]
    transposed = layout.transpose(kv_heads, q_heads)
    rows = blocked.column_lists(transposed, operands.k.shape[0], kv_heads).rows
    repeats = q_heads // kv_heads // transposed.group
    rows = Rows(rows.start, rows.partial * repeats, rows.full * repeats)
    return walked_items(rows, tiles, sets)
