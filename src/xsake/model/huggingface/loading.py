"""Loading: a checkpoint's directory in, a decoder on its devices out, one parameter at a time."""

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
from xsake.model.huggingface.configs import Description, TokenIds, read_config
from xsake.model.huggingface.families import Family, Prefixes
from xsake.model.huggingface.files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    READABLE,
    Folder,
    Read,
    StoredTensor,
)
from xsake.model.huggingface.placement import Placed, abstract_decoder, placed, variable
from xsake.model.huggingface.report import LoadReport, TensorLine
from xsake.model.sharding import TENSOR_PARALLEL, check_rules
from xsake.placement import Rules, sharding_of


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A decoder from a checkpoint, and what is known about it.

    Args:
        model: the decoder, weights in place.
        config: what it is made of.
        family: its `model_type`, which `export` takes.
        report: what became of every tensor.
        token_ids: bos, eos and pad, for generating.
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
    rules: Rules | None = None,
) -> Loaded:
    """The model in a directory that Hugging Face transformers wrote, as a `Decoder`.

    `config.json` and `*.safetensors` are read; pickles and links that leave the directory are
    refused, and so is a checkpoint of which a tensor is missing, unexpected, mis-shaped or not
    finite. One parameter at a time is in host memory, all of its layers together.

    Args:
        directory: of a llama, qwen2, qwen3, mistral, gemma3 (its text part) or gpt2 model.
        compute_dtype: of activations.
        param_dtype: of the weights, whatever the file has.
        mesh: devices to spread the weights over; None: the default device.
        rules: which mesh axis a logical axis of the parameters takes; None: heads, MLP and
            vocabulary over an axis "tensor", if the mesh has one.

    Returns:
        The model, its config and family, and the report on every tensor.

    Example:
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> from xsake.model.huggingface import export, load
        >>> made = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> loaded = load(export(made, "tiny", family="llama"))
        >>> loaded.config == made.config, len(loaded.report.of("used"))
        (True, 29)
    """
    compute_dtype, param_dtype = _float_dtype(compute_dtype), _float_dtype(param_dtype)
    rules = _complete(rules, mesh)
    folder = Folder.at(directory)
    told = read_config(folder.json(CONFIG, max_bytes=MAX_CONFIG_BYTES))
    tensors = folder.tensors()
    abstract = abstract_decoder(told.config, compute_dtype, param_dtype)
    graph, state = nnx.split(abstract)
    places = placed(told.family, state)
    prefixes = _prefixes(told.family, tensors)
    with folder.reading() as read:
        report = _report(told, places, prefixes, tensors, read)
        report.raise_problems()
        for place in places:
            stored = [tensors[name] for name in place.tensors(prefixes)]
            sharding = _sharding(place, mesh, rules)
            value = _on_devices(place, stored, read, param_dtype, sharding)
            variable(state, place.path).set_value(value)
    model = nnx.merge(graph, state)
    return Loaded(model, told.config, told.family.name, report, told.token_ids)


def _float_dtype(dtype) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ArgumentError(
            "models are of floating-point numbers",
            got=repr(dtype),
            expected="float32, bfloat16 or another floating-point dtype",
            fix='use jnp.float32 or "float32"',
        )
    return found


def _prefixes(family: Family, tensors: dict[str, StoredTensor]) -> Prefixes:
    """The way to begin names that the file uses, told by its embedding."""
    embedding = next(row.name for row in family.rows if row.parameter == "embedding")
    for prefixes in family.prefixes:
        if embedding.format(body=prefixes.body) in tensors:
            return prefixes
    return family.prefixes[0]


def _report(
    told: Description,
    places: list[Placed],
    prefixes: Prefixes,
    tensors: dict[str, StoredTensor],
    read: Read,
) -> LoadReport:
    users: dict[str, list[Placed]] = {}
    for place in places:
        for name in place.tensors(prefixes):
            users.setdefault(name, []).append(place)
    lines = [_used_line(name, tensors.get(name), own) for name, own in users.items()]
    for name, tensor in tensors.items():
        if name not in users:
            why = _why_harmless(told, name, tensor, prefixes, tensors, read)
            outcome = "unexpected" if why is None else "set aside"
            lines.append(
                TensorLine(name, outcome, why or "", dtype=tensor.dtype, found=tensor.shape)
            )
    return LoadReport(told.family.name, tuple(lines))


