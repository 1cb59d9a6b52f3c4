"""Tile size search: successive halving over interleaved times, then a confirmation."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from xsake.bench.calls import AttentionInputs, causal_layout, random_inputs, xsake_call
from xsake.bench.rows import Shape
from xsake.bench.runner import Spread, TimedSide, interleave, pair_ratio, time_call
from xsake.bench.tuned_file import TunedCall
from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.tuning import Bucket, TileTable, pin_tiles
from xsake.layout.grid import count_blocks

ROWS = (2, 4, 8, 12, 16, 24, 32, 48)
BLOCKS = (1, 2, 4, 8)
MAX_LOGITS = 2**23
"""Maximum logits of one tile; larger tiles do not fit any cache."""
DEFAULT = "the backend's own"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        bucket: of the calls.
        best: tile sizes; None if none is faster than the default.
        speedup: seconds with default sizes / with the best, in the confirming rounds.
        tried: number of timed sizes.
    """

    bucket: Bucket
    best: TileSizes | None
    speedup: Spread
    tried: int

    @property
    def call(self) -> TunedCall | None:
        """Entry of a tuned file."""
        if self.best is None:
            return None
        sizes = {"tile_rows": self.best.rows, "tile_blocks": self.best.blocks}
        fields = dataclasses.asdict(self.bucket) | sizes | {"speedup": self.speedup.median}
        return TunedCall.model_validate(fields)


def candidates(block_q: int, block_kv: int, rows: int) -> list[TileSizes]:
    """Return the tile sizes to try for a call with `rows` rows."""
    return [
        TileSizes(r, b)
        for b in BLOCKS
        for r in ROWS
        if r <= rows and r * b * block_q * block_kv <= MAX_LOGITS
    ]


def search(
    shape: Shape,
    grid: np.ndarray | None,
    *,
    block: int,
    dtype: str,
    is_backward: bool,
    rounds: int = 9,
    on_progress: Callable[[int, int], None] = lambda done, left: None,
) -> SearchResult:
    """Search the fastest tile sizes of one call.

    Every round keeps the faster half by medians of interleaved times, and always the default. The
    winner must be faster than the default in new rounds, by its lower quartile.

    Args:
        shape: of the call.
        grid: computed blocks; None: all visible ones.
        block: tokens of a block.
        dtype: of the operands.
        is_backward: include gradients.
        rounds: of the confirmation.
        on_progress: called with the numbers of compiled and of remaining sizes.
    """
    inputs = random_inputs(shape, dtype, 0)
    bucket = make_bucket(inputs, grid, block)
    field: list[TileSizes | None] = [None]
    field += candidates(block, block, shape.q_heads * count_blocks(shape.q_tokens, block))
    sides = {}
    for done, sizes in enumerate(field, start=1):
        table = TileTable() if sizes is None else TileTable.of({bucket: sizes})
        with pin_tiles(table):
            call = xsake_call(inputs, DEFAULT, grid, block=block, is_backward=is_backward)
        name = DEFAULT if sizes is None else f"{sizes.rows} x {sizes.blocks}"
        sides[sizes] = TimedSide(name, lambda run=call.run: time_call(run))
        on_progress(done, len(field))
    remaining: list[TileSizes | None] = field
    while len(remaining) > 2:
        times = interleave([sides[x] for x in remaining], rounds=3, warmup=1)
        ranked = sorted(remaining, key=lambda x: float(np.median(times[sides[x].name])))
        kept = ranked[: max(2, len(remaining) // 2)]
        remaining = kept if None in kept else [*kept[:-1], None]
        on_progress(len(field), len(remaining))
    return _confirm(bucket, remaining, sides, rounds, len(field) - 1)


def _confirm(
    bucket: Bucket, remaining: Sequence[TileSizes | None], sides: dict, rounds: int, tried: int
) -> SearchResult:
    best = next((x for x in remaining if x is not None), None)
    if best is None:
        return SearchResult(bucket, None, Spread(1.0, 1.0, 1.0), tried)
    times = interleave([sides[None], sides[best]], rounds=rounds)
    speedup = pair_ratio(times[DEFAULT], times[sides[best].name])
    return SearchResult(bucket, best if speedup.q25 > 1 else None, speedup, tried)


def make_bucket(inputs: AttentionInputs, grid: np.ndarray | None, block: int) -> Bucket:
    """Return the bucket of a call, by its rows of query blocks."""
    batch, tokens, heads, head_dim = inputs.q.shape
    layout = causal_layout(tokens, block, grid)
    rows = batch * heads * layout.q_blocks
    platform = "cpu" if jax.default_backend() == "cpu" else "accelerator"
    return Bucket.of(layout, rows, platform, inputs.q.dtype.name, head_dim)
