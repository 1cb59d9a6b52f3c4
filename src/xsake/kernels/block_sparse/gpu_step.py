"""What a GPU kernel knows of the tile at hand: where its tokens are, and which pairs exist."""

import dataclasses
import functools
from operator import and_
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from xsake.kernels import mosaic_gpu_compat as gpu
from xsake.kernels.block_sparse.gpu_lists import Listing, Lists, Tile
from xsake.kernels.block_sparse.ragged_grid import quotient, remainder
from xsake.kernels.block_sparse.rule import Rule


class Place(NamedTuple):
    """Where a tile is."""

    batch: Any
    head: Any
    block: Any
    number: Any  # of the block, among all of its side
    part: Any  # of the block
    start: Any  # first token of the tile, in arrays whose blocks have `Tile.room` tokens

    def tokens(self, size: int, features: int) -> tuple:
        """Index of the tile in arrays [B, T, H * D]."""
        column = pl.ds(self.head * features, features)
        return self.batch, pl.ds(self.start, size), column

    def vector(self, size: int) -> tuple:
        """Index of the tile in arrays [B, H, T]."""
        return self.batch, self.head, pl.ds(self.start, size)

    def shared_vector(self, x: Any, size: int) -> tuple:
        """Index of the tile in arrays [B or 1, T]."""
        return (self.batch if x.shape[0] > 1 else 0), pl.ds(self.start, size)


def place_of(number: Any, part: Any, tile: Tile, heads: int, blocks: int) -> Place:
    """The place of one part of a block."""
    block, plane = remainder(number, blocks), quotient(number, blocks)
    start = block * tile.room + part * tile.tile
    return Place(quotient(plane, heads), remainder(plane, heads), block, number, part, start)


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of an own tile and a met one, as a tile [own, met].

    Args:
        listing: the list that is walked.
        lists: its numbers.
        own, met: where the two tiles are.
        item: which item of the list this is.
        is_partial: whether it has an element mask.
        sides: `(query side, key side)`, for positions and segment ids.
        shown: element masks, or None.
    """

    listing: Listing
    lists: Lists
    own: Place
    met: Place
    item: Any
    is_partial: Any
    sides: tuple[Any, Any]
    shown: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.listing.own.tile, self.listing.met.tile

    @property
    def _q_axis(self) -> int:
        return 1 if self.listing.grid.is_kv_major else 0

    def visible(self) -> Any:
        """Which pairs exist, in a careful step."""
        listing, listed = self.listing, self.listing.listed
        q_axis, kv_axis = self._q_axis, 1 - self._q_axis
        rules = []
        if listed.kv_tokens % listed.block_kv:
            rules.append(self._token(kv_axis) < listed.kv_tokens)
        if listed.q_tokens % listed.block_q:
            # No query is there, but its logits with a poisoned key would be NaN.
            rules.append(self._token(q_axis) < listed.q_tokens)
        if isinstance(listing.rule, Rule):
            q_pos, kv_pos = self._positions(q_axis), self._positions(kv_axis)
            rules.append(listing.rule.allows(q_pos, kv_pos, self._scalars(listing.rule)))
        if self.shown is not None:
            rules.append(self._element_mask() != 0)
        if self.sides[0].segments is not None:
            q_ids, kv_ids = self._ids(q_axis), self._ids(kv_axis)
            rules.append((q_ids == kv_ids) & (q_ids >= 0))
        inside = [self._inside(axis) < tile.block for axis, tile in self._padded()]
        if rules and not listing.has_plain:
            partial = gpu.filled(self.shape, self.is_partial.astype(jnp.int32), jnp.int32)
            rules = [(partial == 0) | functools.reduce(and_, rules)]
        rules = inside + rules
        return functools.reduce(and_, rules) if rules else None

    def _padded(self) -> list[tuple[int, Tile]]:
        tiles = enumerate((self.listing.own, self.listing.met))
        return [(axis, tile) for axis, tile in tiles if tile.is_padded]

    def _at(self, axis: int) -> tuple[Place, Tile]:
        if axis == 0:
            return self.own, self.listing.own
        return self.met, self.listing.met

    def _inside(self, axis: int) -> Any:
        """Indices of tokens within their block."""
        place, tile = self._at(axis)
        return gpu.indices(self.shape, axis) + place.part * tile.tile

    def _token(self, axis: int) -> Any:
        """Indices of tokens among all of their side."""
        place, tile = self._at(axis)
        first = place.block * tile.block + place.part * tile.tile
        return gpu.indices(self.shape, axis) + first

    def _positions(self, axis: int) -> Any:
        ref = self.sides[int(axis != self._q_axis)].positions
        return self._token(axis) if ref is None else self._numbers(ref, axis)

    def _ids(self, axis: int) -> Any:
        return self._numbers(self.sides[int(axis != self._q_axis)].segments, axis)

    def _numbers(self, ref: Any, axis: int) -> Any:
        """Numbers of the tokens of one side, [B or 1, T], along an axis of the tile."""
        place, tile = self._at(axis)
        found = gpu.vector(ref.at[place.shared_vector(ref, tile.tile)], axis)
        return gpu.along(found, self.shape, axis)

    def _element_mask(self) -> Any:
        number = self.lists.shown[self.item]
        rows = pl.ds(self.own.part * self.listing.own.tile, self.shape[0])
        columns = pl.ds(self.met.part * self.listing.met.tile, self.shape[1])
        return gpu.fragment(self.shown.at[number, rows, columns], gpu.sums())

    def _scalars(self, rule: Rule) -> list:
        """The integers of the rule for the head that is at work."""
        head = 0
        grid = self.listing.grid
        if rule.heads > 1:
            q_number, _ = grid.q_and_kv(self.own.number, self.met.number)
            head = quotient(grid.q_head(q_number), grid.q_heads // rule.heads)
        return [self.lists.tables[row * rule.heads + head] for row in range(len(rule.rows))]
