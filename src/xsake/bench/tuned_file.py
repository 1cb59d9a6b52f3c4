"""Tuned tile sizes as a JSON file: which machine and versions they are of, checked when read."""

import warnings
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._provenance import cpu_model, environment
from xsake._schema import Frozen
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.problem import TileSizes
from xsake.kernels.tuning import Bucket, TileTable

MOST_BYTES = 2**20
Size = Annotated[int, Field(ge=1, le=2**20)]


class TunedCall(Frozen):
    """What was found for one bucket.

    Attributes:
        speedup: seconds with the backend's own sizes / with these, median of the last rounds.
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
        """Which calls it is for."""
        return Bucket(
            self.platform, self.dtype, self.head_dim, self.block_q, self.block_kv, self.rows,
            self.blocks,
        )  # fmt: skip


class TunedFile(Frozen):
    """A table and where it was found."""

    schema_version: Literal[1] = 1
    processor: str
    versions: dict[str, str]
    made: str
    calls: tuple[TunedCall, ...] = ()

    @classmethod
    def of(cls, calls: tuple[TunedCall, ...]) -> "TunedFile":
        """What was found here and now."""
        here = environment()
        return cls(processor=here.cpu, versions=here.versions, made=here.utc, calls=calls)

    @property
    def table(self) -> TileTable:
        """For `xsake.kernels.tuning.pinned`."""
        return TileTable.of({x.bucket: TileSizes(x.tile_rows, x.tile_blocks) for x in self.calls})

    def merged(self, calls: tuple[TunedCall, ...]) -> "TunedFile":
        """With newer findings in the place of those of the same buckets."""
        known = {call.bucket: call for call in (*self.calls, *calls)}
        return TunedFile.of(tuple(known[bucket] for bucket in sorted(known)))

    def dumps(self) -> str:
        """As text."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> "TunedFile":
        """From text; refuses what is not such a file."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ArgumentError(
                "these are no tuned tile sizes",
                got=error.errors()[0]["msg"],
                expected="what `xsake bench tune` writes",
            ) from error

    def save(self, path: Path) -> None:
        """Replace a file in one step."""
        atomic_write(path, self.dumps())


def load_here(path: Path) -> TileTable:
    """The table of a file that was found on such a machine with these versions, or an empty one.

    A file that is damaged or of another machine or version cannot make results wrong, only slow: it
    is left aside, and a warning says why.

    Args:
        path: of the file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            found = TunedFile.loads(file.read(MOST_BYTES))
    except (OSError, UnicodeDecodeError, ArgumentError) as error:
        return _ignored(path, f"{error}".replace("\n", "; "))
    if found.processor != cpu_model():
        return _ignored(path, f"it is of another processor: {found.processor}")
    here = environment().versions
    other = {name for name in ("jax", "jaxlib") if found.versions.get(name) != here.get(name)}
    if other:
        return _ignored(path, f"it is of another version of {' and '.join(sorted(other))}")
    return found.table


def _ignored(path: Path, why: str) -> TileTable:
    warnings.warn(f"{path} is not used: {why}", stacklevel=3)
    return TileTable()
