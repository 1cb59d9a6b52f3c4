"""Selected attention in chunks of queries: shared by all backends that compute tiles.

A backend computes the tiles of one chunk of queries of one kv head. Here calls are cut into chunks,
and the partial results of a query's slots are merged. The tiles of a chunk are the kv-major inverse
of its queries' block lists: queries that selected the same block.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from xsake.kernels import blocking
from xsake.kernels import online_softmax as softmax
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.online_softmax import isolate_nonfinite
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.kernels.sharding import axes_of, vary


class QueryTiles(NamedTuple):
    """Queries by selected block; tiles of one block are neighbours, its queries in their order.

    A query's index in its tile depends on earlier queries alone, so no later query can change a bit
    of its result.
    """

    query: Int[Array, "W tile"]  # the number of queries where there is none
    block: Int[Array, " W"]
    total: Int[Array, ""]  # tiles in use
    place: Int[Array, "Tq Ns"]  # of each (query, slot) in `query`, flat; W * tile if unused


def max_tiles(queries: int, slots: int, kv_blocks: int, tile: int) -> int:
    """Maximum number of tiles: every block has at most one tile that is not full."""
    return queries * slots // tile + min(kv_blocks, queries * slots)


def route_queries(
    blocks: Int[Array, "Tq Ns"], kv_blocks: int, tile: int, capacity: int
) -> QueryTiles:
    """Tiles of `tile` queries from the blocks of every query, in time linear but for one sort."""
    queries, slots = blocks.shape
    items = queries * slots
    flat = jnp.where(blocks < 0, kv_blocks, blocks).reshape(items).astype(jnp.int32)
    numbers = jnp.arange(items, dtype=jnp.int32)
    owner, item = lax.sort((flat, numbers), num_keys=1, is_stable=True)
    begins = jnp.searchsorted(owner, jnp.arange(kv_blocks + 1)).astype(jnp.int32)
    tiles = -(-(begins[1:] - begins[:-1]) // tile)
    ends = jnp.cumsum(tiles)
    first = jnp.append(ends - tiles, capacity)
    rank = numbers - begins[owner]
    place = jnp.where(owner < kv_blocks, first[owner] * tile + rank, capacity * tile)
    query = jnp.full(capacity * tile, queries, jnp.int32)
    query = query.at[place].set(item // slots, mode="drop").reshape(capacity, tile)
    block = jnp.searchsorted(ends, jnp.arange(capacity), side="right").astype(jnp.int32)
    inverse = jnp.zeros(items, jnp.int32).at[item].set(place, unique_indices=True)
    return QueryTiles(
        query, jnp.minimum(block, kv_blocks - 1), ends[-1], inverse.reshape(queries, slots)
    )


class SelectedTuning(NamedTuple):
    """Tuning of a platform; it changes no result beyond rounding."""

    rows: int  # of a tile, the query heads of a group counted
    tiles: int  # of a step
    queries: int  # fewest of a chunk, whose partial results are kept at once


class ChunkSizes(NamedTuple):
    """Sizes of tiles and chunks."""

    tile: int  # queries of a tile
    step: int  # tiles computed together
    chunk: int  # queries of a chunk
    chunks: int  # of a kv head
    capacity: int  # tiles of a chunk
    group: int  # query heads of a kv head

    @property
    def rows(self) -> int:
        """Of a tile: (query, head of the group) pairs."""
        return self.tile * self.group

    @property
    def slots(self) -> int:
        """Capacity plus one step of empty tiles, which unused slots read."""
        return self.capacity + self.step


class ChunkedCall(NamedTuple):
    """The arrays of a call by kv head (batch times head), tokens in chunks and blocks."""

    q: Any  # [heads, chunks, chunk, G * D], as the caller has it
    blocks: Any  # [heads, chunks, chunk, slots]
    positions: Any  # [heads or 1, chunks, chunk]; -1 sees nothing
    k: Any  # [heads, Nk, block, D], NaN where the value is not finite
    v: Any  # [heads, Nk, block, Dv], finite


class Chunk(NamedTuple):
    """One chunk of one kv head; the last row of the queries is padding."""

    q: Any  # [chunk + 1, G * D]
    positions: Any  # [chunk + 1]
    k: Any  # [Nk, block, D]
    v: Any  # [Nk, block, Dv]


class ChunkResiduals(NamedTuple):
    """Residuals of a chunk's queries; the last row is padding."""

    do: Any  # [chunk + 1, G * Dv]
    lse: Any  # [chunk + 1, G], base 2; +inf: p = 0
    delta: Any  # [chunk + 1, G]


