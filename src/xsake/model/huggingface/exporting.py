"""Export a decoder as a Hugging Face checkpoint, atomically."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from xsake.errors import ArgumentError, CheckpointError
from xsake.model.decoder import Decoder
from xsake.model.huggingface.configs import TokenIds, write_config
from xsake.model.huggingface.families import FAMILIES, ModelFamily
from xsake.model.huggingface.files import CONFIG, INDEX, WEIGHTS, CheckpointFolder
from xsake.model.huggingface.param_map import ParamMapping, get_variable, map_params

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")


def export(
    model: Decoder,
    directory: str | Path,
    *,
    family: str,
    token_ids: TokenIds = TokenIds(),  # noqa: B008 (frozen)
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """Write a decoder as a checkpoint: config.json, safetensors and, optionally, a tokenizer.

    The directory is renamed into place when it is complete. Host memory holds the tensors of one
    file at a time.

    Args:
        model: the decoder; tensors keep its dtype.
        directory: to create.
        family: `model_type` to write; `load` returns that of a checkpoint.
        token_ids: bos, eos and pad for config.json; `load` returns those of a checkpoint.
        tokenizer_from: directory whose tokenizer files are copied.
        max_shard_bytes: maximum tensor bytes per file; more are sharded, with an index.
        overwrite: whether an existing checkpoint may be replaced.

    Returns:
        The directory.

    Example:
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> from xsake.model.huggingface import export
        >>> model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> sorted(path.name for path in export(model, "tiny", family="llama").iterdir())
        ['config.json', 'model.safetensors']
    """
    target = Path(os.path.abspath(directory))  # links are not resolved, so that they are rejected
    _check_target(target, overwrite)
    if family not in FAMILIES or max_shard_bytes < 1:
        raise ArgumentError(
            "export-arguments", "invalid family or max_shard_bytes",
            got=f"{family=}, {max_shard_bytes=}",
            expected=f"a family of {', '.join(FAMILIES)}, and at least 1 byte per file",
            fix="use load(...).family of a loaded model",
        )  # fmt: skip
    state = nnx.state(model, nnx.Param)
    dtype = _dtype(state)
    values = write_config(FAMILIES[family], model.config, dtype=dtype.name, token_ids=token_ids)
    tensors = _list_tensors(FAMILIES[family], state)
    copied = [] if tokenizer_from is None else _find_tokenizer_files(tokenizer_from)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _atomic_directory(target) as folder:
        _write_json(folder / CONFIG, values)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        _write_weights(folder, tensors, state, dtype, max_shard_bytes)
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    is_checkpoint = target.is_dir() and not target.is_symlink() and (target / CONFIG).is_file()
    if overwrite and is_checkpoint and not any(path.is_dir() for path in target.iterdir()):
        return
    raise CheckpointError(
        "export-path",
        "the output path exists",
        got=f"{target.name!r}, {'a checkpoint' if is_checkpoint else 'not a plain checkpoint'}",
        expected="a new directory, or with overwrite=True a checkpoint without subdirectories",
        fix="choose another directory, or set overwrite=True to replace a checkpoint",
    )


def _dtype(state: Any) -> np.dtype:
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise CheckpointError(
            "export-dtype", "the parameters do not have one supported dtype",
            got=", ".join(sorted(dtypes)),
            expected="one of " + ", ".join(_DTYPES), fix="create the model with one param_dtype",
        )  # fmt: skip
    return jnp.dtype(dtypes.pop())


def _find_tokenizer_files(directory: str | Path) -> list[Path]:
    folder = CheckpointFolder.open(directory)
    files = [folder.file(name) for name in _TOKENIZER_FILES if folder.has(name)]
    if not files:
        raise CheckpointError(
            "export-tokenizer",
            "tokenizer_from has no tokenizer",
            got=f"none of {', '.join(_TOKENIZER_FILES)} in the directory",
            expected="tokenizer.json at least",
            fix="pass a directory with a tokenizer, or omit tokenizer_from",
        )
    return files


def _list_tensors(family: ModelFamily, state: Any) -> dict[str, tuple[int, list[ParamMapping]]]:
    """Return layer and parameters by tensor: those outside of layers first, then by layer."""
    tensors: dict[str, tuple[int, list[ParamMapping]]] = {}
    for mapping in map_params(family, state):
        for layer, name in enumerate(mapping.tensors(family.prefixes[0])):
            place = tensors.setdefault(name, (layer if mapping.is_stacked else -1, []))
            place[1].append(mapping)
    return dict(sorted(tensors.items(), key=lambda item: item[1][0]))


def _write_weights(
    folder: Path,
    tensors: dict[str, tuple[int, list[ParamMapping]]],
    state: Any,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    sizes = {
        name: math.prod(mappings[0].tensor_shape) * dtype.itemsize
        for name, (_, mappings) in tensors.items()
    }
    shards: list[list[str]] = []
    remaining = 0
    for name, size in sizes.items():
        if not shards or size > remaining:
            shards.append([])
            remaining = max_shard_bytes
        shards[-1].append(name)
        remaining -= size
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        values = {name: _tensor(state, *tensors[name]) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})  # required by transformers
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        metadata = {"total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _tensor(state: Any, layer: int, mappings: list[ParamMapping]) -> np.ndarray:
    parts = []
    for mapping in mappings:
        value = get_variable(state, mapping.path).get_value()
        parts.append(mapping.to_file(np.asarray(value if layer < 0 else value[layer])))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to the target on success."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    new = scratch / "new"
    try:
        new.mkdir()
        yield new
        for path in new.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        old = scratch / "old"
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(scratch)
