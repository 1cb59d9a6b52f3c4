"""Configuration of a training run: read from TOML, validated, saved with the run as JSON.

An interval of 0 steps means never. Paths are relative to the working directory. Names of settings
of 0.1.0 are accepted everywhere.
"""

import difflib
import hashlib
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from xsake import _json
from xsake._schema import Frozen
from xsake.errors import ArgumentError, XsakeError, escape_controls
from xsake.hads.budget import ForcedBlocks, total_blocks
from xsake.layout.grid import count_blocks
from xsake.training.sections import (
    AttentionSection,
    CheckpointSection,
    DataSection,
    GuardSection,
    IndexerSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    TrackSection,
    require,
)

MAX_BYTES = 2**20  # of a configuration file
MAX_KEY_PARTS = 64  # of a dotted TOML key
MAX_PROBLEMS = 20  # in one message
_BETWEEN_KEYS = re.compile(r"[=,{}\[\]\n]+")


class TrainingConfig(Frozen):
    """A training run.

    Example:
        >>> config = TrainingConfig.from_dict({
        ...     "model": {"preset": "tiny", "decoder": {"layers": 2}},
        ...     "data": {"folder": "corpus", "context": 128, "batch": 8},
        ...     "optimizer": {"peak_learning_rate": 1e-3},
        ...     "checkpoint": {"folder": "run/checkpoints"},
        ...     "run": {"steps": 100},
        ... }, overrides=["optimizer.grad_accum_steps=2"])
        >>> config.model.decoder.layers, config.optimizer.grad_accum_steps, config.total_steps
        (2, 2, 100)
    """

    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    attention: AttentionSection = AttentionSection()
    mesh: MeshSection = MeshSection()
    checkpoint: CheckpointSection
    guard: GuardSection = GuardSection()
    track: TrackSection = TrackSection()
    run: RunSection

    @classmethod
    def from_dict(cls, document: dict[str, Any], overrides: Sequence[str] = ()) -> "TrainingConfig":
        """Build a configuration from nested dictionaries; errors name every wrong setting.

        Args:
            document: content of the TOML file; names of 0.1.0 are accepted.
            overrides: such as `optimizer.grad_accum_steps=4`, with TOML values.
        """
        document = rename_settings(document)
        for text in overrides:
            document = _apply_override(document, text)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise _describe(error) from error

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "TrainingConfig":
        """Read a TOML file of at most 1 MB; see `from_dict`."""
        data = _json.read(path, max_bytes=MAX_BYTES)
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            document = _parse_toml(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                "config-toml",
                "the configuration is not TOML",
                got=f"{path}: {error}",
                expected="UTF-8 TOML",
            ) from error
        return cls.from_dict(document, overrides)

    def to_json(self) -> str:
        """Return all settings with their values; `from_json` returns an equal configuration."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "TrainingConfig":
        """Parse the output of `to_json`, also that of earlier versions, at most 1 MB."""
        if len(text) > MAX_BYTES:
            raise ArgumentError(
                "config-size", "the saved configuration is too large",
                got=f"{len(text):,} characters",
                expected=f"at most {MAX_BYTES:,}",
            )  # fmt: skip
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _describe(error) from error

    @property
    def digest(self) -> str:
        """SHA-256 of all settings, independent of renamed settings."""
        return hashlib.sha256(_restore_old_names(self.to_json()).encode()).hexdigest()

    @property
    def indexer_loss(self) -> IndexerSection | None:
        """Settings of the loss of the model's indexers; None: it has none to train."""
        indexer = self.model.decoder.indexer
        if indexer is None or indexer.dim is None:
            return None
        return self.attention.indexer or IndexerSection()

    @property
    def total_steps(self) -> int:
        """Updates at which the learning rate schedule ends."""
        return self.optimizer.total_steps or self.run.steps

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, document: Any) -> Any:
        return rename_settings(document)

    @model_validator(mode="after")
    def _check_consistency(self) -> "TrainingConfig":
        _check_batch_and_mesh(self)
        _check_model_attention(self)
        _check_steps(self)
        _check_blocks(self)
        require(
            self.data.folder != self.checkpoint.folder,
            "same-folder", "data.folder and checkpoint.folder are the same",
            got=self.data.folder, expected="two folders", fix="change checkpoint.folder",
        )  # fmt: skip
        return self


# ---------- consistency of several settings ----------


def _check_batch_and_mesh(config: TrainingConfig) -> None:
    decoder, data, mesh = config.model.decoder, config.data, config.mesh
    parts, shards = config.optimizer.grad_accum_steps, mesh.data * mesh.fsdp
    require(
        data.batch % (parts * shards) == 0, "batch-parts", "data.batch is not divisible",
        got=f"data.batch={data.batch}, optimizer.grad_accum_steps={parts}, "
        f"mesh.data * mesh.fsdp = {shards}",
        expected=f"data.batch a multiple of {parts * shards}",
    )  # fmt: skip
    require(
        data.context <= decoder.context, "context-model",
        "sequences are longer than the model's context",
        got=f"data.context={data.context}, model.decoder.context={decoder.context}",
        expected=f"at most {decoder.context} tokens",
        fix="lower data.context or raise model.decoder.context",
    )  # fmt: skip
    require(
        data.context % mesh.context == 0, "context-shards",
        "data.context is not divisible by mesh.context",
        got=f"data.context={data.context}, mesh.context={mesh.context}",
        expected=f"data.context a multiple of {mesh.context}",
    )  # fmt: skip
    require(
        decoder.kv_heads % mesh.tensor == 0,
        "tensor-shards",
        "the number of kv heads is not divisible by mesh.tensor",
        got=f"{decoder.kv_heads} kv heads, mesh.tensor={mesh.tensor}",
        expected=f"mesh.tensor a divisor of {decoder.kv_heads}",
    )


