"""Load a checkpoint directory into a decoder, one parameter at a time."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from xsake.errors import ArgumentError, CheckpointError
from xsake.model.config import DecoderConfig
from xsake.model.decoder import Decoder
from xsake.model.huggingface.configs import ModelDescription, TokenIds, read_config
from xsake.model.huggingface.families import ModelFamily, Prefixes
from xsake.model.huggingface.files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    READABLE,
    CheckpointFolder,
    StoredTensor,
    TensorReader,
)
from xsake.model.huggingface.placement import (
    ParamMapping,
    abstract_decoder,
    get_variable,
    map_params,
)
from xsake.model.huggingface.report import LoadReport, TensorRecord
from xsake.model.sharding import TENSOR_PARALLEL, check_rules
from xsake.sharding import ShardingRules, named_sharding


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Decoder loaded from a checkpoint, with metadata.

    Args:
        model: the decoder.
        config: of the decoder.
        family: `model_type`, for `export`.
        report: status of every tensor.
        token_ids: bos, eos and pad.
    """

    model: Decoder
    config: DecoderConfig
    family: str
    report: LoadReport
    token_ids: TokenIds


def load(
    directory: str | Path,
    *,
    compute_dtype=jnp.float32,
    param_dtype=jnp.float32,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> LoadedModel:
    """Load a Hugging Face checkpoint as a `Decoder`.

    Reads `config.json` and `*.safetensors`; pickles and links to files outside of the directory
    are rejected, and so are checkpoints with missing, unexpected, mis-shaped or non-finite
    tensors. Host memory holds one parameter at a time, with all of its layers.

    Args:
        directory: of a llama, qwen2, qwen3, mistral, gemma3 (text part) or gpt2 model.
        compute_dtype: of activations.
        param_dtype: of the weights; tensors are converted.
        mesh: for sharded weights; None: the default device.
        rules: mesh axes by logical axis; None: heads, MLP and vocabulary over an axis "tensor",
            if the mesh has one.

    Returns:
        The model, its config and family, and the status of every tensor.

    Example:
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> from xsake.model.huggingface import export, load
        >>> made = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> loaded = load(export(made, "tiny", family="llama"))
        >>> loaded.config == made.config, len(loaded.report.filter("used"))
        (True, 29)
    """
    compute_dtype, param_dtype = _float_dtype(compute_dtype), _float_dtype(param_dtype)
    rules = _resolve_rules(rules, mesh)
    folder = CheckpointFolder.open(directory)
    description = read_config(folder.json(CONFIG, max_bytes=MAX_CONFIG_BYTES))
    tensors = folder.tensors()
    abstract = abstract_decoder(description.config, compute_dtype, param_dtype)
    graph, state = nnx.split(abstract)
    mappings = map_params(description.family, state)
    prefixes = _find_prefixes(description.family, tensors)
    with folder.open_reader() as read:
        report = _make_report(description, mappings, prefixes, tensors, read)
        report.raise_on_errors()
        for mapping in mappings:
            stored = [tensors[name] for name in mapping.tensors(prefixes)]
            sharding = _sharding(mapping, mesh, rules)
            value = _load_param(mapping, stored, read, param_dtype, sharding)
            get_variable(state, mapping.path).set_value(value)
    model = nnx.merge(graph, state)
    return LoadedModel(
        model, description.config, description.family.name, report, description.token_ids
    )


def _float_dtype(dtype) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or not jnp.issubdtype(parsed, jnp.floating):
        raise ArgumentError(
            "the dtype is not floating point",
            got=repr(dtype),
            expected="float32, bfloat16 or another floating-point dtype",
            fix='use jnp.float32 or "float32"',
        )
    return parsed


def _find_prefixes(family: ModelFamily, tensors: dict[str, StoredTensor]) -> Prefixes:
    """Return the prefixes of tensor names, found by the name of the embedding."""
    embedding = next(row.name for row in family.rows if row.parameter == "embedding")
    for prefixes in family.prefixes:
        if embedding.format(body=prefixes.body) in tensors:
            return prefixes
    return family.prefixes[0]


def _make_report(
    description: ModelDescription,
    mappings: list[ParamMapping],
    prefixes: Prefixes,
    tensors: dict[str, StoredTensor],
    read: TensorReader,
) -> LoadReport:
    users: dict[str, list[ParamMapping]] = {}
    for mapping in mappings:
        for name in mapping.tensors(prefixes):
            users.setdefault(name, []).append(mapping)
    lines = [_used_line(name, tensors.get(name), mapped) for name, mapped in users.items()]
    for name, tensor in tensors.items():
        if name not in users:
            why = _ignore_reason(description, name, tensor, prefixes, tensors, read)
            outcome = "unexpected" if why is None else "ignored"
            lines.append(
                TensorRecord(name, outcome, why or "", dtype=tensor.dtype, actual=tensor.shape)
            )
    return LoadReport(description.family.name, tuple(lines))


def _used_line(name: str, tensor: StoredTensor | None, users: list[ParamMapping]) -> TensorRecord:
    expected = users[0].layout.shape
    line = TensorRecord(
        name,
        "used",
        users[0].layout.how,
        tuple(mapping.path for mapping in users),
        expected=expected,
    )
    if tensor is None:
        return dataclasses.replace(line, outcome="missing", how="")
    line = dataclasses.replace(line, dtype=tensor.dtype, actual=tensor.shape)
    if tensor.shape != expected:
        return dataclasses.replace(line, outcome="mis-shaped", how="")
    if tensor.dtype not in READABLE:
        return dataclasses.replace(line, outcome="unreadable", how="")
    return line


def _ignore_reason(
    description: ModelDescription,
    name: str,
    tensor: StoredTensor,
    prefixes: Prefixes,
    tensors: dict[str, StoredTensor],
    read: TensorReader,
) -> str | None:
    for pattern, why in description.family.harmless.items():
        if re.fullmatch(pattern, name):
            return why
    rows = {row.parameter: row.name.format(body=prefixes.body, head=prefixes.head)
            for row in description.family.rows if "{layer}" not in row.name}  # fmt: skip
    embedding = tensors.get(rows["embedding"])
    if not description.config.is_tied or name != rows["head"] or embedding is None:
        return None
    is_same_type = (tensor.dtype, tensor.shape) == (embedding.dtype, embedding.shape)
    if is_same_type and read(tensor).tobytes() == read(embedding).tobytes():
        return "identical to the embedding"
    raise CheckpointError(
        f"{name} differs from {embedding.name}, but tie_word_embeddings is true",
        got=f"{tensor.dtype} {list(tensor.shape)} and {embedding.dtype} {list(embedding.shape)}, "
        "of different values"
        if is_same_type
        else "of different shapes or dtypes",
        expected="the same values, or tie_word_embeddings: false",
        fix="set tie_word_embeddings to false in config.json if the model was trained untied",
    )


def _resolve_rules(rules: ShardingRules | None, mesh: Mesh | None) -> ShardingRules:
    if mesh is None:
        if rules:
            raise ArgumentError(
                "sharding rules require a mesh", got="mesh=None", expected="a jax.sharding.Mesh",
                fix="pass a mesh",
            )  # fmt: skip
        return {}
    if rules is None:
        return {name: axis for name, axis in TENSOR_PARALLEL.items() if axis in mesh.axis_names}
    check_rules(mesh, rules)
    return rules


def _sharding(
    mapping: ParamMapping, mesh: Mesh | None, rules: ShardingRules
) -> NamedSharding | None:
    if mesh is None:
        return None
    return named_sharding(mapping.path, mapping.names, mapping.shape, mesh, rules)


def _load_param(
    mapping: ParamMapping,
    stored: list[StoredTensor],
    read: TensorReader,
    dtype: np.dtype,
    sharding: NamedSharding | None,
) -> jax.Array:
    """Load one parameter; each device gets only its shard."""
    host = np.empty(mapping.shape, dtype) if mapping.is_stacked else None
    for layer, tensor in enumerate(stored):
        part = mapping.layout.to_decoder(read(tensor))
        with np.errstate(over="ignore", invalid="ignore"):
            if host is None:
                mapped = host = part.astype(dtype, copy=False)
            else:
                host[layer] = part
                mapped = host[layer]
        if not np.isfinite(mapped).all():
            raise _nonfinite_error(tensor, part, dtype)
    assert host is not None
    if sharding is None:
        return jnp.asarray(host)
    return jax.make_array_from_callback(mapping.shape, sharding, host.__getitem__)


def _nonfinite_error(tensor: StoredTensor, part: np.ndarray, dtype: np.dtype) -> CheckpointError:
    count = int((~np.isfinite(part)).sum())
    if not count:
        return CheckpointError(
            f"{tensor.name} overflows {dtype}",
            got=f"{tensor.dtype} values up to {float(np.abs(part).max()):g}",
            expected=f"values up to {float(jnp.finfo(dtype).max):g}",
            fix="load with a wider param_dtype",
        )
    return CheckpointError(
        f"{tensor.name} in {tensor.file} has non-finite values",
        got=f"{count} of {part.size} are NaN or infinite",
        expected="finite weights",
        fix="use an earlier checkpoint, or copy the file again",
    )
