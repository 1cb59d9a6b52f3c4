"""Configuration of a training run: read from TOML, validated, saved with the run as JSON.

An interval of 0 steps means never. Paths are relative to the working directory.
"""

import hashlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from xsake._schema import Count, Frozen, LocalPath, Number, Positive
from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, total_blocks
from xsake.layout.grid import count_blocks
from xsake.model.config import DecoderConfig, LayerKind, Llama3Scaling, Rope
from xsake.training.attention_section import AttentionSection, require_native
from xsake.training.config_aliases import rename_path, rename_settings, restore_old_names
from xsake.training.config_errors import describe
from xsake.training.guard import GuardSection
from xsake.training.optimizer import OptimizerSection
from xsake.training.track_section import TrackSection

MAX_BYTES = 2**20  # of a configuration file
MAX_KEY_PARTS = 64  # of a dotted TOML key
_BETWEEN_KEYS = re.compile(r"[=,{}\[\]\n]+")

PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig.tiny(),
    "gpt2": DecoderConfig(
        vocab_size=50257, width=768, mlp_width=3072, layers=12, q_heads=12, kv_heads=12,
        head_dim=64, context=1024, kinds=(LayerKind(),), has_learned_positions=True, norm="layer",
        activation="gelu_tanh", is_gated=False, has_qkv_bias=True, has_out_bias=True,
        has_mlp_bias=True,
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152, width=576, mlp_width=1536, layers=30, q_heads=9, kv_heads=3,
        head_dim=64, context=8192, kinds=(LayerKind(rope=Rope(base=100000.0)),),
    ),
    "llama-3.2-1b": DecoderConfig(
        vocab_size=128256, width=2048, mlp_width=8192, layers=16, q_heads=32, kv_heads=8,
        head_dim=64, context=131072,
        kinds=(LayerKind(rope=Rope(base=500000.0, scaling=Llama3Scaling(
            factor=32.0, low_factor=1.0, high_factor=4.0, original_context=8192))),),
    ),
}  # fmt: skip
"""Decoder configurations by name: shapes of published models, without weights."""


