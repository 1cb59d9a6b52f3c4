"""The index of a data folder: what its token files are, complete enough to check each of them."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from xsake import _json
from xsake._schema import Count, Fraction, Frozen, Positive, Text, validate
from xsake.errors import ArgumentError
from xsake.evaluation.record import TextFile
from xsake.model.tokenizer import TOKENIZER

INDEX, UNFINISHED = "index.json", "building.jsonl"
MOST_BYTES, MOST_PARTS = 2**26, 2**20
BYTES_OF = {"uint16": 2, "uint32": 4}
AGAIN = "copy the folder again, or build it again: `xsake data build` with --fresh"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(Frozen):
    """A file of tokens; its place in the list is its number."""

    tokens: Positive
    blake2b: Digest


class SplitIndex(Frozen):
    """A part of the documents, one stream of tokens cut into shards of equal size."""

    documents: Count
    tokens: Count
    shards: tuple[Shard, ...]


class Splits(Frozen):
    """Every document is in one of them."""

    train: SplitIndex
    validation: SplitIndex


class TokenizerIdentity(Frozen):
    """What made tokens of the texts; its file lies beside the index."""

    sha256: Digest = Field(description="of tokenizer.json")
    vocabulary: Positive = Field(description="its largest token id, and one more")
    end_token: Text = Field(description="stands after every document")
    end_id: Count
    asked_vocabulary: Positive | None = Field(
        description="what was asked for if it was trained on the texts of the train split"
    )


class Skipped(Frozen):
    """Documents of a text file that could not be used, and were left out as asked."""

    name: str = Field(description="of the file")
    documents: Positive
    first: Text = Field(description="where the first is, and what is wrong with it")


class Index(Frozen):
    """What `xsake data build` made, and everything that it was made from."""

    schema_version: Literal[1] = 1
    recipe: Digest = Field(description="of texts, tokenizer and settings: names what is built")
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"] = Field(description="of the shards, little-endian, bare")
    shard_tokens: Positive = Field(description="of every shard but the last of its split")
    validation: Fraction = Field(description="share of documents, chosen by a hash of their text")
    splits: Splits
    sources: tuple[TextFile, ...]
    skipped: tuple[Skipped, ...] = ()
    versions: dict[str, str]

    def to_json(self) -> str:
        """Return the content of the file; version 0.1.0 reads it if no document was skipped."""
        return self.model_dump_json(indent=1, exclude=None if self.skipped else {"skipped"})

    @pydantic.model_validator(mode="after")
    def _agrees_with_itself(self) -> "Index":
        for name in SPLITS:
            split = self.split(name)
            if split.tokens != sum(shard.tokens for shard in split.shards):
                raise ValueError(f"{name}: the shards do not add up to {split.tokens} tokens")
            if any(shard.tokens != self.shard_tokens for shard in split.shards[:-1]):
                raise ValueError(f"{name}: a shard that is not the last is not full")
            if split.shards and split.shards[-1].tokens > self.shard_tokens:
                raise ValueError(f"{name}: the last shard is too large")
        if self.tokenizer.vocabulary > 2 ** (8 * BYTES_OF[self.dtype]):
            raise ValueError(f"{self.dtype} does not hold {self.tokenizer.vocabulary} tokens")
        if self.tokenizer.end_id >= self.tokenizer.vocabulary:
            raise ValueError("the end token is not in the vocabulary")
        return self

    def split(self, name: Split) -> SplitIndex:
        """One of the two parts."""
        return self.splits.train if name == "train" else self.splits.validation

    def digest(self, name: Split) -> str:
        """Names the tokens of a split: equal if all its files are."""
        parts = [self.dtype, [shard.model_dump() for shard in self.split(name).shards]]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def shard_path(folder: Path, split: Split, number: int) -> Path:
    """Where a shard is; the index names no files, so it cannot name any elsewhere."""
    return folder / f"{split}-{number:05d}.bin"


def read_index(folder: Path) -> Index:
    """The index of a folder that was built to its end.

    Args:
        folder: as `xsake data build` writes it.
    """
    path = folder / INDEX
    if not path.exists():
        raise _nothing_built(folder)
    what = f"an index of tokens: {path}"
    data = _json.read(path, max_bytes=MOST_BYTES)
    found = _json.loads(data, what=what, max_bytes=MOST_BYTES, max_containers=MOST_PARTS)
    return validate(Index, found, what=what)


def require_tokenizer(folder: Path, index: Index) -> None:
    """Raise if the tokenizer in a data folder is not the one that made its tokens.

    Args:
        folder: with a tokenizer.json.
        index: of the folder.
    """
    path = folder / TOKENIZER
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != index.tokenizer.sha256:
        raise ArgumentError(
            "the tokenizer is not the one that made the tokens",
            got=f"{path} with sha256 {digest}",
            expected=f"sha256 {index.tokenizer.sha256}, as in {INDEX}",
            fix=AGAIN,
        )


def write_index(folder: Path, index: Index) -> None:
    """Make the folder readable: the last thing that a build does."""
    _json.write(folder / INDEX, index.to_json() + "\n", max_bytes=MOST_BYTES)


def _nothing_built(folder: Path) -> ArgumentError:
    if (folder / UNFINISHED).exists():
        return ArgumentError(
            "the data is not complete: its build was interrupted",
            got=f"{folder} has {UNFINISHED} and no {INDEX}",
            fix="give the same `xsake data build` command once more; it goes on from there",
        )
    return ArgumentError(
        "there is no data in this folder",
        got=folder if folder.is_dir() else f"{folder}, which is no folder",
        expected=f"a folder with {INDEX}",
        fix="make it with `xsake data build`",
    )
