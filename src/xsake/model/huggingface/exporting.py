"""Exporting: a decoder out into a directory that Hugging Face transformers loads, whole or not."""

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
from xsake.model.huggingface.files import CONFIG, INDEX, WEIGHTS, Folder
from xsake.model.huggingface.placement import Placed, placed, variable
from xsake.model.huggingface.written_configs import write_config

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class _Out:
    """A tensor to write: one layer of one parameter, or of several that share it."""

    name: str
    layer: int
    places: tuple[Placed, ...]

    def bytes(self, dtype: np.dtype) -> int:
        return math.prod(self.places[0].stored.shape) * dtype.itemsize

    def value(self, state: Any) -> np.ndarray:
        parts = []
        for place in self.places:
            whole = variable(state, place.path).get_value()
            own = np.asarray(whole[self.layer] if place.is_stacked else whole)
            parts.append(place.stored.to_file(own))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def export(
    model: Decoder,
    directory: str | Path,
    *,
    family: str,
    token_ids: TokenIds = TokenIds(),  # noqa: B008 (frozen)
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    is_replacing: bool = False,
) -> Path:
    """Write a decoder as a checkpoint: config.json, safetensors and, if given, a tokenizer.

    The directory appears when everything in it is complete; until then there is none. One file's
    tensors at a time are in host memory.

    Args:
        model: the decoder; tensors are written in its own dtype.
        directory: to be made.
        family: `model_type` to write it as; `load` says which one a model came from.
        token_ids: bos, eos and pad for config.json; `load` gives those of a checkpoint.
        tokenizer_from: a directory whose tokenizer files are copied along.
        max_shard_bytes: tensors in one file; more are spread over several, with an index.
        is_replacing: whether a checkpoint that is there already may be replaced.

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
    target = Path(os.path.abspath(directory))  # a link stays what it is, to be refused
    _check_target(target, is_replacing)
    if family not in FAMILIES or max_shard_bytes < 1:
        raise ArgumentError(
            "no such checkpoint can be written",
            got=f"{family=}, {max_shard_bytes=}",
            expected=f"a family out of {', '.join(FAMILIES)} and at least one byte in a file",
            fix="give load(...).family for a model that was loaded",
        )
    state = nnx.state(model, nnx.Param)
    dtype = _dtype(state)
    values = write_config(FAMILIES[family], model.config, dtype=dtype.name, token_ids=token_ids)
    places = placed(FAMILIES[family], state)
    copied = [] if tokenizer_from is None else _tokenizer_files(Folder.at(tokenizer_from))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _appearing(target) as folder:
        _write_json(folder / CONFIG, values)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        _write_weights(folder, _tensors(family, places), state, dtype, max_shard_bytes)
    return target


def _check_target(target: Path, is_replacing: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    ours = target.is_dir() and not target.is_symlink() and (target / CONFIG).is_file()
    if is_replacing and ours and not any(path.is_dir() for path in target.iterdir()):
        return
    raise CheckpointError(
        "there is something already where the checkpoint should go",
        got=f"{target.name!r}, {'a checkpoint' if ours else 'not a plain checkpoint'}",
        expected="a new directory, or with is_replacing=True a checkpoint without subdirectories",
        fix="choose another directory, or give is_replacing=True to replace a checkpoint",
    )


def _dtype(state: Any) -> np.dtype:
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise CheckpointError(
            "the model's parameters are not of one dtype that can be written",
            got=", ".join(sorted(dtypes)),
            expected="one of " + ", ".join(_DTYPES),
            fix="make the model with one param_dtype",
        )
    return jnp.dtype(dtypes.pop())


def _tensors(family: str, places: list[Placed]) -> list[_Out]:
    """Every tensor to write: what is outside of layers first, then layer by layer."""
    found: dict[tuple[int, str], list[Placed]] = {}
    for place in places:
        for layer, name in enumerate(place.tensors(FAMILIES[family].prefixes[0])):
            found.setdefault((layer if place.is_stacked else -1, name), []).append(place)
    return [
        _Out(name, layer, tuple(own))
        for (layer, name), own in sorted(found.items(), key=lambda item: item[0][0])
    ]


def _write_weights(
    folder: Path, tensors: list[_Out], state: Any, dtype: np.dtype, max_shard_bytes: int
) -> None:
    shards: list[list[_Out]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.bytes(dtype) > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.bytes(dtype)
    places = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # transformers reads no file that does not say whose tensors these are.
        save_file(
            {tensor.name: tensor.value(state) for tensor in shard},
            folder / name, metadata={"format": "pt"},
        )  # fmt: skip
        places |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.bytes(dtype) for tensor in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _tokenizer_files(folder: Folder) -> list[Path]:
    found = [folder.file(name) for name in _TOKENIZER_FILES if folder.has(name)]
    if not found:
        raise CheckpointError(
            "there is no tokenizer to copy",
            got=f"none of {', '.join(_TOKENIZER_FILES)} in the directory",
            expected="tokenizer.json at least",
            fix="give the directory that has the model's tokenizer, or leave tokenizer_from out",
        )
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    made = scratch / "new"
    try:
        made.mkdir()
        yield made
        for path in made.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        old = scratch / "old"
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(scratch)
