"""Tuned tile sizes as a JSON file with processor and versions."""

import warnings
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._provenance import cpu_model, environment
from xsake._schema import Frozen
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.tuning import Bucket, TileTable

MAX_BYTES = 2**20
Size = Annotated[int, Field(ge=1, le=2**20)]


class TunedCall(Frozen):
    """Tile sizes of one bucket of calls.

    Attributes:
        speedup: seconds with default sizes / with these, median of the confirming rounds.
    """

    platform: Literal["cpu", "accelerator"]
    dtype: str
    head_dim: Size
    block_q: Size
    block_kv: Size
    rows: Size
    blocks: Size
    tile_rows: Size
    tile_blocks: Size
    speedup: Annotated[float, Field(gt=0)]

    @property
    def bucket(self) -> Bucket:
        """The bucket of calls."""
        return Bucket(
            self.platform, self.dtype, self.head_dim, self.block_q, self.block_kv, self.rows,
            self.blocks,
        )  # fmt: skip


class TunedFile(Frozen):
    """Tile sizes with their processor and versions."""

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

    def dumps(self) -> str:
        """Return the JSON text."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> "TunedFile":
        """Parse and validate JSON text."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ArgumentError(
                "invalid file of tile sizes",
                got=error.errors()[0]["msg"],
                expected="a file of `xsake bench tune`",
            ) from error

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        atomic_write(path, self.dumps())


def load_tuned_tiles(path: Path) -> TileTable:
    """Load tile sizes if they match this processor and these versions, else an empty table.

    A file that is damaged, or of another machine or version, is ignored with a warning. Tile sizes
    affect speed only, not results.
    """
    try:
        with path.open(encoding="utf-8") as file:
            tuned = TunedFile.loads(file.read(MAX_BYTES))
    except (OSError, UnicodeDecodeError, ArgumentError) as error:
        return _ignore(path, f"{error}".replace("\n", "; "))
    if tuned.processor != cpu_model():
        return _ignore(path, f"it is for another processor: {tuned.processor}")
    versions = environment().versions
    other = {name for name in ("jax", "jaxlib") if tuned.versions.get(name) != versions.get(name)}
    if other:
        return _ignore(path, f"it is for another version of {' and '.join(sorted(other))}")
    return tuned.table


def _ignore(path: Path, reason: str) -> TileTable:
    warnings.warn(f"{path} is not used: {reason}", stacklevel=3)
    return TileTable()
