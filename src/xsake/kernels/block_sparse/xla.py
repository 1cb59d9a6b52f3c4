"""Block-sparse attention in plain XLA loops that compute listed blocks and nothing else.

One walk serves all passes: forward and dQ go by query block, dK/dV by kv block over the transposed
layout, so every sum has one owner and one order. The same code has two shapes: a few rows at a time
for CPUs, whose cache is the limit, and as many as fit for devices that a short loop would starve.
A CPU takes its steps one after the other, so there dQ is summed beside dK/dV, in one order too, and
no weight is computed for each of them. Few queries on a CPU are `xla_decode`'s, short sequences
`xla_dense`'s.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels import tuning
from xsake.kernels.block_sparse import blocked, cost, tiles, xla_decode, xla_dense
from xsake.kernels.block_sparse.blocked import Lists, take
from xsake.kernels.block_sparse.call import (
    Call,
    fetch_kv_blocks,
    joined,
    prepare,
    row_tile,
    saved_rows,
)
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Gradients,
    Operands,
    Problem,
    TileSizes,
    cleaned,
)
from xsake.kernels.block_sparse.walk import Step, Visitor, walk
from xsake.kernels.platforms import by_platform

# Logits per step. Measured on 2 cores with 2 MB of L2 each: 12 rows of 128 x 512 are fastest, a
# quarter of that loses 20% to dispatch, four times that loses 10% to memory.
CPU_TILE_LOGITS = 12 * 128 * 512
CPU_TILE_KEYS = 512
ACCELERATOR_TILE_LOGITS = 2**24


def platforms() -> tuple[str, ...] | None:
    """Where this backend runs: None is everywhere."""
    return None


def unsupported(operands: Operands, problem: Problem, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can: it serves every call."""
    return None


