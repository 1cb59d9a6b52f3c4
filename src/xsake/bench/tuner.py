"""Searches tile sizes for a call: halves the field round by round, then confirms the winner."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from xsake.bench.calls import Inputs, causal_layout, drawn, ours
from xsake.bench.rows import Shape
from xsake.bench.runner import Side, Spread, interleave, pair_ratio, time_call
from xsake.bench.tuned_file import TunedCall
from xsake.kernels.block_sparse.problem import TileSizes
from xsake.kernels.tuning import Bucket, TileTable, pinned
from xsake.layout.grid import blocks_of

ROWS = (2, 4, 8, 12, 16, 24, 32, 48)
BLOCKS = (1, 2, 4, 8)
MOST_LOGITS = 2**23
"""Of one tile: larger ones leave every cache."""
OWN = "the backend's own"


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        bucket: which calls it is for.
        best: tile sizes; None if nothing is faster than the backend's own.
        speedup: seconds with the backend's own sizes / with the best, in the confirming rounds.
        tried: sizes that were timed.
    """

    bucket: Bucket
    best: TileSizes | None
    speedup: Spread
    tried: int

    @property
    def call(self) -> TunedCall | None:
        """As it is kept."""
        if self.best is None:
            return None
        found = {"tile_rows": self.best.rows, "tile_blocks": self.best.blocks}
        named = dataclasses.asdict(self.bucket) | found | {"speedup": self.speedup.median}
        return TunedCall.model_validate(named)


def candidates(block_q: int, block_kv: int, rows: int) -> list[TileSizes]:
    """Sizes that make sense for a call of so many rows."""
    return [
        TileSizes(r, b)
        for b in BLOCKS
        for r in ROWS
        if r <= rows and r * b * block_q * block_kv <= MOST_LOGITS
    ]


def search(
    shape: Shape,
    grid: np.ndarray | None,
    *,
    block: int,
    dtype: str,
    is_backward: bool,
    rounds: int = 9,
    watch: Callable[[int, int], None] = lambda done, left: None,
) -> Search:
    """The fastest tile sizes of one call.

    Every round halves the field by medians of interleaved times, the backend's own sizes always
    among them. The last one standing must beat them in fresh rounds, by its quartiles.

    Args:
        shape: sizes of the call.
        grid: its blocks; None: all that are visible.
        block: tokens of a block.
        dtype: of the operands.
        is_backward: time gradients too.
        rounds: of the confirmation.
        watch: told how many sizes were compiled and how many are left.
    """
    inputs = drawn(shape, dtype, 0)
    bucket = bucket_of(inputs, grid, block)
    field: list[TileSizes | None] = [None]
    field += candidates(block, block, shape.q_heads * blocks_of(shape.q_tokens, block))
    sides = {}
    for done, sizes in enumerate(field, start=1):
        table = TileTable() if sizes is None else TileTable.of({bucket: sizes})
        with pinned(table):
            call = ours(inputs, OWN, grid, block=block, is_backward=is_backward)
        name = OWN if sizes is None else f"{sizes.rows} x {sizes.blocks}"
        sides[sizes] = Side(name, lambda run=call.run: time_call(run))
        watch(done, len(field))
    left: list[TileSizes | None] = field
    while len(left) > 2:
        times = interleave([sides[x] for x in left], rounds=3, warmup=1)
        ranked = sorted(left, key=lambda x: float(np.median(times[sides[x].name])))
        kept = ranked[: max(2, len(left) // 2)]
        left = kept if None in kept else [*kept[:-1], None]
        watch(len(field), len(left))
    return _confirmed(bucket, left, sides, rounds, len(field) - 1)


def _confirmed(
    bucket: Bucket, left: Sequence[TileSizes | None], sides: dict, rounds: int, tried: int
) -> Search:
    best = next((x for x in left if x is not None), None)
    if best is None:
        return Search(bucket, None, Spread(1.0, 1.0, 1.0), tried)
    times = interleave([sides[None], sides[best]], rounds=rounds)
    speedup = pair_ratio(times[OWN], times[sides[best].name])
    return Search(bucket, best if speedup.q25 > 1 else None, speedup, tried)


def bucket_of(inputs: Inputs, grid: np.ndarray | None, block: int) -> Bucket:
    """Which walks a finding is for: of rows of queries, and of keys where heads share none."""
    batch, tokens, heads, head_dim = inputs.q.shape
    layout = causal_layout(tokens, block, grid)
    rows = batch * heads * layout.q_blocks
    platform = "cpu" if jax.default_backend() == "cpu" else "accelerator"
    return Bucket.of(layout, rows, platform, inputs.q.dtype.name, head_dim)
