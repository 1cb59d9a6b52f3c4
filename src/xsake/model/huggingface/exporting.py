"""Export a decoder as a Hugging Face checkpoint, atomically."""

import contextlib
import dataclasses
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
from xsake.model.huggingface.configs import TokenIds
from xsake.model.huggingface.families import FAMILIES
from xsake.model.huggingface.files import CONFIG, INDEX, WEIGHTS, CheckpointFolder
from xsake.model.huggingface.placement import ParamMapping, get_variable, map_params
from xsake.model.huggingface.written_configs import write_config

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class _OutputTensor:
    """Tensor to write: one layer of one or several parameters."""

    name: str
    layer: int
    mappings: tuple[ParamMapping, ...]

    def bytes(self, dtype: np.dtype) -> int:
        return math.prod(self.mappings[0].layout.shape) * dtype.itemsize

    def value(self, state: Any) -> np.ndarray:
        parts = []
        for mapping in self.mappings:
            value = get_variable(state, mapping.path).get_value()
            layer = np.asarray(value[self.layer] if mapping.is_stacked else value)
            parts.append(mapping.layout.to_file(layer))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


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
            "invalid family or max_shard_bytes",
            got=f"{family=}, {max_shard_bytes=}",
            expected=f"a family of {', '.join(FAMILIES)}, and at least 1 byte per file",
            fix="use load(...).family of a loaded model",
        )
    state = nnx.state(model, nnx.Param)
    dtype = _dtype(state)
    values = write_config(FAMILIES[family], model.config, dtype=dtype.name, token_ids=token_ids)
    mappings = map_params(FAMILIES[family], state)
    copied = (
        []
        if tokenizer_from is None
        else _find_tokenizer_files(CheckpointFolder.open(tokenizer_from))
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _atomic_directory(target) as folder:
        _write_json(folder / CONFIG, values)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        _write_weights(folder, _list_tensors(family, mappings), state, dtype, max_shard_bytes)
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    is_checkpoint = target.is_dir() and not target.is_symlink() and (target / CONFIG).is_file()
    if overwrite and is_checkpoint and not any(path.is_dir() for path in target.iterdir()):
        return
    raise CheckpointError(
        "the output path exists",
        got=f"{target.name!r}, {'a checkpoint' if is_checkpoint else 'not a plain checkpoint'}",
        expected="a new directory, or with overwrite=True a checkpoint without subdirectories",
        fix="choose another directory, or set overwrite=True to replace a checkpoint",
    )


def _dtype(state: Any) -> np.dtype:
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise CheckpointError(
            "the parameters do not have one supported dtype",
            got=", ".join(sorted(dtypes)),
            expected="one of " + ", ".join(_DTYPES),
            fix="create the model with one param_dtype",
        )
    return jnp.dtype(dtypes.pop())


def _list_tensors(family: str, mappings: list[ParamMapping]) -> list[_OutputTensor]:
    """List all tensors: those outside of layers first, then layer by layer."""
    groups: dict[tuple[int, str], list[ParamMapping]] = {}
    for mapping in mappings:
        for layer, name in enumerate(mapping.tensors(FAMILIES[family].prefixes[0])):
            groups.setdefault((layer if mapping.is_stacked else -1, name), []).append(mapping)
    return [
        _OutputTensor(name, layer, tuple(group))
        for (layer, name), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _write_weights(
    folder: Path, tensors: list[_OutputTensor], state: Any, dtype: np.dtype, max_shard_bytes: int
) -> None:
    shards: list[list[_OutputTensor]] = [[]]
    remaining = max_shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.bytes(dtype) > remaining:
            shards.append([])
            remaining = max_shard_bytes
        shards[-1].append(tensor)
        remaining -= tensor.bytes(dtype)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # transformers requires the format in the metadata.
        save_file(
            {tensor.name: tensor.value(state) for tensor in shard},
            folder / name, metadata={"format": "pt"},
        )  # fmt: skip
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.bytes(dtype) for tensor in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _find_tokenizer_files(folder: CheckpointFolder) -> list[Path]:
    files = [folder.file(name) for name in _TOKENIZER_FILES if folder.has(name)]
    if not files:
        raise CheckpointError(
            "tokenizer_from has no tokenizer",
            got=f"none of {', '.join(_TOKENIZER_FILES)} in the directory",
            expected="tokenizer.json at least",
            fix="pass a directory with a tokenizer, or omit tokenizer_from",
        )
    return files


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