def tile_sizes(layout, rows: int, platform: str) -> TileSizes:
    """Tile sizes for a platform.

    Many groups of rows, so that their lengths stay close, but no group of fewer than four rows if
    there are more.
    """
    if platform == "cpu":
        logits, blocks = CPU_TILE_LOGITS, max(1, CPU_TILE_KEYS // layout.block_kv)
    else:
        logits, blocks = ACCELERATOR_TILE_LOGITS, 1
    fitting = logits // (layout.block_q * layout.block_kv * blocks)
    return TileSizes(max(1, min(fitting, rows, max(4, rows // 16))), blocks)


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What forward and backward will compute."""
    if xla_dense.is_dense(operands, problem, platform):
        return cost.dense(operands)
    sizes = functools.partial(_tiles, operands, platform=platform)
    is_one = _is_one_pass(operands, platform)
    walked = cost.grouped_rows(operands, problem, sizes, sets=operands.q.shape[0] if is_one else 1)
    counted = cost.blockwise(operands, *walked, widens=True, is_one_pass=is_one)
    if xla_decode.is_decode(operands, platform):
        return xla_decode.count_forward(operands, walked[0].tiles), *counted[1:]
    return counted


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return _by_platform(_forward, operands, problem)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k, v and bias; the weights of the listed blocks are computed again."""
    return _by_platform(_backward, operands, problem, out, lse, cotangents)


def _by_platform(run, operands: Operands, problem: Problem, *rest):
    """Lower `run` with each platform's tile sizes."""
    layout = operands.layout
    arrays = operands._asdict()
    del arrays["layout"]
    traced = None if layout.is_static else layout  # a static one would become traced

    def on(platform):
        def branch(arrays, traced, *rest):
            whole = Operands(**arrays, layout=layout if traced is None else traced)
            return run(whole, problem, platform, *rest)

        return branch

    return by_platform({"cpu": on("cpu")}, on("accelerator"), arrays, traced, *rest)


def _sizes(call: Call, rows: int, platform: str) -> TileSizes:
    return call.problem.tiles or _tiles(call.operands, call.layout, rows, platform)


def _tiles(operands: Operands, layout, rows: int, platform: str) -> TileSizes:
    """Pinned tile sizes, or our own."""
    where = "cpu" if platform == "cpu" else "accelerator"
    q = operands.q
    found = tuning.tuned(layout, rows, where, q.dtype.name, q.shape[-1])
    return found or tile_sizes(layout, rows, platform)


def _forward(operands: Operands, problem: Problem, platform: str):
    if xla_dense.is_dense(operands, problem, platform):
        return xla_dense.forward(operands, problem)
    layout = operands.layout
    batch, q_tokens, q_heads, _ = operands.q.shape
    if xla_decode.is_decode(operands, platform):
        rows = batch * q_heads * layout.q_blocks
        sizes = problem.tiles or _tiles(operands, layout, rows, platform)
        return xla_decode.forward(operands, problem, sizes)
    call = prepare(operands, problem)
    lists = blocked.row_lists(layout, batch, q_heads)

    def begin(rows):
        q = call.scaled(blocked.own_blocks(operands.q, rows, layout.block_q))
        shape = rows.shape[0], layout.block_q, operands.v.shape[-1]
        return (rows, q), tiles.empty_softmax(*shape, call.dtype)

    def visit(tile, state, shared, step: Step):
        rows, q = tile
        logits, visible, _, v = row_tile(call, rows, q, step)
        if visible is None:
            return tiles.accumulate(state, logits, v, step.exists), shared
        return tiles.accumulate(state, jnp.where(visible, logits, -jnp.inf), v), shared

    def finish(rows, state, shared):
        out, lse = tiles.settle(state)
        return _store(shared, rows, (out.astype(operands.q.dtype), lse))

    visitor = Visitor(begin, fetch_kv_blocks(call, lists), visit, finish)
    room = functools.partial(blocked.empty_rows, batch, q_heads, layout.q_blocks, layout.block_q)
    shared = room(operands.v.shape[-1], dtype=operands.q.dtype), room(dtype=call.dtype)
    sizes = _sizes(call, lists.rows.full.shape[0], platform)
    out, lse = walk(lists.rows, visitor, sizes, shared, axes=call.axes)
    return blocked.tokens_of(out, q_tokens), blocked.tokens_of(lse, q_tokens)


def _store(rooms, rows, results):
    return tuple(blocked.store_rows(x, rows, y) for x, y in zip(rooms, results, strict=True))


class Queries(NamedTuple):
    """What the backward passes know of each query, by block; zeros weigh nothing."""

    q: Any  # [blocks, block_q, D], in the caller's dtype; `_load` makes it ready for tiles
    d_out: Any  # [blocks, block_q, Dv], finite, likewise
    lse: Any  # [blocks, block_q] in bits; +inf weighs nothing, NaN spoils what the query sees
    delta: Any  # [blocks, block_q]


def _queries(call: Call, out, lse, cotangents: Cotangents) -> Queries:
    block = call.layout.block_q
    d_out, lse, delta = saved_rows(call.dtype, out, lse, cotangents)
    return Queries(
        blocked.to_blocks(call.operands.q, block),
        blocked.to_blocks(d_out, block),
        blocked.to_blocks(lse, block, fill=jnp.inf),
        blocked.to_blocks(delta, block),
    )


def _load(call: Call, queries: Queries, index) -> Queries:
    """The queries of some blocks, q times query_factor, in the dtype that tiles compute in."""
    q, d_out, lse, delta = (take(x, index) for x in queries)
    return Queries(call.scaled(q), d_out.astype(call.dtype), lse, delta)


def _backward(operands, problem, platform, out, lse, cotangents) -> Gradients:
    if xla_dense.is_dense(operands, problem, platform):
        return xla_dense.backward(operands, problem, out, lse, cotangents)
    call = prepare(operands, problem)
    queries = _queries(call, out, lse, cotangents)
    if _is_one_pass(operands, platform):
        return Gradients(*_walk_keys(call, queries, platform, with_queries=True), None)
    d_q, d_bias = _query_gradient(call, queries, platform)
    _, d_k, d_v = _walk_keys(call, queries, platform, with_queries=False)
    return Gradients(d_q, d_k, d_v, d_bias)


def _is_one_pass(operands: Operands, platform: str) -> bool:
    """Whether dQ is summed while dK and dV are made: batch elements are walked apart then."""
    return platform == "cpu" and operands.bias is None


def _query_gradient(call: Call, queries: Queries, platform: str):
    """dQ, and the bias's gradient where there is a bias: rows of query blocks."""
    operands, layout = call.operands, call.layout
    batch, q_tokens, q_heads, dim = operands.q.shape
    lists = blocked.row_lists(layout, batch, q_heads)

    def begin(rows):
        index = blocked.block_index(
            rows // layout.q_blocks, rows % layout.q_blocks, layout.q_blocks
        )
        state = jnp.zeros((rows.shape[0], layout.block_q, dim), call.dtype)
        return (rows, _load(call, queries, index)), state

    def visit(tile, state, shared, step: Step):
        rows, known = tile
        found = row_tile(call, rows, known.q, step)
        gradient = tiles.logit_gradient(
            tiles.weights(found.logits, known.lse[..., None], step.exists),
            tiles.products(known.d_out, found.v),
            known.delta[..., None],
            tiles.softcap_slope(found.logits, call.problem.softcap, step.exists),
        )
        k = found.k
        if found.visible is not None:
            gradient, k = jnp.where(found.visible, gradient, 0), cleaned(k)
        d_q, d_bias = shared
        if d_bias is not None:
            d_bias = _add_pairs(call, d_bias, rows, step.items, gradient)
        return state + tiles.matmul(gradient, k), (d_q, d_bias)

    def finish(rows, state, shared):
        d_q, d_bias = shared
        state = state * jnp.asarray(call.problem.scale, call.dtype)
        return blocked.store_rows(d_q, rows, state.astype(d_q.dtype)), d_bias

    visitor = Visitor(begin, fetch_kv_blocks(call, lists), visit, finish)
    sizes = _sizes(call, lists.rows.full.shape[0], platform)
    d_q = blocked.empty_rows(
        batch, q_heads, layout.q_blocks, layout.block_q, dim, dtype=operands.q.dtype
    )
    d_bias = None if call.bias is None else jnp.zeros(call.bias.shape, call.dtype)
    d_q, d_bias = walk(lists.rows, visitor, sizes, (d_q, d_bias), axes=call.axes)
    if operands.bias is not None:
        d_bias = blocked.pairs_from_blocks(d_bias, operands.bias.shape, layout.q_blocks)
        d_bias = d_bias.astype(operands.bias.dtype)
    return blocked.tokens_of(d_q, q_tokens), d_bias


def _add_pairs(call: Call, d_bias, rows, kv_block, gradient):
    """Add a step's logit gradients to the blocks of the bias they belong to."""
    index = call.bias_index(rows[:, None], kv_block)
    shape = (index.shape[0], gradient.shape[1], index.shape[1], -1)
    return d_bias.at[index].add(jnp.moveaxis(gradient.reshape(shape), 2, 1))


class QueryItems(NamedTuple):
    """What rows of kv blocks meet: query heads and query blocks, [rows, K]."""

    head: Any  # batch * Hq + query head
    block: Any  # q_blocks where there is no item


def _fetch_query_blocks(call: Call, lists: Lists, repeats: int):
    """A list shared by the `repeats` query heads of a kv head is walked once for each of them."""
    layout = call.layout
    start, block, q_head = (jnp.asarray(x) for x in (lists.rows.start, lists.block, lists.head))

    def fetch(rows, turns, exists):
        place = jnp.minimum(take(start, rows)[:, None] + turns // repeats, block.shape[0] - 1)
        head = rows[:, None] // layout.kv_blocks * (call.q_heads // call.kv_heads)
        head = head + take(q_head, place) + turns % repeats
        head = jnp.where(exists, head, 0)
        return QueryItems(head, jnp.where(exists, take(block, place), layout.q_blocks))

    return fetch


class Columns(NamedTuple):
    """The kv blocks that a group of rows owns."""

    block: Any  # int32 [rows]
    k: Any  # [rows, block_kv, D]
    v: Any  # [rows, block_kv, Dv]
    turned_k: Any  # [rows, D, block_kv]


class ColumnTile(NamedTuple):
    """One step of rows of kv blocks."""

    index: Any  # [rows, K]: the blocks of queries that are met
    q: Any  # [rows, K * block_q, D]
    d_out: Any  # [rows, K * block_q, Dv]
    turned_k: Any  # [rows, D, block_kv]
    weight: Any  # [rows, block_kv, K * block_q]
    gradient: Any  # of the logits, likewise


def _column_tile(call: Call, queries: Queries, own: Columns, step: Step) -> ColumnTile:
    """Weights and gradients of the logits of kv blocks against the query blocks of a step."""
    layout, softcap = call.layout, call.problem.softcap
    head, block = step.items
    index = blocked.block_index(head, block, layout.q_blocks)
    q, d_out, lse, delta = _load(call, queries, index)
    q, d_out = joined(q), joined(d_out)
    lse, delta = (x.reshape(x.shape[0], 1, -1) for x in (lse, delta))
    q_rows = head * layout.q_blocks + jnp.minimum(block, layout.q_blocks - 1)
    bias = call.bias_tile(q_rows, own.block[:, None])
    if bias is not None:
        bias = joined(bias).swapaxes(1, 2)
    logits = tiles.logits(tiles.products(own.k, q), bias, softcap)
    visible = call.visible(q_rows[:, 0], own.block, step)
    weight = tiles.weights(logits, lse, step.exists)
    slope = tiles.softcap_slope(logits, softcap, step.exists)
    gradient = tiles.logit_gradient(weight, tiles.products(own.v, d_out), delta, slope)
    turned_k = own.turned_k
    if visible is not None:
        visible = visible.swapaxes(1, 2)
        weight, gradient = (jnp.where(visible, x, 0) for x in (weight, gradient))
        q, turned_k = cleaned(q), cleaned(turned_k)
    return ColumnTile(index, q, d_out, turned_k, weight, gradient)


def _walk_keys(
    call: Call, queries: Queries, platform: str, *, with_queries: bool
) -> tuple[Any, Any, Any]:
    """`(dQ or None, dK, dV)`: rows of kv blocks over the transposed layout."""
    layout, problem = call.layout, call.problem
    batch, kv_tokens, kv_heads, _ = call.operands.k.shape
    transposed = layout.transpose(kv_heads, call.q_heads)
    lists = blocked.column_lists(transposed, batch, kv_heads)
    repeats = call.q_heads // kv_heads // transposed.group
    start, partial, full = lists.rows
    rows = lists.rows._replace(partial=partial * repeats, full=full * repeats)

    def begin(columns):
        kv_block = columns % layout.kv_blocks
        index = blocked.block_index(columns // layout.kv_blocks, kv_block, layout.kv_blocks)
        k, v = (take(x, index).astype(call.dtype) for x in (call.k, call.v))
        # XLA:CPU is slow at products with a left side that lies the wrong way: turned once here.
        tile = Columns(kv_block, k, v, k.swapaxes(1, 2))
        return tile, tuple(jnp.zeros_like(x) for x in (k, v))

    def visit(tile, state, shared, step: Step):
        found = _column_tile(call, queries, tile, step)
        (d_k, d_v), (d_q, rooms) = state, shared
        d_k = d_k + tiles.matmul(found.gradient, found.q)
        d_v = d_v + tiles.matmul(found.weight, found.d_out)
        if d_q is not None:
            d_q = _add_blocks(d_q, found.index, tiles.matmul(found.turned_k, found.gradient))
        return (d_k, d_v), (d_q, rooms)

    def finish(columns, state, shared):
        d_k, d_v = state
        d_q, rooms = shared
        # The queries came with query_factor; what is wanted is `scale`.
        d_k = d_k if problem.softcap is not None else d_k / tiles.LOG2_E
        return d_q, _store(rooms, columns, (d_k.astype(rooms[0].dtype), d_v.astype(rooms[1].dtype)))

    visitor = Visitor(begin, _fetch_query_blocks(call, lists, repeats), visit, finish)
    rooms = tuple(
        blocked.empty_rows(
            batch, kv_heads, layout.kv_blocks, layout.block_kv, x.shape[-1], dtype=x.dtype
        )
        for x in (call.operands.k, call.operands.v)
    )
    sets = batch if with_queries else 1
    d_q = jnp.zeros_like(queries.q.swapaxes(1, 2), call.dtype) if with_queries else None
    sizes = _sizes(call, full.shape[0] // sets, platform)
    d_q, rooms = walk(rows, visitor, sizes, (d_q, rooms), sets=sets, axes=call.axes)
    d_k, d_v = (blocked.tokens_of(x, kv_tokens) for x in rooms)
    if d_q is not None:
        d_q = (d_q * jnp.asarray(problem.scale, call.dtype)).astype(call.operands.q.dtype)
        d_q = blocked.from_blocks(d_q.swapaxes(1, 2), call.operands.q.shape)
    return d_q, d_k, d_v


def _add_blocks(sums, index, parts):
    """Add the blocks of `parts` [rows, D, K * block] to `sums` [blocks, D, block], in their order.

    A loop, because XLA:CPU adds a scatter's numbers one by one.
    """
    width, block = index.shape[1], sums.shape[-1]
    places = index.reshape(-1)

    def add(turn, sums):
        row = lax.dynamic_index_in_dim(parts, turn // width)
        part = lax.dynamic_slice_in_dim(row, turn % width * block, block, axis=2)
        old = lax.dynamic_index_in_dim(sums, places[turn])
        return lax.dynamic_update_index_in_dim(sums, old + part, places[turn], 0)

    return lax.fori_loop(0, places.shape[0], add, sums)
