"""Index of a data folder: sizes and digests of all token files."""

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

INDEX, BUILD_LOG = "index.json", "building.jsonl"
MAX_BYTES, MAX_CONTAINERS = 2**26, 2**20
ITEMSIZE = {"uint16": 2, "uint32": 4}
REBUILD_FIX = "copy the folder again, or rebuild it with `xsake data build --no-resume`"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(Frozen):
    """File of tokens; its position in the list is its number."""

    tokens: Positive
    blake2b: Digest


class SplitIndex(Frozen):
    """Tokens of a split, in shards of equal size."""

    documents: Count
    tokens: Count
    shards: tuple[Shard, ...]


class Splits(Frozen):
    """Train and validation; every document is in one of them."""

    train: SplitIndex
    validation: SplitIndex


class TokenizerIdentity(Frozen):
    """Tokenizer of the data; its file is in the folder of the index."""

    sha256: Digest = Field(description="of tokenizer.json")
    vocabulary: Positive = Field(description="largest token ID + 1")
    end_token: Text = Field(description="appended to every document")
    end_id: Count
    asked_vocabulary: Positive | None = Field(
        description="requested size, if it was trained on the train split"
    )


class SkippedDocuments(Frozen):
    """Unusable documents of a text file, skipped on request."""

    name: str = Field(description="of the file")
    documents: Positive
    first: Text = Field(description="location and problem of the first one")


class DataIndex(Frozen):
    """Output of `xsake data build` and everything it was built from."""

    schema_version: Literal[1] = 1
    recipe: Digest = Field(description="of texts, tokenizer and settings")
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"] = Field(
        description="of the shards, little-endian, no header"
    )
    shard_tokens: Positive = Field(description="of every shard except the last of its split")
    validation: Fraction = Field(description="share of documents, chosen by a hash of their text")
    splits: Splits
    sources: tuple[TextFile, ...]
    skipped: tuple[SkippedDocuments, ...] = ()
    versions: dict[str, str]

    def to_json(self) -> str:
        """Return the content of the file; version 0.1.0 reads it if no document was skipped."""
        return self.model_dump_json(indent=1, exclude=None if self.skipped else {"skipped"})

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> "DataIndex":
        for name in SPLITS:
            split = self.split(name)
            if split.tokens != sum(shard.tokens for shard in split.shards):
                raise ValueError(f"{name}: the shards do not add up to {split.tokens} tokens")
            if any(shard.tokens != self.shard_tokens for shard in split.shards[:-1]):
                raise ValueError(f"{name}: a shard before the last is not full")
            if split.shards and split.shards[-1].tokens > self.shard_tokens:
                raise ValueError(f"{name}: the last shard is too large")
        if self.tokenizer.vocabulary > 2 ** (8 * ITEMSIZE[self.dtype]):
            raise ValueError(f"{self.dtype} does not hold {self.tokenizer.vocabulary} tokens")
        if self.tokenizer.end_id >= self.tokenizer.vocabulary:
            raise ValueError("the end token is not in the vocabulary")
        return self

    def split(self, name: Split) -> SplitIndex:
        """Return one of the two splits."""
        return self.splits.train if name == "train" else self.splits.validation

    def digest(self, name: Split) -> str:
        """Return a digest of the tokens of a split."""
        parts = [self.dtype, [shard.model_dump() for shard in self.split(name).shards]]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def shard_path(folder: Path, split: Split, number: int) -> Path:
    """Return the path of a shard; the index has no file names, so it cannot point elsewhere."""
    return folder / f"{split}-{number:05d}.bin"


def read_index(folder: Path) -> DataIndex:
    """Read the index of a complete build.

    Args:
        folder: from `xsake data build`.
    """
    path = folder / INDEX
    if not path.exists():
        raise _no_index_error(folder)
    what = f"an index of tokens: {path}"
    data = _json.read(path, max_bytes=MAX_BYTES)
    document = _json.loads(data, what=what, max_bytes=MAX_BYTES, max_containers=MAX_CONTAINERS)
    return validate(DataIndex, document, what=what)


def require_tokenizer(folder: Path, index: DataIndex) -> None:
    """Raise if the tokenizer in a data folder is not that of its tokens.

    Args:
        folder: with a tokenizer.json.
        index: of the folder.
    """
    path = folder / TOKENIZER
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != index.tokenizer.sha256:
        raise ArgumentError(
            "the tokenizer does not match the tokens",
            got=f"{path} with sha256 {digest}",
            expected=f"sha256 {index.tokenizer.sha256}, as in {INDEX}",
            fix=REBUILD_FIX,
        )


def write_index(folder: Path, index: DataIndex) -> None:
    """Write the index, the last step of a build."""
    _json.write(folder / INDEX, index.to_json() + "\n", max_bytes=MAX_BYTES)


def _no_index_error(folder: Path) -> ArgumentError:
    if (folder / BUILD_LOG).exists():
        return ArgumentError(
            "the build of the data was interrupted",
            got=f"{folder} has {BUILD_LOG} and no {INDEX}",
            fix="repeat the same `xsake data build` command; it resumes the build",
        )
    return ArgumentError(
        "the folder has no data",
        got=folder if folder.is_dir() else f"{folder}, not a folder",
        expected=f"a folder with {INDEX}",
        fix="create it with `xsake data build`",
    )
