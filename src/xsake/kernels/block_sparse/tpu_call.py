"""Launches TPU kernels over a ragged list: blocks, index maps, grid, scratch; knows no attention.

Every array is cut into blocks first, [blocks, ...], so that one block is one index and its last two
axes are whole: then any block size and any head dimension can be tiled.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse.problem import Operands
from xsake.kernels.block_sparse.ragged_grid import RaggedGrid, quotient, remainder
from xsake.kernels.block_sparse.tpu_lists import Listing
from xsake.kernels.block_sparse.tpu_step import Group
from xsake.kernels.block_sparse.work_list import FLAG_BITS
from xsake.kernels.varying import axes_of, shape_of_result, vary


class QuerySide(NamedTuple):
    """What is known of a query block; None where a pass does not need it."""

    q: Any  # [block_q, D]
    d_out: Any  # [block_q, Dv]
    lse: Any  # [1, block_q]
    delta: Any  # [1, block_q]
    positions: Any  # [1, block_q]
    segments: Any  # [1, block_q]


class KeySide(NamedTuple):
    """What is known of a kv block."""

    k: Any  # [block_kv, D]
    v: Any  # [block_kv, Dv], or [Dv, block_kv]
    positions: Any  # [1, block_kv]
    segments: Any  # [1, block_kv]


class Visitor(NamedTuple):
    """What a pass does with a row.

    name: of the pass, as profiles show it.
    open(own, sums): begin.
    visit(group, own, met, sums, careful): take a group of blocks; if careful, under element masks.
    close(results, sums): write what the row gives.
    """

    name: str
    open: Callable
    visit: Callable
    close: Callable


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """One pass of a call over a list.

    Args:
        operands: the call.
        listing: the list, and where its steps find their blocks.
        interpret: what `pallas_call` takes: False on a TPU.
        estimate: flops and bytes, for the compiler's scheduler.
    """

    operands: Operands
    listing: Listing
    interpret: Any
    estimate: pl.CostEstimate

    @property
    def _grid(self) -> RaggedGrid:
        return self.listing.grid

    @property
    def _layout(self):
        return self.operands.layout

    def queries(self, q, d_out=None, lse=None, delta=None) -> QuerySide:
        """The query side by block."""
        block, given = self._layout.block_q, self.operands
        return QuerySide(
            _blocks(q, block),
            None if d_out is None else _blocks(d_out, block),
            None if lse is None else _rows(lse, block, jnp.inf),
            None if delta is None else _rows(delta, block, 0),
            _lanes(given.q_positions, block, 0),
            _lanes(given.q_segment_ids, block, -1),
        )

    def keys(self, k, v, transposed_values: bool = False) -> KeySide:
        """The key side by block."""
        block, given = self._layout.block_kv, self.operands
        v = _blocks(v, block)
        return KeySide(
            _blocks(k, block),
            v.swapaxes(1, 2) if transposed_values else v,
            _lanes(given.kv_positions, block, 0),
            _lanes(given.kv_segment_ids, block, -1),
        )

    def query_tokens(self, x):
        """[blocks, block_q, ...] -> [B, Tq, Hq, ...]."""
        return _tokens(x, self._grid.q_heads, self._grid.q_blocks, self._layout.q_tokens)

    def key_tokens(self, x):
        """[blocks, block_kv, ...] -> [B, Tk, Hk, ...]."""
        return _tokens(x, self._grid.kv_heads, self._grid.kv_blocks, self._layout.kv_tokens)

    def run(self, visitor: Visitor, own, met, results, sums, *, keys_first: bool):
        """Walk the list: launch after launch, each adding its rows to the results.

        Args:
            visitor: what is done with a row.
            own, met: a `QuerySide` and a `KeySide`: the row's own, and what its items name.
            results: (shape, dtype) of one block of each result.
            sums: shapes of the float32 sums that stay while a row is walked.
            keys_first: tiles of logits are [keys, queries].
        """
        grid, work, like = self._grid, self.listing.work, self.operands.q
        shown, numbers = self.listing.element_masks(keys_first)
        met = Met(met, None if shown is None else jnp.asarray(shown))
        kernel = functools.partial(_kernel, self.listing, visitor, len(results), keys_first)
        found: Any = []
        for launch in range(work.cut.launches):
            lists = Lists(
                work.words[launch],
                numbers[launch],
                work.starts[launch],
                work.middles[launch],
                work.bounds[launch],
                self.listing.tables,
            )
            inputs = own, met, found
            found = pl.pallas_call(
                kernel,
                out_shape=[shape_of_result((grid.rows, *x), dtype, like) for x, dtype in results],
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=len(lists),
                    grid=(work.cut.parts, grid.copies, self.listing.turns(launch)),
                    in_specs=[
                        self._own_specs(own),
                        *jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), inputs[1:]),
                    ],
                    out_specs=[pl.BlockSpec((None, *x), self._own_block) for x, _ in results],
                    scratch_shapes=[
                        [pltpu.VMEM(shape, jnp.float32) for shape in sums],
                        jax.tree.map(self._buffer, met),
                        pltpu.SemaphoreType.DMA((2, len(jax.tree.leaves(met)), work.cut.slots)),
                    ],
                ),
                input_output_aliases=_aliases(lists, inputs),
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary"),
                    # Lists are in range by construction, and every check costs bundles.
                    disable_bounds_checks=True,
                ),
                cost_estimate=self.estimate,
                interpret=self.interpret,
                name=f"block_sparse_{visitor.name}",
            )(*vary(tuple(map(jnp.asarray, lists)), axes_of(like)), *inputs)
        return found

    def _buffer(self, x):
        """Room for two groups of blocks: one is computed while the other arrives."""
        return pltpu.VMEM((2, self.listing.work.cut.slots, *x.shape[1:]), x.dtype)

    def _own_block(self, part, copy, turn, *lists):
        """The index map of what a row owns."""
        row, _ = _row_of(Lists(*lists), part, turn)
        return self._grid.own_number(row, copy), 0, 0

    def _own_specs(self, side):
        """Own blocks by number, positions and segments by batch element."""

        def spec(name, x):
            if x is None:
                return None
            index = self._own_block
            if name in _BY_BATCH:
                index = lambda *at: (_by_batch(self._grid, x, self._own_block(*at)[0], True), 0, 0)
            return pl.BlockSpec((None, *x.shape[1:]), index)

        return type(side)(*(spec(name, x) for name, x in side._asdict().items()))


class Met(NamedTuple):
    """What the blocks of a list bring along."""

    side: Any  # a `QuerySide` or a `KeySide`
    shown: Any  # element masks, or None


class Lists(NamedTuple):
    """What a launch has in scalar memory."""

    words: Any
    numbers: Any
    starts: Any
    middles: Any
    bounds: Any
    tables: Any


_BY_BATCH = ("positions", "segments")


def _by_batch(grid: RaggedGrid, x, number, is_own: bool):
    """Where the positions or segments of a block are: by batch element, or one for all."""
    heads, blocks = grid.met_heads, grid.met_blocks
    if is_own:
        heads, blocks = grid.own_heads, grid.own_blocks
    block = remainder(number, blocks)
    if x.shape[0] == blocks:
        return block
    return quotient(number, heads * blocks) * blocks + block


def _row_of(lists: Lists, part, turn):
    """`(row, whether it is this turn's)`: a part that is through stays on its last row.

    What a kernel leaves is written back, so it must not leave a row for one it does not compute.
    """
    row, last = lists.bounds[part] + turn, lists.bounds[part + 1] - 1
    return jnp.minimum(row, last), row <= last


def _aliases(lists: Lists, inputs: tuple) -> dict[int, int]:
    """Each launch writes into what the launches before it left."""
    *others, found = inputs
    first = len(lists) + len(jax.tree.leaves(others))
    return {first + number: number for number in range(len(found))}


def _kernel(listing: Listing, visitor: Visitor, results: int, keys_first: bool, *refs):
    """One row: its own block against all blocks that it lists.

    Grid    (part, copy, turn); parts and copies are independent, turns are rows one after another.
    Reads   own blocks of the row; group after group of the blocks it lists, copied by hand: while
            one group is computed the next one arrives, across the borders of rows too.
    Loops   first over careful groups, then over plain ones, carrying the sums in scratch memory.
    Writes  the row's results, after its last group.
    """
    count = len(Lists._fields)
    lists, (own, met, _, *rest) = Lists(*refs[:count]), refs[count:]
    out, (sums, buffers, semaphores) = rest[:results], rest[results:]
    part, copy, turn = (pl.program_id(axis) for axis in range(3))
    row, is_active = _row_of(lists, part, turn)
    base = lists.bounds[0]
    at, end = row - base, lists.starts[lists.bounds[part + 1] - base]
    fetch = Fetch(listing, lists, met, buffers, semaphores, listing.grid.met_shift(copy))
    own_number = listing.grid.own_number(row, copy)

    @pl.when(turn == 0)
    def _():
        fetch.start(lists.starts[lists.bounds[part] - base])

    def take(careful: bool):
        def body(number, _):
            fetch.start(number + 1)
            fetch.wait(number)
            arrived = fetch.arrived(number)
            group = Group(
                listing,
                own_number,
                fetch.blocks(number),
                fetch.words(number),
                [slot.shown for slot in arrived],
                lists.tables,
                keys_first,
            )
            visitor.visit(group, own, [slot.side for slot in arrived], sums, careful)
            return 0

        return body

    @pl.when(is_active)
    def _():
        visitor.open(own, sums)
        middle = lists.middles[at]
        lax.fori_loop(lists.starts[at], middle, take(True), 0)
        lax.fori_loop(middle, lists.starts[at + 1], take(False), 0)
        visitor.close(out, sums)

    @pl.when(is_active & (row == lists.bounds[part + 1] - 1))
    def _():
        fetch.wait(end)  # the group that nobody takes


class Fetch:
    """Copies groups of blocks into the two halves of the buffers, in turns."""

    def __init__(self, listing: Listing, lists: Lists, met: Met, buffers: Met, semaphores, shift):
        self._grid, self._slots = listing.grid, listing.work.cut.slots
        self._lists, self._buffers = lists, buffers
        self._semaphores, self._shift = semaphores, shift
        pairs = zip(_named(met), _named(buffers), strict=True)
        self._arrays = [(name, source, buffer) for (name, source), (_, buffer) in pairs]

    def words(self, number) -> list:
        """The words of a group."""
        return [self._lists.words[number * self._slots + slot] for slot in range(self._slots)]

    def blocks(self, number) -> list:
        """Numbers of a group's blocks."""
        return [(word >> FLAG_BITS) + self._shift for word in self.words(number)]

    def start(self, number) -> None:
        """Begin to copy a group."""
        for slot, block in enumerate(self.blocks(number)):
            for which, (name, source, _) in enumerate(self._arrays):
                index = block
                if name == "shown":
                    index = self._lists.numbers[number * self._slots + slot]
                elif name in _BY_BATCH:
                    index = _by_batch(self._grid, source, block, False)
                self._copy(number, slot, which, index).start()

    def wait(self, number) -> None:
        """Until a group has arrived."""
        for slot in range(self._slots):
            for which in range(len(self._arrays)):
                self._copy(number, slot, which, 0).wait()

    def _copy(self, number, slot: int, which: int, index):
        _, source, buffer = self._arrays[which]
        half = number & 1
        semaphore = self._semaphores.at[half, which, slot]
        return pltpu.make_async_copy(source.at[index], buffer.at[half, slot], semaphore)

    def arrived(self, number) -> list[Met]:
        """What a group has brought, slot by slot, as refs."""
        view = lambda slot: jax.tree.map(lambda x: x.at[number & 1, slot], self._buffers)
        return [view(slot) for slot in range(self._slots)]


