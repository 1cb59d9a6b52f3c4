"""Mask of listed blocks, used by layouts that were merged into larger blocks."""

import dataclasses
import functools
import hashlib
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Bool

from xsake.errors import LayoutError
from xsake.masks import AbstractMask, Coverage
from xsake.masks.arrays import Answer, Codes, look_up, quotient
from xsake.masks.coverage import Rectangles


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ListedBlocks(AbstractMask):
    """Mask that allows the pairs of selected blocks; compared by content.

    Args:
        chosen: bool [heads, Nq, Nk]; one head is shared by all heads.
        block_q, block_kv: block sizes in tokens.

    Example:
        >>> mask = ListedBlocks(np.array([[[True, False], [True, True]]]), block_q=4, block_kv=4)
        >>> mask.allows(np.array([3, 3, 4]), np.array([3, 4, 4])).tolist()
        [True, False, True]
    """

    chosen: Bool[np.ndarray, "H Nq Nk"]
    block_q: int
    block_kv: int

    def __post_init__(self):
        if self.chosen.ndim != 3 or self.chosen.dtype != bool or 0 in self.chosen.shape:
            raise LayoutError(
                "`chosen` must be a boolean grid",
                got=f"shape {self.chosen.shape}, dtype {self.chosen.dtype}",
                expected="bool [heads, Nq, Nk], no axis empty",
            )
        # The mask is hashed by content, so it needs a private copy.
        copy = self.chosen.copy()
        copy.flags.writeable = False
        object.__setattr__(self, "chosen", copy)

    @property
    def heads(self) -> int | None:
        return None if self.chosen.shape[0] == 1 else self.chosen.shape[0]

    def for_head(self, head: int) -> AbstractMask:
        self._check_head(head)
        if self.heads is None:
            return self
        return ListedBlocks(self.chosen[head : head + 1], self.block_q, self.block_kv)

    @functools.cached_property
    def _identity(self) -> tuple[object, ...]:
        digest = hashlib.sha256(np.packbits(self.chosen)).digest()
        return digest, self.chosen.shape, self.block_q, self.block_kv

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ListedBlocks):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        listed = int(np.count_nonzero(self.chosen))
        return (
            f"ListedBlocks({listed} of {self.chosen.size}, "
            f"block_q={self.block_q}, block_kv={self.block_kv})"
        )

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self._is_chosen(
            xp, quotient(xp, q, self.block_q), quotient(xp, kv, self.block_kv), head
        )

    def _is_chosen(self, xp: ModuleType, q_block: Any, kv_block: Any, head: Any) -> Answer:
        heads, q_blocks, kv_blocks = self.chosen.shape
        inside = (q_block < q_blocks) & (kv_block < kv_blocks)
        q_block = xp.minimum(q_block, q_blocks - 1)
        kv_block = xp.minimum(kv_block, kv_blocks - 1)
        which = xp.zeros_like(q_block) if heads == 1 else head
        return inside & look_up(xp, self.chosen, which, q_block, kv_block)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        """Return exact codes inside one block; UNKNOWN for rectangles over several blocks."""
        q_block = quotient(xp, area.q_first, self.block_q)
        kv_block = quotient(xp, area.kv_first, self.block_kv)
        one_block = (q_block == quotient(xp, area.q_last, self.block_q)) & (
            kv_block == quotient(xp, area.kv_last, self.block_kv)
        )
        chosen = self._is_chosen(xp, q_block, kv_block, head)
        code = xp.where(chosen, np.int8(Coverage.ALL), np.int8(Coverage.NONE))
        return xp.where(one_block, code, np.int8(Coverage.UNKNOWN))
