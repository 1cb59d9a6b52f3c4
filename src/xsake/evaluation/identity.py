"""Which model an evaluation was made with, by digests of its files."""

import hashlib
import json
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.evaluation.record import ModelIdentity, WeightFile

MOST_HASHED = 10**9  # bytes of weights; more would take as long as the evaluation's first window


def identify(folder: Path) -> ModelIdentity:
    """The identity of a checkpoint in a folder, as Hugging Face lays it out.

    Args:
        folder: with config.json and safetensors files.

    Returns:
        Digests of its files; of weights that are larger than 1 GB sizes alone.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        is_small = sum(file.stat().st_size for file in files) <= MOST_HASHED
        weights = tuple(
            WeightFile(
                name=file.name,
                bytes=file.stat().st_size,
                sha256=_sha256(file) if is_small else None,
            )
            for file in files
        )
        config = _sha256(folder / "config.json")
        tokenizer = folder / "tokenizer.json"
        tokenizer_digest = _sha256(tokenizer) if tokenizer.exists() else None
        # Sizes alone would not tell a model from one that was trained further.
        times = [] if is_small else [file.stat().st_mtime_ns for file in files]
    except OSError as error:
        raise ArgumentError("a file of the model cannot be read", got=str(error)) from error
    parts = [config, tokenizer_digest, [weight.model_dump() for weight in weights], times]
    return ModelIdentity(
        name=folder.resolve().name,
        digest=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        config_sha256=config,
        tokenizer_sha256=tokenizer_digest,
        weights=weights,
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
