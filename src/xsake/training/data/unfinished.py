"""Log of an unfinished build, one line per step, so that it can be resumed."""

from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from xsake._io import JsonlLog
from xsake._schema import Count, Frozen
from xsake.training.data.index import BUILD_LOG, SPLITS, Digest, Shard, Split
from xsake.training.data.shards import FinishedShard


class StartLine(Frozen):
    """First line: the data to build."""

    step: Literal["start"] = "start"
    recipe: Digest


class TokenizerLine(Frozen):
    """The tokenizer was written; shards of another tokenizer do not count."""

    step: Literal["tokenizer"] = "tokenizer"
    sha256: Digest


class ShardLine(Frozen):
    """A shard was written."""

    step: Literal["shard"] = "shard"
    split: Split
    number: Count
    shard: Shard
    piece: Count
    offset: Count


Line = StartLine | TokenizerLine | ShardLine
_LINE = TypeAdapter(Line)


class BuildLog:
    """Steps of a build, in memory and in an append-only file.

    An incomplete last line of a killed process is ignored, and its step is repeated.

    Args:
        folder: of the build.
    """

    def __init__(self, folder: Path):
        self._path = folder / BUILD_LOG
        self._log = JsonlLog(self._path)
        self.recipe: str | None = None
        self.tokenizer: str | None = None
        self._shards: dict[tuple[Split, int], FinishedShard] = {}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                self._take(_LINE.validate_json(line))
            except ValidationError:
                continue

    @property
    def shards(self) -> dict[Split, list[FinishedShard]]:
        """Written shards by split, from the first on without a gap."""
        shards: dict[Split, list[FinishedShard]] = {split: [] for split in SPLITS}
        for split, finished_shards in shards.items():
            while (finished := self._shards.get((split, len(finished_shards)))) is not None:
                finished_shards.append(finished)
        return shards

    def start(self, recipe: str) -> None:
        """Log the start of a build."""
        self._add(StartLine(recipe=recipe))

    def install(self, sha256: str) -> None:
        """Log the written tokenizer."""
        self._add(TokenizerLine(sha256=sha256))

    def write(self, finished: FinishedShard) -> None:
        """Log a written shard."""
        fields = {name: getattr(finished, name) for name in FinishedShard.__dataclass_fields__}
        self._add(ShardLine(**fields))

    def remove(self) -> None:
        """Delete the log of a finished build."""
        self._path.unlink(missing_ok=True)

    def _take(self, line: Line) -> None:
        match line:
            case StartLine():
                self.recipe = line.recipe
            case TokenizerLine():
                if line.sha256 != self.tokenizer:
                    self._shards.clear()
                self.tokenizer = line.sha256
            case ShardLine():
                key = (line.split, line.number)
                self._shards[key] = FinishedShard(*key, line.shard, line.piece, line.offset)

    def _add(self, line: Line) -> None:
        """Append a step; it is on disk when this returns."""
        self._take(line)
        self._log.append(line.model_dump_json(), sync=True)
