"""The element mask of a tile of scores: padding, the mask on positions, segment ids.

One rule for every block-sparse kernel. A kernel says how it lays tokens out along the axes of a
tile, by a `TileSide` for its queries and one for its keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from operator import and_
from typing import Any

from jax import Array

from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True, eq=False)
class TileSide:
    """The queries or the keys of a tile of scores, as `element_mask` reads them.

    Each kernel has its own way to lay tokens out along an axis of a tile: the two methods without a
    body. Only arrays that a mask needs are computed.
    """

    integers: Any  # `positions` and `segments` of the tokens, in the kernel's memory; None without
    tokens: int  # of the sequence
    block: int  # tokens of a block

    def token_index(self) -> Array:
        """Indices of the tokens in their sequence, broadcast to the tile."""
        raise NotImplementedError

    def along_axis(self, integers: Any) -> Array:
        """Integers of the tokens, broadcast to the tile."""
        raise NotImplementedError

    def positions(self) -> Array:
        """Positions as masks see them: the index, unless the call has positions."""
        x = self.integers.positions
        return self.token_index() if x is None else self.along_axis(x)

    def segments(self) -> Array | None:
        """Segment ids, negative for padding."""
        x = self.integers.segments
        return None if x is None else self.along_axis(x)


def rule_of_heads(
    mask: AbstractMask | None, heads: int, head: Callable[[], Array]
) -> Callable[[Array, Array], Any] | None:
    """The mask on positions for some of `heads` query heads; None without a mask.

    `head()` gives their indices, broadcast to the tile, to masks whose rule depends on them.
    """
    if mask is None:
        return None
    which = None if mask.heads is None else head() * mask.heads // heads
    return lambda q_pos, kv_pos: mask.allows(q_pos, kv_pos, which)


def element_mask(
    q: TileSide,
    kv: TileSide,
    allows: Callable[[Array, Array], Any] | None,
    mask_block: Callable[[], Array] | None = None,
) -> Array | None:
    """Pairs of a tile that may attend; None if all pairs may.

    `allows` is the mask on positions. `mask_block`, instead of it, loads integers of the tile, 0
    where a pair is masked.
    """
    conditions = []
    for side in (kv, q):
        # Scores of padded queries may be NaN, like those of padded keys.
        if side.tokens % side.block:
            conditions.append(side.token_index() < side.tokens)
    if allows is not None:
        conditions.append(allows(q.positions(), kv.positions()))
    if mask_block is not None:
        conditions.append(mask_block() != 0)
    q_ids, kv_ids = q.segments(), kv.segments()
    if q_ids is not None:
        conditions.append((q_ids == kv_ids) & (q_ids >= 0))
    return functools.reduce(and_, conditions) if conditions else None


class ExpandedSide(TileSide):
    """Tokens whose positions and segment ids have the axes of the tile already."""

    def along_axis(self, integers: Array) -> Array:
        """See `TileSide`."""
        return integers
