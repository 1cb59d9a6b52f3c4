"""Load a checkpoint directory into a decoder, one parameter at a time."""

import dataclasses
import re
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from xsake.errors import ArgumentError, CheckpointError
from xsake.model.config import DecoderConfig
from xsake.model.decoder import Decoder
from xsake.model.huggingface.configs import ModelDescription, TokenIds, read_config
from xsake.model.huggingface.files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    READABLE,
    CheckpointFolder,
    StoredTensor,
)
from xsake.model.huggingface.param_map import ParamMapping, get_variable, map_params
from xsake.model.sharding import check_rules, default_rules
from xsake.sharding import ShardingRules, named_sharding

Outcome = Literal["used", "ignored", "missing", "unexpected", "mis-shaped", "unreadable"]
MAX_LISTED = 10
_FIXES = {
    "missing": "complete the download, or use the original config.json; a head tied to the "
    "embedding requires tie_word_embeddings: true",
    "unexpected": "use the original config.json: it describes a model without them",
    "mis-shaped": "use config.json and tensors of the same model",
    "unreadable": "convert the tensors to F32, F16 or BF16; quantized weights are not supported",
}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Status of one tensor."""

    name: str  # in the file
    outcome: Outcome  # status
    how: str = ""  # "as is", "reshaped", "transposed" or "split"; the reason if it is ignored
    parameters: tuple[str, ...] = ()  # of the decoder that use it
    dtype: str = ""  # in the file, as a safetensors name
    actual: tuple[int, ...] | None = None  # shape in the file; None if it is missing
    # shape according to config.json; None if it is unexpected
    expected: tuple[int, ...] | None = None

    @property
    def shape(self) -> str:
        """Actual shape, and the expected one if it differs."""
        actual = "nothing" if self.actual is None else f"{self.dtype} {list(self.actual)}"
        if self.expected is None or self.expected == self.actual:
            return actual
        return f"{actual}, expected {list(self.expected)}"


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Status of all actual and expected tensors of a checkpoint; printable.

    Args:
        family: of the names.
        lines: one per tensor.
    """

    family: str
    lines: tuple[TensorRecord, ...]

    def filter(self, *outcomes: Outcome) -> tuple[TensorRecord, ...]:
        """Return the tensors with one of these outcomes."""
        return tuple(line for line in self.lines if line.outcome in outcomes)

    def raise_on_errors(self) -> None:
        """Raise CheckpointError unless all tensors are used or ignored."""
        wrong = self.filter("missing", "unexpected", "mis-shaped", "unreadable")
        if not wrong:
            return
        listed = [f"{line.name} ({line.outcome}): {line.shape}" for line in wrong[:MAX_LISTED]]
        if len(wrong) > MAX_LISTED:
            listed.append(f"and {len(wrong) - MAX_LISTED} more")
        outcomes = dict.fromkeys(line.outcome for line in wrong)
        raise CheckpointError(
            "tensors", f"tensors of the checkpoint do not match its config.json: {len(wrong)} of "
            f"{len(self.lines)}", got="\n            ".join(listed),
            expected=f"exactly the tensors and shapes of this {self.family} model",
            fix="; ".join(_FIXES[outcome] for outcome in outcomes),
        )  # fmt: skip

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(self.filter(outcome))} {outcome}"
            for outcome in get_args(Outcome)
            if self.filter(outcome) or outcome in ("used", "missing", "unexpected")
        )
        rows = [
            (line.outcome, name, line.shape, line.how, ", ".join(line.parameters))
            for name, line in self._group_layers()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        written = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"{self.family}: {counts} tensors", *written])

    def _group_layers(self) -> list[tuple[str, TensorRecord]]:
        """Group lines that differ only in the layer number."""
        groups: dict[TensorRecord, list[int]] = {}
        for line in self.lines:
            number = _LAYER.search(line.name)
            same = dataclasses.replace(line, name=_LAYER.sub("{}", line.name, count=1))
            groups.setdefault(same, []).extend([int(number[0])] if number else [])
        return [
            (line.name.replace("{}", _format_ranges(numbers), 1) if numbers else line.name, line)
            for line, numbers in groups.items()
        ]


