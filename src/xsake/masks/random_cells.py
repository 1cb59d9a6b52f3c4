"""Owns the masks that keep a seeded random part of the plane: Random and BigBird."""

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.errors import MaskError
from xsake.masks.arrays import UNBOUNDED, Answer, Codes, quotient
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import ALL, NONE, Rectangles, codes, either
from xsake.masks.patterns import Longformer
from xsake.masks.structured import AbstractStructured, store_int

HASH_BITS = 30  # the hash and every threshold, 2**30 included, fit int32
GOLDEN = np.uint32(0x9E3779B9)  # 2**32 / golden ratio: spreads neighbouring words


def _scrambled(word: Any) -> Any:
    """The 32-bit finaliser of MurmurHash3: every input bit flips about half of the output."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def _row_state(xp: ModuleType, seed: Any, q_cell: Any) -> Any:
    """Hash of (seed, query cell), the part that all cells of a row share."""
    # Arithmetic on uint32 wraps by intent; NumPy warns about it for scalars only.
    with np.errstate(over="ignore"):
        state = _scrambled(xp.asarray(seed).astype(np.uint32) + GOLDEN)
        return _scrambled(state + q_cell.astype(np.uint32) * GOLDEN)


def _is_kept(row_state: Any, kv_cell: Any, threshold: Any) -> Answer:
    """Whether the hash of (seed, query cell, key cell) falls under the threshold."""
    with np.errstate(over="ignore"):
        word = _scrambled((row_state ^ GOLDEN) + kv_cell.astype(np.uint32) * GOLDEN)
    return (word >> np.uint32(32 - HASH_BITS)).astype(np.int32) < threshold


@dataclasses.dataclass(frozen=True)
class Random(AbstractStructured):
    """A random part of the plane, in square cells; the same on every machine and backend.

    The plane is cut into cells of `cell` x `cell` positions. A cell is kept if a hash of
    (seed, q // cell, kv // cell) falls under `keep`.

    Args:
        keep: expected share of cells that are kept, 0..1.
        seed: which random pattern.
        cell: positions per side of a cell.

    Example:
        >>> print(Random(keep=0.3, seed=2, cell=2).to_ascii(8))
        ####....
        ####....
        ........
        ........
        ##......
        ##......
        ##....##
        ##....##
    """

    keep: float
    seed: int = 0
    cell: int = 128

    def __post_init__(self) -> None:
        _store_share(self, "keep")
        store_int(self, "seed", least=0)
        store_int(self, "cell", least=1)

    def _numbers(self) -> tuple[int, ...]:
        return round(self.keep * 2**HASH_BITS), self.seed, self.cell

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, threshold: Any, seed: Any, cell: Any) -> Answer:
        row_state = _row_state(xp, seed, quotient(xp, q, cell))
        return _is_kept(row_state, quotient(xp, kv, cell), threshold)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, threshold: Any, seed: Any, cell: Any) -> Codes:
        if isinstance(threshold, int) and threshold in (0, 2**HASH_BITS):
            return ALL if threshold else NONE
        cells = Rectangles(*(quotient(xp, end, cell) for end in area))
        return _cover_cells(xp, cells, threshold, seed)

    def _extent(self) -> int:
        return min(16 * self.cell, UNBOUNDED)


def _cover_cells(xp: ModuleType, cells: Rectangles, threshold: Any, seed: Any) -> Codes:
    """Codes of rectangles of cells: visits cell after cell until every answer is settled."""
    rows = xp.max(cells.q_last - cells.q_first, initial=0) + 1
    columns = xp.max(cells.kv_last - cells.kv_first, initial=0) + 1

    def visit(i, j, none, every):
        # A smaller rectangle visits its last cell again; this order of terms cannot overflow.
        row = cells.q_first + xp.minimum(i, cells.q_last - cells.q_first)
        column = cells.kv_first + xp.minimum(j, cells.kv_last - cells.kv_first)
        kept = _is_kept(_row_state(xp, seed, row), column, threshold)
        return none & ~kept, every & kept

    none, every = visit(0, 0, np.True_, np.True_)
    if xp is np:
        others = itertools.product(range(int(rows)), range(int(columns)))
        for i, j in itertools.islice(others, 1, None):
            if not (none | every).any():
                break
            none, every = visit(i, j, none, every)
        return codes(none, every)

    def is_open(state):
        i, _, none, every = state
        return (i < rows) & jnp.any(none | every)

    def advance(state):
        i, j, none, every = state
        is_row_end = j + 1 == columns
        answers = visit(i, j, none, every)
        return jnp.where(is_row_end, i + 1, i), jnp.where(is_row_end, 0, j + 1), *answers

    start = (jnp.zeros_like(rows), jnp.zeros_like(columns), none, every)
    *_, none, every = jax.lax.while_loop(is_open, advance, start)
    return codes(none, every)


@dataclasses.dataclass(frozen=True)
class BigBird(AbstractStructured):
    """`Longformer(window, global_tokens) | Random(keep, seed, cell)` under one name.

    Args:
        window: positions to each side of the query, itself not counted.
        global_tokens: how many of the first positions see all and are seen by all.
        keep: expected share of random cells that are kept, 0..1.
        seed: which random pattern.
        cell: positions per side of a random cell.

    Example:
        >>> mask = BigBird(window=64, global_tokens=16, keep=0.05)
        >>> bool(mask.allows(5000, 3)), bool(mask.allows(5000, 4990))
        (True, True)
    """

    window: int
    global_tokens: int
    keep: float
    seed: int = 0
    cell: int = 128

    def __post_init__(self) -> None:
        store_int(self, "window", least=0)
        store_int(self, "global_tokens", least=0)
        _store_share(self, "keep")
        store_int(self, "seed", least=0)
        store_int(self, "cell", least=1)

    def _numbers(self) -> tuple[int, ...]:
        longformer = Longformer(self.window, self.global_tokens)
        return *longformer._numbers(), *Random(self.keep, self.seed, self.cell)._numbers()

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, *numbers: Any) -> Answer:
        return Longformer._rule(xp, q, kv, *numbers[:2]) | Random._rule(xp, q, kv, *numbers[2:])

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, *numbers: Any) -> Codes:
        longformer = Longformer._cover(xp, area, *numbers[:2])
        return either(xp, longformer, Random._cover(xp, area, *numbers[2:]))

    def _extent(self) -> int:
        return min(max(4 * self.window, 4 * self.global_tokens, 16 * self.cell), UNBOUNDED)


def _store_share(mask: AbstractMask, name: str) -> None:
    """Replace field `name` of a frozen mask by a plain float after checking that it is a share."""
    value = getattr(mask, name)
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise MaskError(
            f"{type(mask).__name__} needs a share for `{name}`",
            got=f"{name}={value!r}",
            expected="a number in 0..1",
        )
    object.__setattr__(mask, name, float(value))