class PartialSoftmax(NamedTuple):
    """Partial softmaxes of the rows of every tile, base 2."""

    acc: Any  # [slots, rows, Dv]
    m: Any  # [slots, rows]; -inf where no key is visible
    l: Any  # [slots, rows]


class TileGradients(NamedTuple):
    """Gradients of a kv head's tiles, not scaled; dk and dv are sums over chunks."""

    dq: Any  # [slots, rows, D]
    dk: Any  # [Nk, block, D]
    dv: Any  # [Nk, block, Dv]


class ChunkTiles(NamedTuple):
    """A chunk and its tiles: what a backend computes at a time.

    A backend has two functions of it. `visit_forward(call, partial)` returns the partial softmaxes
    of the tiles. `visit_backward(call, residuals, sums)` returns dq of the tiles' rows, and dk and
    dv added to those of `sums`.
    """

    sizes: ChunkSizes
    config: SelectedConfig
    dtype: Any  # of the caller's arrays
    interpret: Any  # as in `pallas_call`
    chunk: Chunk
    tiles: QueryTiles

    def gather_rows(self, x: Array) -> Array:
        """Rows [slots, rows, ...] of all tiles; unused tiles read the padding row."""
        sizes = self.sizes
        padding = jnp.full((sizes.step, sizes.tile), sizes.chunk, jnp.int32)
        query = jnp.concatenate([self.tiles.query, padding])
        return x.at[query].get(mode="promise_in_bounds").reshape(sizes.slots, sizes.rows, -1)

    def position_rows(self) -> Array:
        """[slots, 1, rows]: the position of every row of every tile."""
        rows = self.gather_rows(jnp.repeat(self.chunk.positions[:, None], self.sizes.group, axis=1))
        return rows.reshape(self.sizes.slots, 1, self.sizes.rows)

    def slot_blocks(self) -> Array:
        """The block of every slot [slots]; unused ones stay at the last block."""
        last = jnp.maximum(self.tiles.total - 1, 0)
        return self.tiles.block[jnp.minimum(jnp.arange(self.sizes.slots, dtype=jnp.int32), last)]


