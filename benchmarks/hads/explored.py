"""Block masses of one document, packed for a browser, and what choices of blocks keep of them.

A layer's file holds, head after head and row after row, the blocks that causality leaves: their
masses as 16-bit shares, low bytes first, then high bytes, then the place of each block in its row
in the order in which the selector takes them. What is kept of such a file is a ratio of whole
numbers, so that a page and this module agree to the last digits.
"""

import dataclasses
import gzip

import numpy as np
from jaxtyping import Float, Int, UInt

from benchmarks.baselines.rule import row_ranks
from xsake.hads.budget import ForcedBlocks, row_counts

WHOLE = 2**16 - 1  # the code of a mass of 1


@dataclasses.dataclass(frozen=True)
class Packed:
    """Some heads, the hidden half of their blocks left out.

    Args:
        codes: masses, `WHOLE` times.
        places: of each block in its row: those first that are always on, then the selector's best.
    """

    codes: UInt[np.ndarray, "X V"]
    places: UInt[np.ndarray, "X V"]

    @classmethod
    def of(
        cls,
        true: Float[np.ndarray, "X n n"],
        order: Float[np.ndarray, "X n n"],
        forced: ForcedBlocks,
    ) -> "Packed":
        """What is packed of heads.

        Args:
            true: masses of blocks, rows of which add up to 1.
            order: what a selector thinks they weigh.
            forced: blocks that come first.
        """
        rows, columns = np.tril_indices(true.shape[-1])
        shares = true.astype(np.float64) / true.sum(-1, keepdims=True, dtype=np.float64)
        codes = np.rint(WHOLE * shares).astype(np.uint16)
        places = row_ranks(order, forced).astype(np.uint8)
        return cls(codes[:, rows, columns], places[:, rows, columns])

    @property
    def n(self) -> int:
        """Rows of a head."""
        return int((np.sqrt(8 * self.codes.shape[-1] + 1) - 1) / 2 + 0.5)

    def unpacked(self) -> tuple[Float[np.ndarray, "X n n"], Int[np.ndarray, "X n n"]]:
        """Codes, 0 where causality hides a block, and places, there beyond all others."""
        heads, n = len(self.codes), self.n
        rows, columns = np.tril_indices(n)
        codes, places = np.zeros((heads, n, n)), np.full((heads, n, n), n, np.int32)
        codes[:, rows, columns] = self.codes
        places[:, rows, columns] = self.places
        return codes, places

    def to_bytes(self) -> bytes:
        """The file of a layer; the same for the same masses."""
        low, high = (self.codes & 255).astype(np.uint8), (self.codes >> 8).astype(np.uint8)
        planes = b"".join(plane.tobytes() for plane in (low, high, self.places))
        return gzip.compress(planes, compresslevel=9, mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes, heads: int) -> "Packed":
        """What `to_bytes` wrote."""
        planes = np.frombuffer(gzip.decompress(data), np.uint8).reshape(3, heads, -1)
        codes = planes[0].astype(np.uint16) + 256 * planes[1].astype(np.uint16)
        return cls(codes, planes[2].copy())


@dataclasses.dataclass(frozen=True)
class Kept:
    """Kept mass of heads at given numbers of blocks.

    Args:
        kl: mean over rows of -log(kept mass), nats.
        mass: kept, mean over rows.
        recall: computed blocks that are among as many heaviest of their row / computed blocks.
    """

    kl: Float[np.ndarray, " X"]
    mass: Float[np.ndarray, " X"]
    recall: Float[np.ndarray, " X"]


class Choices:
    """All that can be chosen of packed heads: each row keeps its first blocks, however many.

    Args:
        packed: the heads.
        forced: as they were packed.
    """

    def __init__(self, packed: Packed, forced: ForcedBlocks):
        codes, places = packed.unpacked()
        self.n, self.forced = packed.n, forced
        self._kept = _running_sums(codes, places, self.n)
        heaviest = row_ranks(codes, ForcedBlocks(0, 0))
        later = np.maximum(places, np.where(np.tri(self.n, dtype=bool), heaviest, self.n))
        self._agreed = _running_sums(np.ones_like(codes), later, self.n)

    def kept(self, totals: Int[np.ndarray, " X"]) -> Kept:
        """What is kept with `totals` blocks of each head, spread over rows as plans do."""
        counts = row_counts(totals, self.n, self.forced)
        asked = counts[..., None].astype(np.int64)
        kept = np.take_along_axis(self._kept, asked, -1)[..., 0] / self._kept[..., -1]
        agreed = np.take_along_axis(self._agreed, asked, -1)[..., 0]
        return Kept(
            kl=-np.log(kept).mean(-1),
            mass=kept.mean(-1),
            recall=agreed.sum(-1) / counts.sum(-1),
        )


def _running_sums(
    values: Float[np.ndarray, "X n n"], places: Int[np.ndarray, "X n n"], n: int
) -> Float[np.ndarray, "X n n1"]:
    """[..., k]: the sum of the values whose place is below k."""
    sums = np.zeros((*values.shape[:-1], n + 2))
    # Places of a row differ, but those of its hidden blocks, whose values count for nothing, and
    # two blocks of a row may share the later of two places.
    for head, (own, where) in enumerate(zip(values, places, strict=True)):
        np.add.at(sums[head], (np.arange(n)[:, None], where + 1), own)
    return np.cumsum(sums, -1)[..., : n + 1]
