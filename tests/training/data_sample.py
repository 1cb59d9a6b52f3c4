"""Tiny tokenizers, texts and data folders for the tests of training data."""

import hashlib
from pathlib import Path

import numpy as np
import tokenizers

from xsake.training.build_data import ShardWriter
from xsake.training.corpus import assign_split
from xsake.training.data import DataIndex, SplitIndex, Splits, TokenizerIdentity, write_index

END = "<|endoftext|>"


def save_tokenizer(folder: Path, *, more: int = 0) -> Path:
    """A token for every byte, one for the end of a text, and some that no text has."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"{i:06d}" for i in range(more))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(words)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([END])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return folder


def letters(count: int, *, seed: int = 0, longest: int = 60) -> list[str]:
    """Different documents of 1 to `longest` random letters."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, size=count)
    return [f"{i} " + "".join(rng.choice(list("abcdefgh "), size)) for i, size in enumerate(sizes)]


def save_texts(path: Path, documents: list[str]) -> Path:
    path.write_text(f"\n{END}\n".join(documents))
    return path


def split_of(text: str, validation: float) -> str:
    return assign_split(hashlib.blake2b(text.encode(), digest_size=8).digest(), validation)


def save_data(folder: Path, train: int, validation: int = 0, *, shard_tokens: int = 50) -> Path:
    """A data folder in which each token is its position in its split."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for name, count in (("train", train), ("validation", validation)):
        writer = ShardWriter(folder, np.dtype("<u4"), shard_tokens, name)
        list(writer.add(0, np.arange(count, dtype=np.uint32)))
        writer.finish(1)
        splits[name] = SplitIndex(documents=1, tokens=count, shards=tuple(writer.shards))
    identity = TokenizerIdentity(
        sha256="0" * 64, vocabulary=2**17, end_token=END, end_id=0, asked_vocabulary=None
    )
    index = DataIndex(
        recipe="0" * 64, tokenizer=identity, dtype="uint32", shard_tokens=shard_tokens,
        validation=0.0, splits=Splits(**splits), sources=(), versions={},
    )  # fmt: skip
    write_index(folder, index)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