def _used_line(name: str, tensor: StoredTensor | None, users: list[Placed]) -> TensorLine:
    expected = users[0].stored.shape
    line = TensorLine(
        name, "used", users[0].stored.how, tuple(place.path for place in users), expected=expected
    )
    if tensor is None:
        return dataclasses.replace(line, outcome="missing", how="")
    line = dataclasses.replace(line, dtype=tensor.dtype, found=tensor.shape)
    if tensor.shape != expected:
        return dataclasses.replace(line, outcome="mis-shaped", how="")
    if tensor.dtype not in READABLE:
        return dataclasses.replace(line, outcome="unreadable", how="")
    return line


def _why_harmless(
    told: Description,
    name: str,
    tensor: StoredTensor,
    prefixes: Prefixes,
    tensors: dict[str, StoredTensor],
    read: Read,
) -> str | None:
    for pattern, why in told.family.harmless.items():
        if re.fullmatch(pattern, name):
            return why
    rows = {row.parameter: row.name.format(body=prefixes.body, head=prefixes.head)
            for row in told.family.rows if "{layer}" not in row.name}  # fmt: skip
    embedding = tensors.get(rows["embedding"])
    if not told.config.is_tied or name != rows["head"] or embedding is None:
        return None
    alike = (tensor.dtype, tensor.shape) == (embedding.dtype, embedding.shape)
    if alike and read(tensor).tobytes() == read(embedding).tobytes():
        return "the embedding again, bit for bit"
    raise CheckpointError(
        f"{name} differs from {embedding.name}, but config.json says that they are one",
        got=f"{tensor.dtype} {list(tensor.shape)} and {embedding.dtype} {list(embedding.shape)}, "
        "of different values"
        if alike
        else "of different shapes or dtypes",
        expected="the same values, or tie_word_embeddings: false",
        fix="set tie_word_embeddings to false in config.json if the model was trained untied",
    )


def _complete(rules: Rules | None, mesh: Mesh | None) -> Rules:
    if mesh is None:
        if rules:
            raise ArgumentError(
                "sharding rules need a mesh", got="mesh=None", expected="a jax.sharding.Mesh",
                fix="give the mesh that the rules are about",
            )  # fmt: skip
        return {}
    if rules is None:
        return {name: axis for name, axis in TENSOR_PARALLEL.items() if axis in mesh.axis_names}
    check_rules(mesh, rules)
    return rules


def _sharding(place: Placed, mesh: Mesh | None, rules: Rules) -> NamedSharding | None:
    if mesh is None:
        return None
    return sharding_of(place.path, place.names, place.shape, mesh, rules)


def _on_devices(
    place: Placed,
    stored: list[StoredTensor],
    read: Read,
    dtype: np.dtype,
    sharding: NamedSharding | None,
) -> jax.Array:
    """One parameter; each device gets its own slice of it and no more."""
    host = np.empty(place.shape, dtype) if place.is_stacked else None
    for layer, tensor in enumerate(stored):
        part = place.stored.to_decoder(read(tensor))
        with np.errstate(over="ignore", invalid="ignore"):
            if host is None:
                own = host = part.astype(dtype, copy=False)
            else:
                host[layer] = part
                own = host[layer]
        if not np.isfinite(own).all():
            raise _not_finite(tensor, part, dtype)
    assert host is not None
    if sharding is None:
        return jnp.asarray(host)
    return jax.make_array_from_callback(place.shape, sharding, host.__getitem__)


def _not_finite(tensor: StoredTensor, part: np.ndarray, dtype: np.dtype) -> CheckpointError:
    count = int((~np.isfinite(part)).sum())
    if not count:
        return CheckpointError(
            f"{tensor.name} does not fit {dtype}",
            got=f"{tensor.dtype} values up to {float(np.abs(part).max()):g}",
            expected=f"values up to {float(jnp.finfo(dtype).max):g}",
            fix="load with a wider param_dtype",
        )
    return CheckpointError(
        f"{tensor.name} in {tensor.file} has values that are not finite",
        got=f"{count} of {part.size} are NaN or infinite",
        expected="finite weights",
        fix="take a checkpoint from before the training broke, or copy the file again",
    )