def chunk_sizes(
    inputs: SelectedInputs, config: SelectedConfig, tuning: SelectedTuning
) -> ChunkSizes:
    """Tiles of few rows that stay nearly full: chunks grow with the number of blocks."""
    q, k, _, blocks, _ = inputs
    queries, slots = q.shape[1], blocks.shape[-1]
    kv_blocks, group = -(-k.shape[1] // config.block), q.shape[2] // k.shape[2]
    tile = min(2 ** max(0, math.ceil(math.log2(tuning.rows / group)) - 1), queries)
    size = max(tuning.queries, 4 * tile * kv_blocks // slots)
    chunks = -(-queries // min(size, queries))
    chunk = -(-queries // chunks)
    capacity = max_tiles(chunk, slots, kv_blocks, tile)
    step = min(tuning.tiles, capacity)
    return ChunkSizes(tile, step, chunk, chunks, -(-capacity // step) * step, group)


def _cut_call(inputs: SelectedInputs, config: SelectedConfig, cut: ChunkSizes) -> ChunkedCall:
    batch, tokens, heads, _ = inputs.k.shape
    k, v = isolate_nonfinite(*(x.astype(inputs.dtype) for x in inputs[1:3]))

    def in_blocks(x: Array) -> Array:
        pad = ((0, 0), (0, -tokens % config.block), (0, 0), (0, 0))
        x = blocking.by_kv_head(jnp.pad(x, pad))
        return x.reshape(batch * heads, -1, config.block, x.shape[-1])

    positions = jnp.repeat(inputs.positions, heads, axis=0)
    if inputs.q_positions is None:
        positions = positions[:1]
    spare = cut.chunks * cut.chunk - inputs.q.shape[1]
    positions = jnp.pad(positions, ((0, 0), (0, spare)), constant_values=-1)
    blocks = blocking.by_kv_head(inputs.blocks)
    blocks = jnp.pad(blocks, ((0, 0), (0, spare), (0, 0)), constant_values=-1)
    return ChunkedCall(
        _to_groups(inputs.q, heads, cut),
        blocks.reshape(*blocks.shape[:1], cut.chunks, cut.chunk, -1),
        positions.reshape(-1, cut.chunks, cut.chunk),
        in_blocks(k),
        in_blocks(v),
    )


def _to_groups(x: Array, heads: int, cut: ChunkSizes) -> Array:
    """[B, Tq, Hq, ...] as [batch * kv heads, chunks, chunk, G * ...], zeros after the end."""
    x = blocking.to_chunks(x, heads, cut.chunks, cut.chunk)
    return x.reshape(*x.shape[:3], -1)


def _from_groups(x: Array, like: Array, dim: int | None) -> Array:
    """The inverse: [heads, chunks, chunk, G (, dim)] as [B, Tq, Hq (, dim)]."""
    batch, tokens, q_heads, _ = like.shape
    x = x.reshape(batch, x.shape[0] // batch, -1, *x.shape[3:])[:, :, :tokens]
    shape = (batch, tokens, q_heads) if dim is None else (batch, tokens, q_heads, dim)
    return jnp.moveaxis(x, 1, 2).reshape(shape)


def _add_padding_row(x: Array, value: int = 0) -> Array:
    """One more row, for slots of a tile without a query."""
    return jnp.pad(x, ((0, 1),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


def _sum_slots(partial: Array, place: Array, weight: Array | None = None) -> Array:
    """Sum the partial results of a query's slots, [queries, G, dim]; unused ones are zero."""

    def add(total: Array, slot: tuple[Array, Array | None]):
        where, factor = slot
        part = partial.at[where].get(mode="promise_in_bounds")
        return total + (part if factor is None else factor[..., None] * part), None

    factors = None if weight is None else jnp.moveaxis(weight, 1, 0)
    start = jnp.zeros((place.shape[0], *partial.shape[1:]), partial.dtype)
    start = vary(start, axes_of(partial))
    return lax.scan(add, start, (place.T, factors), unroll=min(8, place.shape[1]))[0]


def define_backend(
    tuning: Callable[[str], SelectedTuning],
    visit_forward: Callable[[ChunkTiles, PartialSoftmax], PartialSoftmax],
    visit_backward: Callable[[ChunkTiles, ChunkResiduals, TileGradients], TileGradients],
) -> tuple[Callable[..., tuple[Array, Array]], Callable[..., Gradients]]:
    """Make `forward` and `backward` of a backend, as `dispatch` calls them.

    `tuning` is that of a platform; `interpret` is that of the backend's kernels, False on a device.
    """

    def forward(
        inputs: SelectedInputs, config: SelectedConfig, platform: str, interpret: Any = False
    ) -> tuple[Array, Array]:
        return _forward(inputs, config, tuning(platform), visit_forward, interpret)

    def backward(
        inputs: SelectedInputs, config: SelectedConfig, platform: str,
        *residuals: Array, interpret: Any = False,
    ) -> Gradients:  # fmt: skip
        return _backward(inputs, config, tuning(platform), visit_backward, residuals, interpret)

    return forward, backward


def _forward(
    inputs: SelectedInputs,
    config: SelectedConfig,
    tuning: SelectedTuning,
    visit: Callable[..., PartialSoftmax],
    interpret: Any,
) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    cut = chunk_sizes(inputs, config, tuning)
    call, dim, dtype = _cut_call(inputs, config, cut), inputs.v.shape[-1], inputs.dtype

    def one(partial: PartialSoftmax, number: Array):
        chunk, tiles = _chunk_of(call, number // cut.chunks, number % cut.chunks, cut)
        partial = visit(ChunkTiles(cut, config, inputs.q.dtype, interpret, chunk, tiles), partial)
        return partial, _merge_slots(partial, tiles.place, cut)

    partial = PartialSoftmax(
        jnp.zeros((cut.slots, cut.rows, dim), dtype),
        jnp.full((cut.slots, cut.rows), -jnp.inf, dtype),
        jnp.zeros((cut.slots, cut.rows), dtype),
    )
    heads = call.q.shape[0]
    partial = vary(partial, axes_of(inputs.q))
    _, (out, lse) = lax.scan(one, partial, jnp.arange(heads * cut.chunks))
    shaped = lambda x: x.reshape(heads, cut.chunks, *x.shape[1:])
    out = _from_groups(shaped(out), inputs.q, dim).astype(inputs.q.dtype)
    return out, _from_groups(shaped(lse), inputs.q, None)


def _merge_slots(partial: PartialSoftmax, place: Array, cut: ChunkSizes) -> tuple[Array, Array]:
    """`(o, lse)` of a chunk's queries from their partial softmaxes."""
    acc, m, l = (x.reshape(-1, cut.group, *x.shape[2:]) for x in partial)
    m, l = (x.at[place].get(mode="promise_in_bounds") for x in (m, l))
    m_row = m.max(1)
    alpha = softmax.exp2(m - jnp.where(m_row == -jnp.inf, 0, m_row)[:, None])
    l_row = (alpha * l).sum(1)
    o = _sum_slots(acc, place, alpha)
    return softmax.normalize(o, l_row[..., None]), softmax.log_sum_exp(m_row, l_row)


def _backward(
    inputs: SelectedInputs,
    config: SelectedConfig,
    tuning: SelectedTuning,
    visit: Callable[..., TileGradients],
    residuals: tuple[Array, ...],
    interpret: Any,
) -> Gradients:
    """Gradients from the residuals (o, lse, do, dlse)."""
    cut = chunk_sizes(inputs, config, tuning)
    call, dtype = _cut_call(inputs, config, cut), inputs.dtype
    o, lse, do, dlse = residuals
    do = do.astype(dtype)
    delta = (do * o.astype(dtype)).sum(-1) - dlse.astype(dtype)
    arrays = do, softmax.lse_to_base(lse), delta
    given = [_to_groups(x, inputs.k.shape[2], cut) for x in arrays]
    dim, axes = inputs.q.shape[3], axes_of(inputs.q)

    def of_head(buffer: Array, head: Array):
        def one(sums: TileGradients, part: Array):
            chunk, tiles = _chunk_of(call, head, part, cut)
            rows = ChunkResiduals(*(_add_padding_row(x[head, part]) for x in given))
            tiled = ChunkTiles(cut, config, inputs.q.dtype, interpret, chunk, tiles)
            sums = visit(tiled, rows, sums)
            return sums, _sum_slots(sums.dq.reshape(-1, cut.group, dim), tiles.place)

        start = TileGradients(buffer, jnp.zeros_like(call.k[0]), jnp.zeros_like(call.v[0]))
        (buffer, dk, dv), dq = lax.scan(one, vary(start, axes), jnp.arange(cut.chunks))
        return buffer, (dq, dk, dv)

    buffer = vary(jnp.zeros((cut.slots, cut.rows, dim), dtype), axes)
    _, (dq, dk, dv) = lax.scan(of_head, buffer, jnp.arange(call.q.shape[0]))
    return Gradients(
        _from_groups(dq * config.scale, inputs.q, dim).astype(inputs.q.dtype),
        blocking.from_kv_heads(dk * config.scale, inputs.k),
        blocking.from_kv_heads(dv, inputs.v),
    )


def _chunk_of(
    call: ChunkedCall, head: Array, part: Array, cut: ChunkSizes
) -> tuple[Chunk, QueryTiles]:
    """One chunk of one kv head, and its tiles."""
    chunk = Chunk(
        _add_padding_row(call.q[head, part]),
        _add_padding_row(call.positions[head % call.positions.shape[0], part], -1),
        call.k[head],
        call.v[head],
    )
    return chunk, route_queries(call.blocks[head, part], call.k.shape[1], cut.tile, cut.capacity)