class ModelSection(Frozen):
    """Decoder and numerics; parameters are float32."""

    preset: str | None = Field(default=None, description="base of `decoder`")
    decoder: DecoderConfig = Field(description="with a preset: only the fields that differ")
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="recompute activations of a layer in the backward pass"
    )
    loss_chunk_size: Positive = Field(
        default=256, description="positions per sequence whose logits are in memory at a time"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name, changes = given.get("preset"), given.get("decoder", {})
        if name is None and not changes:
            raise ArgumentError(
                "the configuration has no model",
                expected="model.preset, model.decoder, or a preset and the fields that differ",
                fix=f"set model.preset to one of {', '.join(PRESETS)}",
            )
        if name is not None and name not in tuple(PRESETS):
            raise ArgumentError("unknown preset", got=repr(name), expected=", ".join(PRESETS))
        if name is None or not isinstance(changes, dict):
            return given
        return given | {"decoder": PRESETS[name].model_dump() | changes}


class DataSection(Frozen):
    """Training data and batch size."""

    folder: LocalPath
    context: Positive = Field(description="predicted tokens per sequence")
    batch: Positive = Field(description="sequences per update, over all devices and microbatches")
    seed: Count = Field(default=0, description="of the shuffle")
    verify: Literal["full", "size"] = Field(
        default="full",
        description="full: verify digests of token files on first use; size: compare sizes only",
    )


class MeshSection(Frozen):
    """Devices along each mesh axis; their product is the number of devices."""

    data: Positive = 1
    fsdp: Positive = 1
    tensor: Positive = 1
    context: Positive = 1


class CheckpointSection(Frozen):
    """Checkpoint folder, interval and retention."""

    folder: LocalPath
    save_interval: Count = 1000
    max_to_keep: Positive = 3
    verify: Literal["full", "size", "off"] = "full"
    lease_seconds: Annotated[Number, Field(ge=1, le=3600)] = Field(
        default=60.0,
        description="without a heartbeat for this long, another host may take over the run",
    )


class RunSection(Frozen):
    """Length of the run and intervals of logging, evaluation and checks."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "run"
    steps: Positive
    seed: Count = Field(default=0, description="of the initial weights and all random numbers")
    log_interval: Count = 10
    eval_interval: Count = 0
    eval_batches: Positive = 8
    replica_check_interval: Count = Field(
        default=0, description="compares replicas of the parameters bit by bit"
    )
    step_timeout_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="a longer step dumps the stacks of all threads; 0: no limit"
    )


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
            raise describe(error, TrainingConfig) from error

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "TrainingConfig":
        """Read a TOML file of at most 1 MB; see `from_dict`."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            document = _parse_toml(data.decode("utf-8"))
        except OSError as error:
            raise ArgumentError(
                "the configuration cannot be read", got=f"{path}: {error.strerror}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                "the configuration is not TOML", got=f"{path}: {error}", expected="UTF-8 TOML"
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
                "the saved configuration is too large",
                got=f"{len(text):,} characters",
                expected=f"at most {MAX_BYTES:,}",
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise describe(error, TrainingConfig) from error

    @property
    def digest(self) -> str:
        """SHA-256 of all settings, independent of renamed settings."""
        return hashlib.sha256(restore_old_names(self.to_json()).encode()).hexdigest()

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
        _require_batch(self)
        _require_lengths(self)
        require_native(self.attention, self.model.decoder, self.mesh.context)
        _require_steps(self)
        _require_blocks(self)
        if self.data.folder == self.checkpoint.folder:
            raise ArgumentError(
                "data.folder and checkpoint.folder are the same",
                got=str(self.data.folder),
                expected="two folders",
                fix="change checkpoint.folder",
            )
        return self


def _require_batch(config: TrainingConfig) -> None:
    parts, shards = config.optimizer.grad_accum_steps, config.mesh.data * config.mesh.fsdp
    if config.data.batch % (parts * shards):
        raise ArgumentError(
            "data.batch is not divisible",
            got=f"data.batch={config.data.batch}, optimizer.grad_accum_steps={parts}, "
            f"mesh.data * mesh.fsdp = {shards}",
            expected=f"data.batch a multiple of {parts * shards}",
        )


def _require_lengths(config: TrainingConfig) -> None:
    decoder, context, mesh = config.model.decoder, config.data.context, config.mesh
    if context > decoder.context:
        raise ArgumentError(
            "sequences are longer than the model's context",
            got=f"data.context={context}, model.decoder.context={decoder.context}",
            expected=f"at most {decoder.context} tokens",
            fix="lower data.context or raise model.decoder.context",
        )
    if context % mesh.context:
        raise ArgumentError(
            "data.context is not divisible by mesh.context",
            got=f"data.context={context}, mesh.context={mesh.context}",
            expected=f"data.context a multiple of {mesh.context}",
        )
    if decoder.kv_heads % mesh.tensor:
        raise ArgumentError(
            "the number of kv heads is not divisible by mesh.tensor",
            got=f"{decoder.kv_heads} kv heads, mesh.tensor={mesh.tensor}",
            expected=f"mesh.tensor a divisor of {decoder.kv_heads}",
        )


def _require_steps(config: TrainingConfig) -> None:
    total, steps = config.total_steps, config.run.steps
    if config.optimizer.warmup_steps >= total:
        raise ArgumentError(
            "the warmup is as long as the schedule or longer",
            got=f"optimizer.warmup_steps={config.optimizer.warmup_steps}, {total} steps in total",
            expected=f"fewer than {total} warmup steps",
        )
    if steps > total:
        raise ArgumentError(
            "the run is longer than its learning rate schedule",
            got=f"run.steps={steps}, optimizer.total_steps={total}",
            expected=f"at most {total} steps",
            fix="raise optimizer.total_steps, or leave it out",
        )
    annealing = config.attention.annealing
    if annealing and annealing.start_step + annealing.steps > steps:
        raise ArgumentError(
            "the run ends before the annealing",
            got=f"annealing until step {annealing.start_step + annealing.steps}, run.steps={steps}",
            expected=f"annealing that ends by step {steps}",
            fix="lower attention.annealing.steps or its start_step",
        )


def _require_blocks(config: TrainingConfig) -> None:
    """Raise before the calibration if no plan can be made from it."""
    attention, decoder, always = config.attention, config.model.decoder, ForcedBlocks()
    if attention.kind != "plan" or attention.budget is None or attention.profile is not None:
        return
    n = count_blocks(config.data.context, attention.block)
    if n <= always.blocks_per_row:
        raise ArgumentError(
            "sequences are too short for block selection",
            got=f"data.context={config.data.context}, {n} blocks of {attention.block}",
            expected=f"more than the {always.blocks_per_row} forced blocks",
            fix="lower attention.block or raise data.context",
        )
    heads = decoder.layers * decoder.q_heads
    total_blocks(attention.budget, heads=heads, n=n, forced=always)


def _apply_override(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the document with one setting replaced."""
    path, equals, value = (part.strip() for part in text.partition("="))
    steps = path.split(".")
    if not equals or not all(step.replace("_", "").isalnum() for step in steps):
        raise ArgumentError(
            "an override is not of the form setting=value",
            got=repr(text),
            expected="section.setting=value, such as optimizer.grad_accum_steps=4",
        )
    try:
        parsed = _parse_toml(f"value = {value}")
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"the value of {path} is not TOML",
            got=value or "no value",
            expected='a TOML value: 3, 0.5, true, [1, 2], "text"',
            fix=f'quote strings: {path}="{value}"',
        ) from error
    if parsed.keys() != {"value"}:
        raise ArgumentError("an override has several values", got=repr(text), expected="one value")
    return _set_value(document, rename_path(steps), parsed["value"], path)


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; long dotted keys, which take quadratic memory, raise `ValueError`."""
    if any(part.count(".") >= MAX_KEY_PARTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def _set_value(document: Any, steps: list[str], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ArgumentError(
            "an override addresses a setting inside a plain value", got=path,
            expected="section.setting=value",
        )  # fmt: skip
    first, *rest = steps
    inner = _set_value(document.get(first, {}), rest, value, path) if rest else value
    return {**document, first: inner}
