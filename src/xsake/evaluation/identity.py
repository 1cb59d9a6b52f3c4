"""Identity of a model by digests of its files."""

import hashlib
import json
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.evaluation.record import ModelIdentity, WeightFile

MAX_HASHED_BYTES = 10**9  # larger weights take as long to hash as the first window


def identify(folder: Path) -> ModelIdentity:
    """Identify a Hugging Face checkpoint.

    Returns:
        Digests of its files; sizes only for weights above 1 GB.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        is_small = sum(file.stat().st_size for file in files) <= MAX_HASHED_BYTES
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
        # Sizes do not change with further training, modification times do.
        times = [] if is_small else [file.stat().st_mtime_ns for file in files]
    except OSError as error:
        raise ArgumentError("cannot read a model file", got=str(error)) from error
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
