"""Launches GPU kernels over a ragged list: arrays, tiles, copies, loops; knows no attention.

Arrays stay [B, T, H, D], as callers have them, seen as [B, T, H * D]: tiles are cut out of them
where they lie. Only what does not fill a tile is padded, and only then is there a copy.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from xsake.kernels import mosaic_gpu_compat as gpu
from xsake.kernels.block_sparse.gpu_arrays import (
    numbers_of,
    restored,
    room_of,
    statistic_of,
    tokens_of,
)
from xsake.kernels.block_sparse.gpu_lists import Listing, Lists, Tile, arrays
from xsake.kernels.block_sparse.gpu_pieces import summed
from xsake.kernels.block_sparse.gpu_step import Pairs, Place, place_of
from xsake.kernels.block_sparse.problem import Operands
from xsake.kernels.block_sparse.ragged_grid import quotient, remainder
from xsake.kernels.varying import axes_of, vary

# One tile is computed while the next one arrives.
STAGES = 2
# What is copied into shared memory, and what is read where it is.
_TILES = ("q", "d_out", "k", "v")
_STATISTICS = ("lse", "delta", "poison")


class QuerySide(NamedTuple):
    """What is known of queries; None where a pass does not need it."""

    q: Any  # [B, T, H * D]
    d_out: Any  # [B, T, H * Dv]
    lse: Any  # [B, H, T]
    delta: Any  # [B, H, T]
    positions: Any  # [B or 1, T]
    segments: Any  # [B or 1, T]


class KeySide(NamedTuple):
    """What is known of keys."""

    k: Any  # [B, T, H * D]
    v: Any  # [B, T, H * Dv]
    poison: Any  # [B, H, T]: NaN where a key is not finite, else 0
    positions: Any  # [B or 1, T]
    segments: Any  # [B or 1, T]


class Visitor(NamedTuple):
    """What a pass does with a tile of a row.

    name: of the pass, as profiles show it.
    open(own) -> state: begin.
    visit(pairs, own, met, state, careful) -> state: take a tile; if careful, under an element mask.
    close(state) -> results: what the row gives, one for each result of the pass.
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
        listing: the list, and how blocks are cut.
        machine: how a GPU, or the interpreter, does what the kernel wants.
        team: how warp groups share the work of a thread block.
    """

    operands: Operands
    listing: Listing
    machine: gpu.Machine
    team: gpu.Team = gpu.Team()

    @property
    def _q_tile(self) -> Tile:
        return self.listing.met if self.listing.grid.is_kv_major else self.listing.own

    @property
    def _kv_tile(self) -> Tile:
        return self.listing.own if self.listing.grid.is_kv_major else self.listing.met

    def queries(self, q, d_out=None, lse=None, delta=None) -> QuerySide:
        """The query side."""
        given, tile = self.operands, self._q_tile
        return QuerySide(
            tokens_of(q, tile),
            None if d_out is None else tokens_of(d_out, tile),
            None if lse is None else statistic_of(lse, tile, jnp.inf),
            None if delta is None else statistic_of(delta, tile, 0),
            numbers_of(given.q_positions, tile, 0),
            numbers_of(given.q_segment_ids, tile, -1),
        )

    def keys(self, k, v, poison=None) -> KeySide:
        """The key side."""
        given, tile = self.operands, self._kv_tile
        return KeySide(
            tokens_of(k, tile),
            tokens_of(v, tile),
            None if poison is None else statistic_of(poison, tile, 0),
            numbers_of(given.kv_positions, tile, 0),
            numbers_of(given.kv_segment_ids, tile, -1),
        )

    def run(self, visitor: Visitor, own, met, results):
        """Walk the list.

        Args:
            visitor: what is done with a row.
            own, met: a `QuerySide` and a `KeySide`: the row's own, and what its items name.
            results: (features or None for a statistic, dtype) of each result.

        Returns:
            The results, [B, T, H, features] or [B, T, H].
        """
        listing, grid = self.listing, self.listing.grid
        shapes = [self._result(*result) for result in results]
        inputs = arrays(listing.lists), own, met, _shown(listing)
        flat, tree = jax.tree.flatten(inputs)
        scratch = self._scratch(own, met)

        walk_row = _with_team if self.team.workers else _alone

        def body(program, *refs):
            given, rest = jax.tree.unflatten(tree, refs[: len(flat)]), refs[len(flat) :]
            memory = Memory(*_unflattened(scratch, rest[len(results) :]))
            row = Row(self, visitor, Program(program, *given), rest[: len(results)], memory)
            walk_row(row)

        call = gpu.launch(
            body,
            shapes,
            [leaf for group in scratch for leaf in group],
            listing.programs // max(self.team.workers, 1),
            name=f"block_sparse_{visitor.name}",
            interpret=self.machine.interpret,
            team=self.team,
        )
        axes = axes_of(self.operands.q)
        # Mosaic GPU's results come without the axes that they vary over.
        found = vary(call(*vary(flat, axes)), axes)
        if listing.most > 1:
            found = [summed(x, listing.first, listing.most, grid) for x in found]
        own_tokens = self.listing.listed.q_tokens
        if grid.is_kv_major:
            own_tokens = self.listing.listed.kv_tokens
        return [
            restored(x, listing.own, own_tokens, features).astype(dtype)
            for x, (features, dtype) in zip(found, results, strict=True)
        ]

    def _result(self, features: int | None, dtype) -> jax.ShapeDtypeStruct:
        """What the kernel writes: a result as it will be, or a sum for every piece of a row."""
        listing, grid = self.listing, self.listing.grid
        room = listing.own.room
        if listing.most > 1:
            assert features is not None, "statistics of pieces do not add up"
            pieces = listing.lists.rows.shape[0] * grid.copies
            return jax.ShapeDtypeStruct((pieces, room, room_of(features)), jnp.float32)
        tokens = grid.own_blocks * room
        shape = grid.batch, grid.own_heads, tokens
        if features is not None:
            shape = grid.batch, tokens, grid.own_heads * room_of(features)
        return jax.ShapeDtypeStruct(shape, dtype)

    def _scratch(self, own, met) -> tuple[list, ...]:
        """Shared memory of own tiles and of met ones, and the barriers of both."""
        grid, machine, team = self.listing.grid, self.machine, self.team
        own_shape = (team.workers or 1, self.listing.own.tile)
        met_shape = STAGES, self.listing.met.tile
        of = lambda side, shape, heads: [
            gpu.shared((*shape, x.shape[-1] // heads), x.dtype, machine) for x in _tiles(side)
        ]
        own_tiles, met_tiles = (
            of(own, own_shape, grid.own_heads),
            of(met, met_shape, grid.met_heads),
        )
        return (
            own_tiles,
            met_tiles,
            machine.barriers(len(own_tiles), own_shape[0]),
            machine.barriers(len(met_tiles), STAGES),
            team.barriers(STAGES) if team.workers else [],
        )


class Program(NamedTuple):
    """What a thread block reads."""

    number: Any
    lists: Lists
    own: Any
    met: Any
    shown: Any


class Memory(NamedTuple):
    """Shared memory of a thread block."""

    own: Any
    met: Any
    own_barriers: Any
    met_barriers: Any
    read_barriers: Any


class Row:
    """One tile of a piece of a row, or one for each worker: what a thread block computes."""

    def __init__(self, walk: Walk, visitor: Visitor, program: Program, results, memory: Memory):
        self.walk, self.visitor, self.program = walk, visitor, program
        self.results, self.memory = results, memory
        self.listing, self.lists, self.grid = walk.listing, program.lists, walk.listing.grid
        groups = self.listing.own.parts // max(walk.team.workers, 1)
        self._group = remainder(program.number, groups)
        turn = quotient(program.number, groups)
        self._turn = quotient(turn, self.grid.copies)
        self._copy = remainder(turn, self.grid.copies)
        self._own_number = self.grid.own_number(self.lists.rows[self._turn], self._copy)
        self._first, parts = self.lists.starts[self._turn], self.listing.met.parts
        self.steps = (self.lists.stops[self._turn] - self._first) * parts
        self.careful = (self.lists.middles[self._turn] - self._first) * parts

    def own(self, worker: Any) -> Place:
        """Where the tile of a worker is."""
        part = self._group * max(self.walk.team.workers, 1) + worker
        grid = self.grid
        return place_of(self._own_number, part, self.listing.own, grid.own_heads, grid.own_blocks)

    def _met(self, step: Any) -> tuple[Any, Place]:
        """The item of a step, and where its tile is."""
        grid, parts = self.grid, self.listing.met.parts
        item = self._first + quotient(step, parts)
        number = self.lists.numbers[item] + grid.met_shift(self._copy)
        part = remainder(step, parts)
        return item, place_of(number, part, self.listing.met, grid.met_heads, grid.met_blocks)

    def fetch(self, step: Any) -> None:
        """Begin to copy what a step meets."""
        slot, (_, place) = lax.rem(step, STAGES), self._met(step)
        for source, target in zip(_tiles(self.program.met), self.memory.met, strict=True):
            index, barriers = place.tokens(*target.shape[1:]), self.memory.met_barriers
            self.walk.machine.copy(source.at[index], target.at[slot], barriers, slot)

    def fetch_own(self, worker: Any) -> None:
        """Begin to copy what a worker owns."""
        place = self.own(worker)
        for source, target in zip(_tiles(self.program.own), self.memory.own, strict=True):
            index, barriers = place.tokens(*target.shape[1:]), self.memory.own_barriers
            self.walk.machine.copy(source.at[index], target.at[worker], barriers, worker)

    def compute(self, worker: Any, before: Callable, after: Callable) -> None:
        """Walk the row with the tile of a worker, which has arrived.

        `before(step)` is called when the tile of a step has arrived, `after(step)` when it is read.
        """
        listing, memory, place = self.listing, self.memory, self.own(worker)
        own = _seen(self.program.own, [x.at[worker] for x in memory.own], place, listing.own)
        sides = self.grid.q_and_kv(self.program.own, self.program.met)

        def take(is_careful: bool):
            def body(step, state):
                slot = lax.rem(step, STAGES)
                self.walk.machine.wait(memory.met_barriers, slot)
                before(step)
                item, met_place = self._met(step)
                partial, shown = step < self.careful, self.program.shown
                pairs = Pairs(listing, self.lists, place, met_place, item, partial, sides, shown)
                tiles = [x.at[slot] for x in memory.met]
                met = _seen(self.program.met, tiles, met_place, listing.met)
                state = self.visitor.visit(pairs, own, met, state, is_careful)
                after(step)
                return state

            return body

        state = self.visitor.open(own)
        middle = self.careful if listing.has_plain else self.steps
        if listing.has_careful:
            state = lax.fori_loop(0, middle, take(True), state)
        if listing.has_plain:
            state = lax.fori_loop(
                middle if listing.has_careful else 0, self.steps, take(False), state
            )
        if listing.most > 1:
            piece = self.lists.order[self._turn] * self.grid.copies + self._copy
            place = Place(piece, 0, 0, 0, place.part, place.part * listing.own.tile)
        for ref, x in zip(self.results, self.visitor.close(state), strict=True):
            at = place.vector(*x.shape) if x.ndim == 1 else place.tokens(*x.shape)
            gpu.store(ref.at[at], x.astype(ref.dtype))


def _alone(row: Row) -> None:
    """One warp group copies and computes.

    Grid    (program,): pieces of rows, longest first; of one its copies, of a copy its tiles.
    Reads   its own tiles; tile after tile of the blocks it lists: while one is computed the next
            one arrives.
    Loops   first over items with an element mask, then over those without.
    Writes  the tile's results, after the last item.
    """
    machine = row.walk.machine
    row.fetch_own(0)
    pl.when(row.steps > 0)(lambda: row.fetch(jnp.int32(0)))
    machine.wait(row.memory.own_barriers)
    next_one = lambda step: pl.when(step + 1 < row.steps)(lambda: row.fetch(step + 1))
    row.compute(0, next_one, lambda step: None)


def _with_team(row: Row) -> None:
    """One warp group copies; the others compute, each with a tile of its own.

    Grid    (program,), as for one alone; the warp groups of a program take neighbouring tiles.
    Reads   each worker its own tiles; all of them what the last group copies.
    Loops   as for one alone: a slot is filled again once every worker said that it has read it.
    Writes  each worker the results of its tile.
    """
    machine, memory, team = row.walk.machine, row.memory, row.walk.team
    group = team.number()

    @pl.when(group == team.workers)
    def _():
        team.give_registers()

        @pl.loop(0, row.steps)
        def _(step):
            slot = lax.rem(step, STAGES)
            is_free = lambda: machine.wait(memory.read_barriers, slot)
            pl.when(step >= STAGES)(is_free)
            row.fetch(step)

    @pl.when(group < team.workers)
    def _():
        team.take_registers()
        row.fetch_own(group)
        machine.wait(memory.own_barriers, group)
        is_read = lambda step: team.arrive(memory.read_barriers, lax.rem(step, STAGES))
        row.compute(group, lambda step: None, is_read)


def _tiles(side) -> list:
    return [x for name, x in side._asdict().items() if name in _TILES and x is not None]


def _seen(side, tiles: list, place: Place, tile: Tile):
    """A side as the visitor sees it: tiles in shared memory, statistics in global memory."""
    found, left = {}, iter(tiles)
    for name, x in side._asdict().items():
        if name in _TILES and x is not None:
            found[name] = next(left)
        elif name in _STATISTICS and x is not None:
            found[name] = x.at[place.vector(tile.tile)]
    return side._replace(**found)


def _unflattened(groups, refs) -> list:
    """The refs of scratch, in groups."""
    left = iter(refs)
    return [[next(left) for _ in group] for group in groups]


def _shown(listing: Listing):
    """Element masks of blocks, padded to whole tiles; None if there are none."""
    if listing.shown is None:
        return None
    rows, columns = (x.room - x.block for x in (listing.own, listing.met))
    return jnp.asarray(np.pad(listing.shown, ((0, 0), (0, rows), (0, columns))))
