"""Backward passes: dq over rows of query blocks, dk and dv over rows of kv blocks.

A CPU takes its steps one after the other, so there dq is summed in the pass over kv blocks, and the
probabilities of a tile are computed once instead of twice.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import blocking, online_softmax
from xsake.kernels.block_sparse.types import Gradients, TileSizes
from xsake.kernels.block_sparse.xla.tiles import (
    BlockedCall,
    join_items,
    kv_block_lookup,
    row_tile,
)
from xsake.kernels.blocking import BlockLists, take
from xsake.kernels.online_softmax import matmul, zero_nonfinite
from xsake.kernels.row_loop import RowBody, Step, loop_rows


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


def cut_queries(call: BlockedCall, o: Array, lse: Array, do: Array, dlse: Array) -> QueryBlocks:
    """Cut queries, cotangents and residuals into blocks."""
    block = call.layout.block_q
    do, lse, delta = online_softmax.backward_rows(call.dtype, o, lse, do, dlse)
    return QueryBlocks(
        blocking.to_blocks(call.inputs.q, block),
        blocking.to_blocks(do, block),
        blocking.to_blocks(lse, block, fill=jnp.inf),
        blocking.to_blocks(delta, block),
    )


def backward(
    call: BlockedCall, queries: QueryBlocks, sizes: tuple[TileSizes, TileSizes], *, one_pass: bool
) -> Gradients:
    """Gradients for q, k, v and bias; the probabilities of the listed blocks are recomputed.

    Args:
        call: by block.
        queries: by block.
        sizes: of the passes over query blocks and over kv blocks.
        one_pass: dq is summed in the pass over kv blocks; there must be no bias.
    """
    if one_pass:
        return Gradients(*dkv_pass(call, queries, sizes[1], with_dq=True))
    dq, dbias = dq_pass(call, queries, sizes[0])
    _, dk, dv = dkv_pass(call, queries, sizes[1], with_dq=False)
    return Gradients(dq, dk, dv, dbias)


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


def _query_lookup(call: BlockedCall, lists: BlockLists, repeats: int):
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
