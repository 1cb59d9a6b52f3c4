"""What an unfinished build has done so far, a line per step, so that it can go on."""

from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from xsake._io import JsonlLog
from xsake._schema import Count, Frozen
from xsake.training.data.index import SPLITS, UNFINISHED, Digest, Shard, Split
from xsake.training.data.shards import Finished


class Started(Frozen):
    """The first line: what is being built."""

    step: Literal["start"] = "start"
    recipe: Digest


class Installed(Frozen):
    """The tokenizer is in the folder; shards that another one made do not count."""

    step: Literal["tokenizer"] = "tokenizer"
    sha256: Digest


class Written(Frozen):
    """A shard is in the folder."""

    step: Literal["shard"] = "shard"
    split: Split
    number: Count
    shard: Shard
    piece: Count
    offset: Count


Line = Started | Installed | Written
_LINE = TypeAdapter(Line)


class Unfinished:
    """The steps of a build, in memory and in a file that only grows.

    A line that a dying process left unfinished is no step, and is done again.

    Args:
        folder: of the build.
    """

    def __init__(self, folder: Path):
        self._path = folder / UNFINISHED
        self._log = JsonlLog(self._path)
        self.recipe: str | None = None
        self.tokenizer: str | None = None
        self._shards: dict[tuple[Split, int], Finished] = {}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                self._take(_LINE.validate_json(line))
            except ValidationError:
                continue

    @property
    def shards(self) -> dict[Split, list[Finished]]:
        """Of every split, from the first on without a gap."""
        found: dict[Split, list[Finished]] = {split: [] for split in SPLITS}
        for split, known in found.items():
            while (finished := self._shards.get((split, len(known)))) is not None:
                known.append(finished)
        return found

    def start(self, recipe: str) -> None:
        """Begin a build."""
        self._add(Started(recipe=recipe))

    def install(self, sha256: str) -> None:
        """The tokenizer is there."""
        self._add(Installed(sha256=sha256))

    def write(self, finished: Finished) -> None:
        """A shard is there."""
        fields = {name: getattr(finished, name) for name in Finished.__dataclass_fields__}
        self._add(Written(**fields))

    def remove(self) -> None:
        """There is nothing more to do."""
        self._path.unlink(missing_ok=True)

    def _take(self, line: Line) -> None:
        match line:
            case Started():
                self.recipe = line.recipe
            case Installed():
                if line.sha256 != self.tokenizer:
                    self._shards.clear()
                self.tokenizer = line.sha256
            case Written():
                key = (line.split, line.number)
                self._shards[key] = Finished(*key, line.shard, line.piece, line.offset)

    def _add(self, line: Line) -> None:
        """Keep a step; it is on the disk when this returns."""
        self._take(line)
        self._log.append(line.model_dump_json(), sync=True)