def _named(met: Met) -> list[tuple[str, Any]]:
    """The arrays that there are, by name."""
    every = [*met.side._asdict().items(), ("shown", met.shown)]
    return [(name, x) for name, x in every if x is not None]


def _blocks(x, block: int):
    """[B, T, H, D] -> [B * H * N, block, D]."""
    batch, tokens, heads, dim = x.shape
    x = jnp.moveaxis(_filled(x, block, 0), 2, 1)
    return x.reshape(batch * heads * -(-tokens // block), block, dim)


def _rows(x, block: int, fill):
    """[B, T, H] -> [B * H * N, 1, block]."""
    return jnp.moveaxis(_filled(x, block, fill), 2, 1).reshape(-1, 1, block)


def _lanes(x, block: int, fill: int):
    """[B, T] -> [B * N, 1, block]; None stays None."""
    return None if x is None else _filled(x, block, fill).reshape(-1, 1, block)


def _filled(x, block: int, fill):
    missing = -x.shape[1] % block
    widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill) if missing else x


def _tokens(x, heads: int, blocks: int, tokens: int):
    """[B * H * N, block, ...] -> [B, T, H, ...]."""
    x = x.reshape(-1, heads, blocks * x.shape[1], *x.shape[2:])
    return jnp.moveaxis(x, 1, 2)[:, :tokens]