def _check_model_attention(config: TrainingConfig) -> None:
    """Check the kinds of attention whose sizes are part of the model."""
    for kind, name in (("native_sparse", "native_sparse"), ("indexed", "indexer")):
        is_kind = config.attention.kind == kind
        require(
            is_kind == (getattr(config.model.decoder, name) is not None),
            f"{name.replace('_', '-')}-settings",
            f"attention of kind {kind!r} must be set for both attention and model, or neither",
            got=f"attention.kind={config.attention.kind!r}, model.decoder.{name} "
            f"{'is missing' if is_kind else 'is set'}",
            expected=f"attention.kind={kind!r} and its sizes in model.decoder.{name}",
            fix=f"set model.decoder.{name} = {{}} for the sizes of the paper",
        )
        require(
            not is_kind or config.mesh.context == 1,
            "native-sparse-mesh",
            f"attention of kind {kind!r} does not support context parallelism",
            got=f"mesh.context={config.mesh.context}", expected="mesh.context=1",
            fix="shard the batch (mesh.data, mesh.fsdp) and the heads (mesh.tensor)",
        )  # fmt: skip


def _check_steps(config: TrainingConfig) -> None:
    total, steps, warmup = config.total_steps, config.run.steps, config.optimizer.warmup_steps
    require(
        warmup < total, "warmup-length", "the warmup is as long as the schedule or longer",
        got=f"optimizer.warmup_steps={warmup}, {total} steps in total",
        expected=f"fewer than {total} warmup steps",
    )  # fmt: skip
    require(
        steps <= total, "run-length", "the run is longer than its learning rate schedule",
        got=f"run.steps={steps}, optimizer.total_steps={total}",
        expected=f"at most {total} steps", fix="raise optimizer.total_steps, or leave it out",
    )  # fmt: skip
    if annealing := config.attention.annealing:
        end = annealing.start_step + annealing.steps
        require(
            end <= steps, "annealing-length", "the run ends before the annealing",
            got=f"annealing until step {end}, run.steps={steps}",
            expected=f"annealing that ends by step {steps}",
            fix="lower attention.annealing.steps or its start_step",
        )  # fmt: skip


def _check_blocks(config: TrainingConfig) -> None:
    """Raise before the calibration if no plan can be made from it."""
    attention, decoder, forced = config.attention, config.model.decoder, ForcedBlocks()
    if attention.kind != "plan" or attention.budget is None or attention.profile is not None:
        return
    n = count_blocks(config.data.context, attention.block)
    require(
        n > forced.blocks_per_row, "context-blocks-forced",
        "sequences are too short for block selection",
        got=f"data.context={config.data.context}, {n} blocks of {attention.block}",
        expected=f"more than the {forced.blocks_per_row} forced blocks",
        fix="lower attention.block or raise data.context",
    )  # fmt: skip
    heads = decoder.layers * decoder.q_heads
    total_blocks(attention.budget, heads=heads, n=n, forced=forced)


# ---------- overrides ----------


