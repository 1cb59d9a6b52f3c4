"""Block-sparse attention in plain XLA loops that compute listed blocks and nothing else.

One walk serves three passes: forward and dQ go by query block, dK/dV by kv block over the transposed
layout, so every sum has one owner and one order. The same code has two shapes: a few rows at a time
for CPUs, whose cache is the limit, and as many as fit for devices that a short loop would starve.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse import blocked, cost, tiles
from xsake.kernels.block_sparse.blocked import Lists, Places, take
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Gradients,
    Operands,
    Problem,
    TileSizes,
    cleaned,
    compute_dtype,
    quarantine,
)
from xsake.kernels.block_sparse.walk import Visitor, walk

# Logits per step. Measured on 2 cores with 2 MB of L2 each: 12 rows of 128 x 512 are fastest, a
# quarter of that loses 20% to dispatch, four times that loses 10% to memory.
CPU_TILE_LOGITS = 12 * 128 * 512
CPU_TILE_KEYS = 512
ACCELERATOR_TILE_LOGITS = 2**24


def unsupported(operands: Operands, problem: Problem, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can: it serves every call."""
    return None


def tile_sizes(layout, rows: int, platform: str) -> TileSizes:
    """Tile sizes for a platform: at least 16 groups of rows, so that their lengths stay close."""
    if platform == "cpu":
        logits, blocks = CPU_TILE_LOGITS, max(1, CPU_TILE_KEYS // layout.block_kv)
    else:
        logits, blocks = ACCELERATOR_TILE_LOGITS, 1
    fitting = logits // (layout.block_q * layout.block_kv * blocks)
    return TileSizes(max(1, min(fitting, rows // 16 or rows)), blocks)


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What forward and backward will compute."""
    return cost.blockwise(operands, problem, functools.partial(tile_sizes, platform=platform))


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return _by_platform(_forward, operands, problem)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k, v and bias, recomputing the weights of the listed blocks twice."""
    return _by_platform(_backward, operands, problem, out, lse, cotangents)


def _by_platform(run, operands: Operands, problem: Problem, *rest):
    """Lower `run` with each platform's tile sizes; a static layout stays static."""
    layout = operands.layout
    arrays = operands._replace(layout=None) if layout.is_static else operands

    def on(platform):
        def lowered(arrays, *rest):
            whole = arrays._replace(layout=layout) if layout.is_static else arrays
            return run(whole, problem, platform, *rest)

        return lowered

    return lax.platform_dependent(arrays, *rest, cpu=on("cpu"), default=on("accelerator"))


class Views(NamedTuple):
    """The call cut into blocks; `[blocks, block, D]` each."""

    q: Any  # times query_factor
    k: Any  # NaN where the value is not finite
    v: Any  # finite
    bias: Any  # [pairs of blocks, block_q, block_kv] or None


class Call(NamedTuple):
    """Everything the passes share."""

    operands: Operands
    problem: Problem
    views: Views
    q_places: Places
    kv_places: Places

    @property
    def dtype(self):
        return compute_dtype(self.operands)

    @property
    def heads(self) -> tuple[int, int]:
        return self.operands.q.shape[2], self.operands.k.shape[2]

    def bias_index(self, row, kv_block):
        """Which block of `views.bias` belongs to a q row and a kv block."""
        bias, layout = self.operands.bias, self.operands.layout
        q_heads = self.heads[0]
        batch, head = row // layout.q_blocks // q_heads, row // layout.q_blocks % q_heads
        plane = (batch % bias.shape[0]) * bias.shape[1] + head % bias.shape[1]
        return (plane * layout.q_blocks + row % layout.q_blocks) * layout.kv_blocks + kv_block

    def visible(self, row, kv_block, is_partial, exists):
        """The element mask of one block per row, [rows, block_q, block_kv]."""
        layout = self.operands.layout
        head, q_block = row // layout.q_blocks, row % layout.q_blocks
        batch, head = head // self.heads[0], head % self.heads[0]
        token = kv_block[:, None] * layout.block_kv + jnp.arange(layout.block_kv)[None]
        visible = ((token < self.kv_places.tokens) & exists)[:, None, :]
        if layout.mask is not None:
            q_pos = _place(self.q_places.positions, batch, q_block)[:, :, None]
            kv_pos = _place(self.kv_places.positions, batch, kv_block)[:, None, :]
            heads = layout.mask.heads
            which = None if heads is None else (head * heads // self.heads[0])[:, None, None]
            allowed = layout.mask.allows(q_pos, kv_pos, which)
            visible = visible & (allowed | ~is_partial[:, None, None])
        if self.q_places.segments is not None:
            q_ids = _place(self.q_places.segments, batch, q_block)[:, :, None]
            kv_ids = _place(self.kv_places.segments, batch, kv_block)[:, None, :]
            visible = visible & (q_ids == kv_ids) & (q_ids >= 0)
        return visible


def _place(blocks, batch, block):
    return take(blocks, (batch % blocks.shape[0], block))


def _call(operands: Operands, problem: Problem) -> Call:
    layout, dtype = operands.layout, compute_dtype(operands)
    k, v = quarantine(operands.k, operands.v)
    factor = tiles.query_factor(problem.scale, problem.softcap)
    q = operands.q.astype(dtype) * jnp.asarray(factor, dtype)
    bias = operands.bias
    views = Views(
        blocked.to_blocks(q, layout.block_q),
        blocked.to_blocks(k, layout.block_kv),
        blocked.to_blocks(v, layout.block_kv),
        None if bias is None else blocked.pairs_to_blocks(bias, layout.block_q, layout.block_kv),
    )
    return Call(
        operands,
        problem,
        views,
        blocked.q_places(operands, layout.block_q),
        blocked.kv_places(operands, layout.block_kv),
    )


class RowItems(NamedTuple):
    """Items that rows of query blocks meet: kv blocks, [rows, K]."""

    block: Any
    is_partial: Any


def _fetch_row_items(lists: Lists):
    start, block, is_partial = (jnp.asarray(x) for x in (lists.rows.start, *lists[1::2]))

    def fetch(rows, turns):
        place = jnp.minimum(take(start, rows)[:, None] + turns[None], block.shape[0] - 1)
        return RowItems(take(block, place), take(is_partial, place))

    return fetch


def _row_logits(call: Call, rows, q, items: RowItems, exists):
    """`(logits [rows, block_q, K * block_kv] in bits, mask or None, k, v)` of one step."""
    layout, views = call.operands.layout, call.views
    q_heads, kv_heads = call.heads
    head = rows // layout.q_blocks
    base = (head // q_heads * kv_heads + head % q_heads // (q_heads // kv_heads)) * layout.kv_blocks
    index = base[:, None] + items.block
    k, v = (_joined(take(x, index)).astype(call.dtype) for x in (views.k, views.v))
    bias = None
    if views.bias is not None:
        bias = take(views.bias, call.bias_index(rows[:, None], items.block)).astype(call.dtype)
        bias = jnp.moveaxis(bias, 1, 2).reshape(rows.shape[0], layout.block_q, -1)
    logits = tiles.bits(tiles.products(q, k), bias, call.problem.softcap)
    if exists is None:
        return logits, None, k, v
    visible = call.visible(rows, items.block[:, 0], items.is_partial[:, 0], exists)
    return jnp.where(visible, logits, -jnp.inf), visible, k, v


def _joined(x):
    """[rows, K, block, D] -> [rows, K * block, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _forward(operands: Operands, problem: Problem, platform: str):
    call, layout = _call(operands, problem), operands.layout
    batch, q_tokens, q_heads, _ = operands.q.shape
    lists = blocked.row_lists(layout, batch, q_heads)

    def begin(rows):
        state = tiles.empty_softmax(
            rows.shape[0], layout.block_q, operands.v.shape[-1], call.dtype
        )
        return (rows, take(call.views.q, rows)), state

    def visit(tile, state, shared, items, exists):
        logits, _, _, v = _row_logits(call, *tile, items, exists)
        return tiles.accumulate(state, logits, v), shared

    visitor = Visitor(begin, _fetch_row_items(lists), visit, lambda tile, state: tiles.settle(state))
    sizes = problem.tiles or tile_sizes(layout, lists.rows.count.shape[0], platform)
    (out, lse), _ = walk(lists.rows, visitor, sizes)
    out, lse = (blocked.from_blocks(x, batch, q_heads, q_tokens) for x in (out, lse))
    return out.astype(operands.q.dtype), lse


class RowCotangents(NamedTuple):
    """What the backward passes know of each query, by block."""

    d_out: Any  # [blocks, block_q, Dv], finite
    lse: Any  # [blocks, block_q] in bits; NaN spoils what the query sees
    delta: Any  # [blocks, block_q]


def _row_cotangents(call: Call, out, lse, cotangents: Cotangents) -> RowCotangents:
    block = call.operands.layout.block_q
    d_out = cotangents.out.astype(call.dtype)
    lse = jnp.where(jnp.isfinite(d_out).all(-1), tiles.lse_in_bits(lse), jnp.nan)
    d_out = cleaned(d_out)
    delta = (d_out * out.astype(call.dtype)).sum(-1) - cotangents.lse.astype(call.dtype)
    return RowCotangents(
        blocked.to_blocks(d_out, block),
        blocked.to_blocks(lse, block, fill=jnp.inf),
        blocked.to_blocks(delta, block),
    )


def _backward(operands, problem, platform, out, lse, cotangents) -> Gradients:
    call = _call(operands, problem)
    rows = _row_cotangents(call, out, lse, cotangents)
    d_q, d_bias = _query_gradient(call, rows, platform)
    d_k, d_v = _key_value_gradient(call, rows, platform)
    return Gradients(
        d_q.astype(operands.q.dtype),
        d_k.astype(operands.k.dtype),
        d_v.astype(operands.v.dtype),
        d_bias,
    )


def _query_gradient(call: Call, cotangents: RowCotangents, platform: str):
    operands, layout = call.operands, call.operands.layout
    batch, q_tokens, q_heads, dim = operands.q.shape
    lists = blocked.row_lists(layout, batch, q_heads)

    def begin(rows):
        known = RowCotangents(*(take(x, rows) for x in cotangents))
        state = jnp.zeros((rows.shape[0], layout.block_q, dim), call.dtype)
        return (rows, take(call.views.q, rows), known), state

    def visit(tile, state, d_bias, items, exists):
        rows, q, known = tile
        logits, visible, k, v = _row_logits(call, rows, q, items, exists)
        weight = tiles.weights(logits, known.lse[..., None])
        gradient = tiles.logit_gradient(
            weight,
            tiles.products(known.d_out, v),
            known.delta[..., None],
            tiles.softcap_slope(logits, call.problem.softcap),
        )
        if visible is not None:
            gradient, k = jnp.where(visible, gradient, 0), cleaned(k)
        if d_bias is not None:
            d_bias = _add_pairs(call, d_bias, rows, items, gradient)
        return state + tiles.matmul(gradient, k), d_bias

    visitor = Visitor(begin, _fetch_row_items(lists), visit, lambda tile, state: state)
    sizes = call.problem.tiles or tile_sizes(layout, lists.rows.count.shape[0], platform)
    d_bias = None if call.views.bias is None else jnp.zeros(call.views.bias.shape, call.dtype)
    d_q, d_bias = walk(lists.rows, visitor, sizes, d_bias)
    if d_bias is not None:
        d_bias = blocked.pairs_from_blocks(d_bias, operands.bias.shape, layout.q_blocks)
        d_bias = d_bias.astype(operands.bias.dtype)
    d_q = blocked.from_blocks(d_q, batch, q_heads, q_tokens)
    return d_q * jnp.asarray(call.problem.scale, call.dtype), d_bias


def _add_pairs(call: Call, d_bias, rows, items: RowItems, gradient):
    """Add a step's logit gradients to the blocks of the bias they belong to."""
    index = call.bias_index(rows[:, None], items.block)
    shape = (*index.shape[:1], gradient.shape[1], index.shape[1], -1)
    return d_bias.at[index].add(jnp.moveaxis(gradient.reshape(shape), 2, 1))


class ColumnItems(NamedTuple):
    """Items that rows of kv blocks meet: q rows (batch, query head, query block), [rows, K]."""

    row: Any
    is_partial: Any


def _fetch_column_items(call: Call, lists: Lists, repeats: int):
    """A list shared by the `repeats` query heads of a kv head is walked once for each of them."""
    layout = call.operands.layout
    start, block, q_head, is_partial = (jnp.asarray(x) for x in (lists.rows.start, *lists[1:]))
    q_heads, kv_heads = call.heads

    def fetch(rows, turns):
        place = take(start, rows)[:, None] + turns[None] // repeats
        place = jnp.minimum(place, block.shape[0] - 1)
        head = rows[:, None] // layout.kv_blocks * (q_heads // kv_heads)
        head = head + take(q_head, place) + turns[None] % repeats
        return ColumnItems(head * layout.q_blocks + take(block, place), take(is_partial, place))

    return fetch


def _key_value_gradient(call: Call, cotangents: RowCotangents, platform: str):
    operands, layout = call.operands, call.operands.layout
    batch, kv_tokens, kv_heads, dim = operands.k.shape
    transposed = layout.transpose(kv_heads, call.heads[0])
    lists = blocked.column_lists(transposed, batch, kv_heads)
    repeats = call.heads[0] // kv_heads // transposed.group
    rows = lists.rows._replace(full=lists.rows.full * repeats, count=lists.rows.count * repeats)
    problem = call.problem

    def begin(columns):
        size = columns.shape[0], layout.block_kv
        k, v = (take(x, columns).astype(call.dtype) for x in (call.views.k, call.views.v))
        state = tuple(jnp.zeros((*size, x.shape[-1]), call.dtype) for x in (k, v))
        return (columns % layout.kv_blocks, k, v), state

    def visit(tile, state, shared, items, exists):
        kv_block, k, v = tile
        q, d_out, lse, delta = (take(x, items.row) for x in (call.views.q, *cotangents))
        q, d_out = _joined(q), _joined(d_out)
        lse, delta = (x.reshape(x.shape[0], 1, -1) for x in (lse, delta))
        bias = None
        if call.views.bias is not None:
            bias = take(call.views.bias, call.bias_index(items.row, kv_block[:, None]))
            bias = bias.reshape(*lse.shape[::2], -1).swapaxes(1, 2).astype(call.dtype)
        logits = tiles.bits(tiles.products(k, q), bias, problem.softcap)
        slope = tiles.softcap_slope(logits, problem.softcap)
        weight = tiles.weights(logits, lse)
        gradient = tiles.logit_gradient(weight, tiles.products(v, d_out), delta, slope)
        if exists is not None:
            visible = call.visible(items.row[:, 0], kv_block, items.is_partial[:, 0], exists)
            visible = visible.swapaxes(1, 2)
            weight, gradient = (jnp.where(visible, x, 0) for x in (weight, gradient))
            q = cleaned(q)
        d_k, d_v = state
        return (d_k + tiles.matmul(gradient, q), d_v + tiles.matmul(weight, d_out)), shared

    fetch = _fetch_column_items(call, lists, repeats)
    visitor = Visitor(begin, fetch, visit, lambda tile, state: state)
    sizes = problem.tiles or tile_sizes(layout, rows.count.shape[0], platform)
    (d_k, d_v), _ = walk(rows, visitor, sizes)
    d_k, d_v = (blocked.from_blocks(x, batch, kv_heads, kv_tokens) for x in (d_k, d_v))
    # The queries came with query_factor; what is wanted is `scale`.
    return (d_k if problem.softcap is not None else d_k / tiles.LOG2_E), d_v
