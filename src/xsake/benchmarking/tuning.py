"""Tile sizes: search by successive halving over interleaved times, and the file of results."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._progress import Progress, ProgressFn
from xsake._provenance import cpu_model, environment
from xsake._schema import Frozen, describe_first
from xsake.benchmarking.rows import Shape
from xsake.benchmarking.runner import Spread, TimedSide, interleave, pair_ratio, time_call
from xsake.benchmarking.workloads import AttentionInputs, causal_layout, random_inputs, xsake_call
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.tuning import Bucket, TileTable, pin_tiles
from xsake.layout.grid import count_blocks

ROWS = (2, 4, 8, 12, 16, 24, 32, 48)
BLOCKS = (1, 2, 4, 8)
MAX_LOGITS = 2**23  # of one tile; larger tiles do not fit any cache
MAX_BYTES = 2**20  # of a file
DEFAULT = "the backend's own"
Size = Annotated[int, Field(ge=1, le=2**20)]


class TunedCall(Frozen):
    """Tile sizes of one bucket of calls."""

    platform: Literal["cpu", "accelerator"]
    dtype: str
    head_dim: Size
    block_q: Size
    block_kv: Size
    rows: Size
    blocks: Size
    tile_rows: Size
    tile_blocks: Size
    speedup: Annotated[float, Field(gt=0)]  # seconds with default sizes / with these, median

    @property
    def bucket(self) -> Bucket:
        """The bucket of calls."""
        return Bucket(**{x.name: getattr(self, x.name) for x in dataclasses.fields(Bucket)})


class TunedFile(Frozen):
    """Tile sizes with their processor and versions, as a JSON file."""

    schema_version: Literal[1] = 1
    processor: str
    versions: dict[str, str]
    made: str
    calls: tuple[TunedCall, ...] = ()

    @classmethod
    def of(cls, calls: tuple[TunedCall, ...]) -> "TunedFile":
        """Build a file for this machine."""
        current = environment()
        return cls(processor=current.cpu, versions=current.versions, made=current.utc, calls=calls)

    @property
    def table(self) -> TileTable:
        """Argument of `xsake.kernels.tuning.pin_tiles`."""
        return TileTable.of({x.bucket: TileSizes(x.tile_rows, x.tile_blocks) for x in self.calls})

    def merge(self, calls: tuple[TunedCall, ...]) -> "TunedFile":
        """Return a file with newer calls, which replace those of the same bucket."""
        by_bucket = {call.bucket: call for call in (*self.calls, *calls)}
        return TunedFile.of(tuple(by_bucket[bucket] for bucket in sorted(by_bucket)))

    @classmethod
    def loads(cls, text: str) -> "TunedFile":
        """Parse and validate JSON text."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            got, expected = describe_first(error), "a file of `xsake bench tune`"
            raise ArgumentError(
                "tile-file", "invalid file of tile sizes", got=got, expected=expected
            ) from error

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        atomic_write(path, self.model_dump_json(indent=1) + "\n")


def load_tuned_tiles(path: Path) -> TileTable:
    """Load tile sizes if they match this processor and these versions, else an empty table.

    A file that is damaged, or of another machine or version, is ignored with a warning. Tile sizes
    affect speed only, not results.
    """
    reason = ""
    try:
        with path.open(encoding="utf-8") as file:
            tuned = TunedFile.loads(file.read(MAX_BYTES))
        versions = environment().versions
        others = [x for x in ("jax", "jaxlib") if tuned.versions.get(x) != versions.get(x)]
        if tuned.processor != cpu_model():
            reason = f"it is for another processor: {tuned.processor}"
        elif others:
            reason = f"it is for another version of {' and '.join(others)}"
        else:
            return tuned.table
    except (OSError, UnicodeDecodeError, ArgumentError) as error:
        reason = str(error).replace("\n", "; ")
    warnings.warn(f"{path} is not used: {reason}", stacklevel=2)
    return TileTable()


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    bucket: Bucket
    best: TileSizes | None  # None if none is faster than the default
    speedup: Spread  # seconds with default sizes / with the best, in the confirming rounds
    tried: int  # number of sizes

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
    on_progress: ProgressFn = lambda _: None,
) -> SearchResult:
    """Search the fastest tile sizes of one call.

    Every round keeps the faster half by medians of interleaved times, and always the default. The
    winner must be faster than the default in `rounds` new rounds, by its lower quartile.
    """
    inputs = random_inputs(shape, dtype, 0)
    bucket = make_bucket(inputs, grid, block)
    field: list[TileSizes | None] = [None]
    field += candidates(block, block, shape.q_heads * count_blocks(shape.q_tokens, block))
    sides = {}
    for done, sizes in enumerate(field, start=1):
        with pin_tiles(TileTable() if sizes is None else TileTable.of({bucket: sizes})):
            call = xsake_call(inputs, DEFAULT, grid, block=block, is_backward=is_backward)
        name = DEFAULT if sizes is None else f"{sizes.rows} x {sizes.blocks}"
        sides[sizes] = TimedSide(name, lambda run=call.run: time_call(run))
        on_progress(Progress(done, len(field), "compiling"))
    remaining = field
    while len(remaining) > 2:
        times = interleave([sides[x] for x in remaining], rounds=3, warmup=1)
        ranked = sorted(remaining, key=lambda x: float(np.median(times[sides[x].name])))
        kept = ranked[: max(2, len(remaining) // 2)]
        remaining = kept if None in kept else [*kept[:-1], None]
        on_progress(Progress(len(field), len(field), f"timing, {len(remaining)} sizes left"))
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
    platform = "cpu" if jax.default_backend() == "cpu" else "accelerator"
    rows = batch * heads * layout.q_blocks
    return Bucket.of(layout, rows, platform, inputs.q.dtype.name, head_dim)