def _apply_override(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the document with one setting replaced."""
    path, equals, value = (part.strip() for part in text.partition("="))
    steps = path.split(".")
    require(
        equals and all(step.replace("_", "").isalnum() for step in steps),
        "override-form", "an override is not of the form setting=value", got=repr(text),
        expected="section.setting=value, such as optimizer.grad_accum_steps=4",
    )  # fmt: skip
    try:
        parsed = _parse_toml(f"value = {value}")
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            "config-override-value", f"the value of {path} is not TOML", got=value or "no value",
            expected='a TOML value: 3, 0.5, true, [1, 2], "text"',
            fix=f'quote strings: {path}="{value}"',
        ) from error  # fmt: skip
    require(
        parsed.keys() == {"value"}, "override-values", "an override has several values",
        got=repr(text),
        expected="one value",
    )  # fmt: skip
    section, *rest = steps
    if rest:
        rest[0] = RENAMED.get(section, {}).get(rest[0], rest[0])
    return _set_value(document, [section, *rest], parsed["value"], path)


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; long dotted keys, which take quadratic memory, raise `ValueError`."""
    if any(part.count(".") >= MAX_KEY_PARTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def _set_value(document: Any, steps: list[str], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ArgumentError(
            "config-override", "an override addresses a setting inside a plain value", got=path,
            expected="section.setting=value",
        )  # fmt: skip
    first, *rest = steps
    inner = _set_value(document.get(first, {}), rest, value, path) if rest else value
    return {**document, first: inner}


# ---------- settings that were renamed after 0.1.0; their old names are accepted ----------

RENAMED: Mapping[str, Mapping[str, str]] = {
    "model": {"compute": "compute_dtype", "is_rematerialised": "remat",
              "logit_positions": "loss_chunk_size"},
    "optimizer": {"accumulation": "grad_accum_steps", "final_share": "end_lr_ratio",
                  "undecayed": "no_decay", "undecayed_axes": "no_decay_axes",
                  "undecayed_paths": "no_decay_paths"},
    "attention": {"is_balanced": "balance_heads", "probe_every": "probe_interval",
                  "recalibrate_every": "recalibration_interval"},
    "checkpoint": {"every": "save_interval", "keep": "max_to_keep"},
    "guard": {"is_on": "enabled", "most_skips": "max_consecutive_skips",
              "sigmas": "zscore_threshold"},
    "track": {"seconds": "min_interval_s"},
    "run": {"check_replicas_every": "replica_check_interval", "evaluate_every": "eval_interval",
            "evaluation_batches": "eval_batches", "hang_seconds": "step_timeout_s",
            "log_every": "log_interval"},
}  # fmt: skip
"""Current name by old name, for each section."""

_SECTION = re.compile(r'  "(\w+)": ')
_UNUSED = {
    '"indexer": null,',
    '"weights": null,',
}  # settings that 0.1.0 did not have, where they are not used
_SETTING = re.compile(r'    "(\w+)": ')


def rename_settings(document: Any) -> Any:
    """Return a configuration with every renamed setting under its current name."""
    if not isinstance(document, dict):
        return document
    return {section: _rename_section(section, values) for section, values in document.items()}


def _rename_section(section: Any, values: Any) -> Any:
    names = RENAMED.get(section, {}) if isinstance(section, str) else {}
    if not isinstance(values, dict):
        return values
    for old in names.keys() & values.keys():
        require(
            names[old] not in values, "setting-twice",
            "a setting is given twice, by its old and its current name",
            got=f"{section}.{old} and {section}.{names[old]}",
            expected=f"{section}.{names[old]}", fix=f"remove {section}.{old}",
        )  # fmt: skip
    return {names.get(name, name): value for name, value in values.items()}


def _restore_old_names(text: str) -> str:
    """Return the JSON of a configuration as 0.1.0 wrote it, so that digests are stable."""
    old = {section: {new: old for old, new in names.items()} for section, names in RENAMED.items()}
    section, lines = "", []
    for line in text.splitlines(keepends=True):
        if match := _SECTION.match(line):
            section = match[1]
        elif (match := _SETTING.match(line)) and match[1] in old.get(section, {}):
            line = f'    "{old[section][match[1]]}": {line[match.end() :]}'
        if line.strip() not in _UNUSED:
            lines.append(line)
    return "".join(lines)


# ---------- errors ----------


def _describe(error: ValidationError) -> ArgumentError:
    """Return an error that lists all problems of a configuration by setting."""
    problems = error.errors(include_url=False)
    cause = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(cause, XsakeError):
        path = ".".join(map(str, problems[0]["loc"]))
        what = f"{path}: {cause.what}" if "." in path else cause.what
        return ArgumentError(
            cause.slug, what, got=cause.got, expected=cause.expected, fix=cause.fix
        )
    lines = [_describe_one(problem) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS:,} more")
    return ArgumentError("config", "the configuration is not valid", got="\n".join(lines))


def _describe_one(problem: Any) -> str:
    path = tuple(problem["loc"])
    name = escape_controls(".".join(map(str, path))[:200]) or "configuration"
    cause = problem.get("ctx", {}).get("error")
    match problem["type"]:
        case "extra_forbidden":
            return f"{name}: unknown setting{_suggest(path)}"
        case "missing":
            return f"{name}: is required"
        case "value_error" if isinstance(cause, XsakeError):
            return f"{name}: {cause.what} (got {cause.got}, expected {cause.expected})"
        case "value_error":
            return f"{name}: {cause}"
    value = problem["input"]
    text = str(value) if isinstance(value, Path) else repr(value)
    return f"{name}: {problem['msg']}, not {text if len(text) <= 80 else f'{text[:80]}...'}"


def _suggest(path: tuple[Any, ...]) -> str:
    """Name the setting of a similar name in the section, or of the same name in another section."""
    *parents, last = path
    section: Any = TrainingConfig
    for step in parents:
        field = section.model_fields.get(step)
        types = [] if field is None else (field.annotation, *typing.get_args(field.annotation))
        section = next((k for k in types if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if section is None:
            return ""
    matches = difflib.get_close_matches(str(last)[:100], section.model_fields, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {'.'.join([*map(str, parents), matches[0]])}?"
    sections = TrainingConfig.model_fields.items()
    elsewhere = [
        name for name, field in sections if last in getattr(field.annotation, "model_fields", ())
    ]
    if elsewhere:
        return f"; did you mean {' or '.join(f'{name}.{last}' for name in elsewhere)}?"
    return f"; expected one of {', '.join(section.model_fields)}"
