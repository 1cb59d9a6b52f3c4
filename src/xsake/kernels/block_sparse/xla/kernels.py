"""Block-sparse attention in plain XLA loops that compute listed blocks and nothing else.

The forward and dq passes loop over rows of query blocks, the dk and dv pass over rows of kv blocks
of the transposed layout, so every sum has one owner and one order. Groups of rows are small on
CPUs, whose cache is the limit, and as large as memory allows elsewhere. On a CPU few queries are
computed by `decode.py`, short sequences by `dense.py`; steps run one after the other, so dq is
summed in the pass over kv blocks, where p is computed once instead of twice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import blocking, online_softmax, tuning
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import (
    BlockSparseConfig,
    BlockSparseInputs,
    Gradients,
    TileSizes,
)
from xsake.kernels.block_sparse.xla import decode, dense
from xsake.kernels.blocking import BlockLists, RowTileSide, TokenBlocks, take
from xsake.kernels.element_mask import element_mask, rule_of_heads
from xsake.kernels.online_softmax import matmul, zero_nonfinite
from xsake.kernels.row_loop import RowBody, Step, loop_rows
from xsake.kernels.sharding import axes_of
from xsake.kernels.validation import sum_dtype
from xsake.layout import BlockLayout

# Scores per step. Measured on 2 cores with 2 MB of L2 each: 12 rows of 128 x 512 are fastest, a
# quarter of that loses 20% to dispatch, four times that loses 10% to memory.
CPU_TILE_SCORES = 12 * 128 * 512
CPU_TILE_KEYS = 512
ACCELERATOR_TILE_SCORES = 2**24


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    if dense.is_dense(inputs, config, platform):
        return dense.forward(inputs, config)
    sizes = _row_sizes(inputs, config, platform)
    if decode.is_decode(inputs, platform):
        return decode.forward(inputs, config, sizes)
    layout = inputs.layout
    batch, q_tokens, q_heads, _ = inputs.q.shape
    call = cut_call(inputs, config)
    lists = blocking.list_rows(layout, batch, q_heads)

    def prologue(rows):
        q = call.scale_queries(blocking.gather_blocks(inputs.q, rows, layout.block_q))
        shape = rows.shape[0], layout.block_q, inputs.v.shape[-1]
        return (rows, q), online_softmax.init(*shape, call.dtype)

    def body(tile, state, shared, step: Step):
        rows, q = tile
        s, mask, _, v = row_tile(call, rows, q, step)
        if mask is None:
            return online_softmax.update(state, s, v, step.exists), shared
        return online_softmax.update(state, jnp.where(mask, s, -jnp.inf), v), shared

    def epilogue(rows, state, shared):
        o, lse = online_softmax.finalize(state)
        results = zip(shared, (o.astype(inputs.q.dtype), lse), strict=True)
        return tuple(blocking.store_rows(buffer, rows, x) for buffer, x in results)

    row_body = RowBody(prologue, kv_block_lookup(call, lists), body, epilogue)
    empty = functools.partial(blocking.empty_rows, batch, q_heads, layout.q_blocks, layout.block_q)
    shared = empty(inputs.v.shape[-1], dtype=inputs.q.dtype), empty(dtype=call.dtype)
    o, lse = loop_rows(lists.rows, row_body, sizes, shared, axes=call.axes)
    return blocking.to_tokens(o, q_tokens), blocking.to_tokens(lse, q_tokens)


def backward(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients for q, k, v and bias from (o, lse, do, dlse); p of listed blocks is recomputed."""
    if dense.is_dense(inputs, config, platform):
        return dense.backward(inputs, config, *residuals)
    call = cut_call(inputs, config)
    queries = cut_queries(call, *residuals)
    batch, _, kv_heads, _ = inputs.k.shape
    num_rows = kv_heads * inputs.layout.kv_blocks
    column_sizes = lambda rows: config.tiles or _sizes(inputs, inputs.layout, rows, platform)
    if _is_one_pass(inputs, platform):
        return Gradients(*dkv_pass(call, queries, column_sizes(num_rows), with_dq=True))
    dq, dbias = dq_pass(call, queries, _row_sizes(inputs, config, platform))
    _, dk, dv = dkv_pass(call, queries, column_sizes(batch * num_rows), with_dq=False)
    return Gradients(dq, dk, dv, dbias)


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