def _format_ranges(numbers: list[int]) -> str:
    """Return {0..3,5} for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    parts = ["..".join(map(str, run)) for run in runs]
    return parts[0] if len(numbers) == 1 else "{" + ",".join(parts) + "}"


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
    config, family = description.config, description.family
    graph, state = nnx.split(
        nnx.eval_shape(
            lambda: Decoder(
                config, rngs=nnx.Rngs(0), compute_dtype=compute_dtype, param_dtype=param_dtype
            )
        )
    )
    tensors = folder.list_tensors()
    # The prefixes of tensor names show in the name of the embedding.
    embedding, head = (
        next(spec.name for spec in family.tensors if spec.parameter == parameter)
        for parameter in ("embedding", "head")
    )
    prefixes = next(
        (each for each in family.prefixes if embedding.format(body=each.body) in tensors),
        family.prefixes[0],
    )
    tied = embedding.format(body=prefixes.body), head.format(head=prefixes.head)
    mappings = {mapping: mapping.tensors(prefixes) for mapping in map_params(family, state)}
    report = _make_report(description, mappings, tensors, tied)
    report.raise_on_errors()
    for mapping, names in mappings.items():
        host = _read_param(mapping, [tensors[name] for name in names], param_dtype)
        if mesh is None:
            value = jnp.asarray(host)
        else:
            sharding = named_sharding(mapping.path, mapping.axes, mapping.shape, mesh, rules)
            value = jax.make_array_from_callback(mapping.shape, sharding, host.__getitem__)
        get_variable(state, mapping.path).set_value(value)
    return LoadedModel(nnx.merge(graph, state), config, family.name, report, description.token_ids)


def _float_dtype(dtype) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or not jnp.issubdtype(parsed, jnp.floating):
        raise ArgumentError(
            "load-dtype", "the dtype is not floating point", got=repr(dtype),
            expected="float32, bfloat16 or another floating-point dtype",
            fix='use jnp.float32 or "float32"',
        )  # fmt: skip
    return parsed


def _resolve_rules(rules: ShardingRules | None, mesh: Mesh | None) -> ShardingRules:
    if mesh is None:
        if rules:
            raise ArgumentError(
                "rules-mesh", "sharding rules require a mesh",
                got="mesh=None", expected="a jax.sharding.Mesh",
                fix="pass a mesh",
            )  # fmt: skip
        return {}
    if rules is None:
        return default_rules(mesh)
    check_rules(mesh, rules)
    return rules


def _make_report(
    description: ModelDescription,
    mappings: dict[ParamMapping, list[str]],
    tensors: dict[str, StoredTensor],
    tied: tuple[str, str],
) -> LoadReport:
    """Return the status of all tensors; `tied` names the embedding and the head."""
    embedding, head = tied
    users: dict[str, list[ParamMapping]] = {}
    for mapping, names in mappings.items():
        for name in names:
            users.setdefault(name, []).append(mapping)
    lines = [_used_line(name, tensors.get(name), mapped) for name, mapped in users.items()]
    for name, tensor in tensors.items():
        if name in users:
            continue
        reasons = description.family.harmless.items()
        why = next((why for pattern, why in reasons if re.fullmatch(pattern, name)), None)
        if why is None and description.config.is_tied and name == head and embedding in tensors:
            _check_tied(tensor, tensors[embedding])
            why = "identical to the embedding"
        outcome = "unexpected" if why is None else "ignored"
        lines.append(
            TensorRecord(name, outcome, why or "", dtype=tensor.dtype, actual=tensor.shape)
        )
    return LoadReport(description.family.name, tuple(lines))


def _used_line(name: str, tensor: StoredTensor | None, users: list[ParamMapping]) -> TensorRecord:
    expected, paths = users[0].tensor_shape, tuple(mapping.path for mapping in users)
    if tensor is None:
        return TensorRecord(name, "missing", "", paths, expected=expected)
    outcome = (
        "mis-shaped"
        if tensor.shape != expected
        else "unreadable"
        if tensor.dtype not in READABLE
        else "used"
    )
    how = users[0].how if outcome == "used" else ""
    return TensorRecord(name, outcome, how, paths, tensor.dtype, tensor.shape, expected)


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    is_same_type = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if is_same_type and head.read_bytes() == embedding.read_bytes():
        return
    raise CheckpointError(
        "tied-embeddings",
        f"{head.name} differs from {embedding.name}, but tie_word_embeddings is true",
        got=f"{head.dtype} {list(head.shape)} and {embedding.dtype} {list(embedding.shape)}",
        expected="the same values, or tie_word_embeddings: false",
        fix="set tie_word_embeddings to false in config.json if the model was trained untied",
    )


def _read_param(mapping: ParamMapping, tensors: list[StoredTensor], dtype: np.dtype) -> np.ndarray:
    """Read one parameter with all of its layers."""
    host = np.empty(mapping.shape, dtype)
    for layer, tensor in enumerate(tensors):
        part = mapping.to_decoder(tensor.read())
        place = host[layer] if mapping.is_stacked else host
        with np.errstate(over="ignore", invalid="ignore"):
            place[...] = part
        if np.isfinite(place).all():
            continue
        count = int((~np.isfinite(part)).sum())
        if count:
            raise CheckpointError(
                "non-finite", f"{tensor.name} in {tensor.file} has non-finite values",
                got=f"{count} of {part.size} are NaN or infinite", expected="finite weights",
                fix="use an earlier checkpoint, or copy the file again",
            )  # fmt: skip
        raise CheckpointError(
            "overflow",
            f"{tensor.name} overflows {dtype}",
            got=f"{tensor.dtype} values up to {float(np.abs(part).max()):g}",
            expected=f"values up to {float(jnp.finfo(dtype).max):g}",
            fix="load with a wider param_dtype",
        )
    return host
