"""Forward pass over rows of query blocks."""

import functools

import jax.numpy as jnp

from xsake.kernels import blocking, online_softmax
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, TileSizes
from xsake.kernels.block_sparse.xla.tiles import cut_call, kv_block_lookup, row_tile
from xsake.kernels.row_loop import RowBody, Step, loop_rows


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, sizes: TileSizes):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
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