class BlockedCall(NamedTuple):
    """The inputs by block, `[blocks, block, D]` each, and the positions of their tokens."""

    inputs: BlockSparseInputs
    config: BlockSparseConfig
    k: Any  # NaN where the value is not finite
    v: Any  # finite
    bias: Any  # [pairs of blocks, block_q, block_kv] or None
    q_tokens: TokenBlocks
    kv_tokens: TokenBlocks

    @property
    def layout(self) -> BlockLayout:
        return self.inputs.layout

    @property
    def dtype(self):
        return sum_dtype(self.inputs.q.dtype)

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes of `shard_map` that the inputs vary over."""
        return axes_of(self.inputs.q)

    @property
    def q_heads(self) -> int:
        return self.inputs.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.inputs.k.shape[2]

    def scale_queries(self, q: Array) -> Array:
        """Queries times `query_factor`, in the dtype of the tiles."""
        factor = online_softmax.query_factor(self.config.scale, self.config.softcap)
        return q.astype(self.dtype) * jnp.asarray(factor, self.dtype)

    def bias_tile(self, rows: Array, kv_block: Array) -> Array | None:
        """The bias of q rows [rows, K] against kv blocks, [rows, K, block_q, block_kv]; or None."""
        if self.bias is None:
            return None
        return take(self.bias, self.bias_index(rows, kv_block)).astype(self.dtype)

    def bias_index(self, rows: Array, kv_block: Array) -> Array:
        """Index in `bias` of a q row and a kv block; any index for items that do not exist."""
        bias, layout = self.inputs.bias, self.layout
        assert bias is not None
        head = rows // layout.q_blocks
        plane = head // self.q_heads % bias.shape[0] * bias.shape[1]
        plane = plane + head % self.q_heads % bias.shape[1]
        kv_block = jnp.minimum(kv_block, layout.kv_blocks - 1)
        return (plane * layout.q_blocks + rows % layout.q_blocks) * layout.kv_blocks + kv_block

    def element_mask(self, rows: Array, kv_block: Array, step: Step) -> Array | None:
        """Element mask of a step with one block per row, [rows, block_q or 1, block_kv or 1].

        None if no pair has to be masked. Rows without an item have p = 0 anyway, but under a bias
        their gradient may still be 0 * NaN.
        """
        if step.is_masked:
            return self._pair_mask(rows, kv_block, step.exists)
        return None if self.bias is None else step.exists[..., None]

    def _pair_mask(self, rows: Array, kv_block: Array, exists: Array) -> Array:
        layout = self.layout
        head, q_block = rows // layout.q_blocks, rows % layout.q_blocks
        batch, head = head // self.q_heads, head % self.q_heads
        kv_block = jnp.minimum(kv_block, layout.kv_blocks - 1)
        q = RowTileSide(self.q_tokens, layout.q_tokens, layout.block_q, batch, q_block, axis=1)
        kv = RowTileSide(self.kv_tokens, layout.kv_tokens, layout.block_kv, batch, kv_block, axis=2)
        allows = rule_of_heads(layout.mask, self.q_heads, lambda: head[:, None, None])
        allowed, exists = element_mask(q, kv, allows), exists[..., None]
        return exists if allowed is None else allowed & exists


def cut_call(inputs: BlockSparseInputs, config: BlockSparseConfig) -> BlockedCall:
    """Cut the arrays of a call into blocks."""
    layout, bias, tokens = inputs.layout, inputs.bias, blocking.token_blocks
    k, v = online_softmax.isolate_nonfinite(inputs.k, inputs.v)
    if bias is not None:
        bias = blocking.pairs_to_blocks(bias, layout.block_q, layout.block_kv)
    return BlockedCall(
        inputs,
        config,
        blocking.to_blocks(k, layout.block_kv),
        blocking.to_blocks(v, layout.block_kv),
        bias,
        tokens(inputs.q_positions, inputs.q_segment_ids, layout.q_tokens, layout.block_q),
        tokens(inputs.kv_positions, inputs.kv_segment_ids, layout.kv_tokens, layout.block_kv),
    )


def kv_block_lookup(call: BlockedCall, lists: BlockLists) -> Callable[..., Array]:
    """Make `RowBody.lookup` of rows of query blocks: kv blocks [rows, K], or the zero block."""
    start, block = jnp.asarray(lists.rows.start), jnp.asarray(lists.block)

    def lookup(rows, index, exists):
        at = jnp.minimum(take(start, rows)[:, None] + index, block.shape[0] - 1)
        return jnp.where(exists, take(block, at), call.layout.kv_blocks)

    return lookup


class RowTile(NamedTuple):
    """One step of rows of query blocks."""

    s: Array  # [rows, block_q, K * block_kv], masked pairs included
    mask: Array | None  # broadcasts against s; None if all pairs of existing items are visible
    k: Array  # [rows, K * block_kv, D]
    v: Array  # [rows, K * block_kv, Dv]


def row_tile(call: BlockedCall, rows: Array, q: Array, step: Step) -> RowTile:
    """Scores of query blocks against the kv blocks of a step."""
    layout = call.layout
    head = rows // layout.q_blocks
    head = head // call.q_heads * call.kv_heads + head % call.q_heads // (
        call.q_heads // call.kv_heads
    )
    index = blocking.block_index(head[:, None], step.items, layout.kv_blocks)
    k, v = (join_items(take(x, index)).astype(call.dtype) for x in (call.k, call.v))
    bias = call.bias_tile(rows[:, None], step.items)
    if bias is not None:
        bias = jnp.moveaxis(bias, 1, 2).reshape(rows.shape[0], layout.block_q, -1)
    qk = jnp.einsum("rmd,rnd->rmn", q, k, precision="highest")
    s = online_softmax.to_scores(qk, bias, call.config.softcap)
    return RowTile(s, call.element_mask(rows, step.items[:, 0], step), k, v)


def join_items(x: Array) -> Array:
    """[rows, K, block, D] -> [rows, K * block, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


class QueryBlocks(NamedTuple):
    """Queries and their residuals by block; the block that ends a head has p = 0."""

    q: Any  # [blocks, block_q, D], in the caller's dtype
    do: Any  # [blocks, block_q, Dv], finite, likewise
    lse: Any  # [blocks, block_q] in base 2; +inf: p = 0, NaN: reaches the keys that it sees
    delta: Any  # [blocks, block_q]

    def load(self, call: BlockedCall, index: Array) -> "QueryBlocks":
        """Some blocks, q times query_factor, in the dtype that tiles compute in."""
        q, do, lse, delta = (take(x, index) for x in self)
        return QueryBlocks(call.scale_queries(q), do.astype(call.dtype), lse, delta)


def cut_queries(call: BlockedCall, *residuals: Array) -> QueryBlocks:
    """Cut queries, cotangents and residuals into blocks."""
    block = call.layout.block_q
    do, lse, delta = online_softmax.backward_rows(call.dtype, *residuals)
    return QueryBlocks(
        blocking.to_blocks(call.inputs.q, block),
        blocking.to_blocks(do, block),
        blocking.to_blocks(lse, block, fill=jnp.inf),
        blocking.to_blocks(delta, block),
    )


def dq_pass(call: BlockedCall, queries: QueryBlocks, sizes: TileSizes):
    """dq, and dbias where there is a bias: rows of query blocks."""
    inputs, layout = call.inputs, call.layout
    batch, q_tokens, q_heads, dim = inputs.q.shape
    lists = blocking.list_rows(layout, batch, q_heads)

    def prologue(rows):
        index = blocking.block_index(
            rows // layout.q_blocks, rows % layout.q_blocks, layout.q_blocks
        )
        dq = jnp.zeros((rows.shape[0], layout.block_q, dim), call.dtype)
        return (rows, queries.load(call, index)), dq

    def body(tile, dq, shared, step: Step):
        rows, (q, do, lse, delta) = tile
        s, mask, k, v = row_tile(call, rows, q, step)
        p = online_softmax.probabilities(s, lse[..., None], step.exists)
        dp = online_softmax.dot_products(do, v)
        slope = online_softmax.softcap_grad(s, call.config.softcap, step.exists)
        ds = online_softmax.score_grad(p, dp, delta[..., None], slope)
        if mask is not None:
            ds, k = jnp.where(mask, ds, 0), zero_nonfinite(k)
        buffer, dbias = shared
        if dbias is not None:
            dbias = _add_pairs(call, dbias, rows, step.items, ds)
        return dq + matmul(ds, k), (buffer, dbias)

    def epilogue(rows, dq, shared):
        buffer, dbias = shared
        dq = dq * jnp.asarray(call.config.scale, call.dtype)
        return blocking.store_rows(buffer, rows, dq.astype(buffer.dtype)), dbias

    row_body = RowBody(prologue, kv_block_lookup(call, lists), body, epilogue)
    buffer = blocking.empty_rows(
        batch, q_heads, layout.q_blocks, layout.block_q, dim, dtype=inputs.q.dtype
    )
    dbias = None if call.bias is None else jnp.zeros(call.bias.shape, call.dtype)
    dq, dbias = loop_rows(lists.rows, row_body, sizes, (buffer, dbias), axes=call.axes)
    if inputs.bias is not None:
        dbias = blocking.pairs_from_blocks(dbias, inputs.bias.shape, layout.q_blocks)
        dbias = dbias.astype(inputs.bias.dtype)
    return blocking.to_tokens(dq, q_tokens), dbias


def _add_pairs(call: BlockedCall, dbias: Array, rows: Array, kv_block: Array, ds: Array) -> Array:
    """Add the ds of a step to the blocks of the bias they belong to."""
    index = call.bias_index(rows[:, None], kv_block)
    shape = (index.shape[0], ds.shape[1], index.shape[1], -1)
    return dbias.at[index].add(jnp.moveaxis(ds.reshape(shape), 2, 1))


class QueryItems(NamedTuple):
    """Items of rows of kv blocks: query heads and query blocks, [rows, K]."""

    head: Any  # batch * Hq + query head
    block: Any  # q_blocks where an item is missing


def _query_lookup(call: BlockedCall, lists: BlockLists, repeats: int) -> Callable[..., QueryItems]:
    """Make `RowBody.lookup`; a list shared by `repeats` query heads is taken once for each."""
    layout = call.layout
    start, block, q_head = (jnp.asarray(x) for x in (lists.rows.start, lists.block, lists.head))

    def lookup(rows, index, exists):
        at = jnp.minimum(take(start, rows)[:, None] + index // repeats, block.shape[0] - 1)
        head = rows[:, None] // layout.kv_blocks * (call.q_heads // call.kv_heads)
        head = head + take(q_head, at) + index % repeats
        head = jnp.where(exists, head, 0)
        return QueryItems(head, jnp.where(exists, take(block, at), layout.q_blocks))

    return lookup


class KvTile(NamedTuple):
    """The kv blocks of a group of rows."""

    block: Any  # int32 [rows]
    k: Any  # [rows, block_kv, D]
    v: Any  # [rows, block_kv, Dv]
    k_T: Any  # [rows, D, block_kv]


class ColumnTile(NamedTuple):
    """One step of rows of kv blocks; tiles are [rows, block_kv, K * block_q]."""

    index: Array  # [rows, K]: blocks of queries
    q: Array  # [rows, K * block_q, D]
    do: Array  # [rows, K * block_q, Dv]
    k_T: Array  # [rows, D, block_kv]
    p: Array
    ds: Array


def _column_tile(call: BlockedCall, queries: QueryBlocks, kv: KvTile, step: Step) -> ColumnTile:
    """p and ds of kv blocks against the query blocks of a step."""
    layout, softcap = call.layout, call.config.softcap
    head, block = step.items
    index = blocking.block_index(head, block, layout.q_blocks)
    q, do, lse, delta = queries.load(call, index)
    q, do = join_items(q), join_items(do)
    lse, delta = (x.reshape(x.shape[0], 1, -1) for x in (lse, delta))
    q_rows = head * layout.q_blocks + jnp.minimum(block, layout.q_blocks - 1)
    bias = call.bias_tile(q_rows, kv.block[:, None])
    if bias is not None:
        bias = join_items(bias).swapaxes(1, 2)
    s = online_softmax.to_scores(online_softmax.dot_products(kv.k, q), bias, softcap)
    p = online_softmax.probabilities(s, lse, step.exists)
    dp = online_softmax.dot_products(kv.v, do)
    slope = online_softmax.softcap_grad(s, softcap, step.exists)
    ds = online_softmax.score_grad(p, dp, delta, slope)
    mask, k_T = call.element_mask(q_rows[:, 0], kv.block, step), kv.k_T
    if mask is not None:
        mask = mask.swapaxes(1, 2)
        p, ds = (jnp.where(mask, x, 0) for x in (p, ds))
        q, k_T = zero_nonfinite(q), zero_nonfinite(k_T)
    return ColumnTile(index, q, do, k_T, p, ds)


def dkv_pass(
    call: BlockedCall, queries: QueryBlocks, sizes: TileSizes, *, with_dq: bool
) -> tuple[Any, Array, Array]:
    """`(dq or None, dk, dv)`: rows of kv blocks over the transposed layout."""
    layout, config, inputs = call.layout, call.config, call.inputs
    batch, kv_tokens, kv_heads, _ = inputs.k.shape
    transposed = layout.transpose(kv_heads, call.q_heads)
    lists = blocking.list_columns(transposed, batch, kv_heads)
    repeats = call.q_heads // kv_heads // transposed.group
    _, partial, full = lists.rows
    table = lists.rows._replace(partial=partial * repeats, full=full * repeats)

    def prologue(rows):
        kv_block = rows % layout.kv_blocks
        index = blocking.block_index(rows // layout.kv_blocks, kv_block, layout.kv_blocks)
        k, v = (take(x, index).astype(call.dtype) for x in (call.k, call.v))
        # XLA:CPU is slow at products with a transposed left side: transposed once here.
        return KvTile(kv_block, k, v, k.swapaxes(1, 2)), (jnp.zeros_like(k), jnp.zeros_like(v))

    def body(kv, state, shared, step: Step):
        tile = _column_tile(call, queries, kv, step)
        (dk, dv), (dq, buffers) = state, shared
        dk, dv = dk + matmul(tile.ds, tile.q), dv + matmul(tile.p, tile.do)
        if dq is not None:
            dq = _add_blocks(dq, tile.index, matmul(tile.k_T, tile.ds))
        return (dk, dv), (dq, buffers)

    def epilogue(rows, state, shared):
        (dk, dv), (dq, buffers) = state, shared
        # The queries came with query_factor; dk needs `scale`.
        dk = dk if config.softcap is not None else dk / online_softmax.LOG2E
        results = zip(buffers, (dk, dv), strict=True)
        return dq, tuple(blocking.store_rows(x, rows, y.astype(x.dtype)) for x, y in results)

    row_body = RowBody(prologue, _query_lookup(call, lists, repeats), body, epilogue)
    buffers = tuple(
        blocking.empty_rows(
            batch, kv_heads, layout.kv_blocks, layout.block_kv, x.shape[-1], dtype=x.dtype
        )
        for x in (inputs.k, inputs.v)
    )
    sets = batch if with_dq else 1
    dq = jnp.zeros_like(queries.q.swapaxes(1, 2), call.dtype) if with_dq else None
    dq, buffers = loop_rows(table, row_body, sizes, (dq, buffers), sets=sets, axes=call.axes)
    dk, dv = (blocking.to_tokens(x, kv_tokens) for x in buffers)
    if dq is not None:
        dq = (dq * jnp.asarray(config.scale, call.dtype)).astype(inputs.q.dtype)
        dq = blocking.from_blocks(dq.swapaxes(1, 2), inputs.q.shape)
    return dq, dk, dv


def _add_blocks(sums: Array, index: Array, parts: Array) -> Array:
    """Add the blocks of `parts` [rows, D, K * block] to `sums` [blocks, D, block], in their order.

    A loop, because XLA:CPU adds the numbers of a scatter one by one.
    """
    width, block = index.shape[1], sums.shape[-1]
    targets = index.reshape(-1)

    def add(number, sums):
        row = lax.dynamic_index_in_dim(parts, number // width)
        part = lax.dynamic_slice_in_dim(row, number % width * block, block, axis=2)
        old = lax.dynamic_index_in_dim(sums, targets[number])
        return lax.dynamic_update_index_in_dim(sums, old + part, targets[number], 0)

    return lax.fori_loop(0, targets.shape[0], add, sums)


def default_sizes(layout: BlockLayout, rows: int, platform: str) -> TileSizes:
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


def _sizes(inputs: BlockSparseInputs, layout: BlockLayout, rows: int, platform: str) -> TileSizes:
    """Pinned tile sizes, or the default ones."""
    where = "cpu" if platform == "cpu" else "accelerator"
    q = inputs.q
    pinned: tuning.TileTable = tuning.PINNED.value
    if pinned.entries:
        bucket = tuning.Bucket.of(layout, rows, where, q.dtype.name, q.shape[-1])
        return pinned.find(bucket) or default_sizes(layout, rows, platform)
    return default_sizes(layout, rows, platform)


def _row_sizes(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str) -> TileSizes:
    """Tile sizes of a pass over rows of query blocks."""
    rows = inputs.q.shape[0] * inputs.q.shape[2] * inputs.layout.q_blocks
    return config.tiles or _sizes(inputs, inputs.layout, rows, platform)


def _is_one_pass(inputs: BlockSparseInputs, platform: str) -> bool:
    """Whether dq is summed in the pass over kv blocks: batch elements are computed apart then."""
    return platform == "cpu" and inputs.bias is None
