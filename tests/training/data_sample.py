"""Tiny tokenizers, texts and data folders for the tests of training data."""

from pathlib import Path

import numpy as np
import tokenizers

from xsake.training.data.index import DataIndex, SplitIndex, Splits, TokenizerIdentity, write_index
from xsake.training.data.shards import ShardWriter

END = "<|endoftext|>"


def save_tokenizer(folder: Path, *, more: int = 0) -> Path:
    """A token for every byte, one for the end of a text, and some that no text has."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"{i:06d}" for i in range(more))]
    found = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(words)}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens([END])
    folder.mkdir(parents=True, exist_ok=True)
    found.save(str(folder / "tokenizer.json"))
    return folder


def letters(count: int, *, seed: int = 0, longest: int = 60) -> list[str]:
    """Different documents of 1 to `longest` random letters."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, size=count)
    return [f"{i} " + "".join(rng.choice(list("abcdefgh "), size)) for i, size in enumerate(sizes)]


def save_texts(path: Path, documents: list[str]) -> Path:
    path.write_text(f"\n{END}\n".join(documents))
    return path


def save_data(folder: Path, train: int, validation: int = 0, *, shard_tokens: int = 50) -> Path:
    """A data folder whose every token is its own place in the stream of its split."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for name, count in (("train", train), ("validation", validation)):
        writer = ShardWriter(
            folder,
            name,
            dtype=np.dtype("<u4"),
            size=shard_tokens,
            finished_shards=[],
            on_finished=lambda _: None,
        )
        writer.add(0, np.arange(count, dtype=np.uint32))
        writer.finish(1)
        splits[name] = SplitIndex(documents=1, tokens=count, shards=tuple(writer.shards))
    made_by = TokenizerIdentity(
        sha256="0" * 64, vocabulary=2**17, end_token=END, end_id=0, asked_vocabulary=None
    )
    index = DataIndex(
        recipe="0" * 64, tokenizer=made_by, dtype="uint32", shard_tokens=shard_tokens,
        validation=0.0, splits=Splits(**splits), sources=(), versions={},
    )  # fmt: skip
    write_index(folder, index)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
