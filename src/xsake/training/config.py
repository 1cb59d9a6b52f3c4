"""What a training run is made of: one checked value, read from TOML, kept beside the run as JSON.

`0` means never wherever something happens every so many steps. Paths are relative to the folder
that the command is started in.
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
from xsake.hads.budget import AlwaysOn, total_blocks
from xsake.layout.grid import blocks_of
from xsake.model.config import DecoderConfig, LayerKind, Llama3Scaling, Rope
from xsake.training.attention_section import AttentionSection, require_native
from xsake.training.config_errors import describe
from xsake.training.guard import GuardSection
from xsake.training.optimizer import OptimizerSection
from xsake.training.track_section import TrackSection

MOST_BYTES = 2**20  # of a file that people write by hand
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
"""Decoders by name: the shapes of published models, without their weights."""


class ModelSection(Frozen):
    """The decoder; parameters are float32 whatever it computes in."""

    preset: str | None = Field(default=None, description="what `decoder` starts from")
    decoder: DecoderConfig = Field(description="with a preset: only what is different")
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    is_rematerialised: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="gradients compute a layer's inside again, not keep it"
    )
    logit_positions: Positive = Field(
        default=256, description="positions of each sequence whose logits exist at once"
    )

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name, changes = given.get("preset"), given.get("decoder", {})
        if name is None and not changes:
            raise ArgumentError(
                "the model is not described",
                expected="a preset, a decoder, or a preset and what is different",
                fix=f"set model.preset to one of {', '.join(PRESETS)}",
            )
        if name is not None and name not in tuple(PRESETS):
            raise ArgumentError(
                "there is no such preset", got=repr(name), expected=", ".join(PRESETS)
            )
        if name is None or not isinstance(changes, dict):
            return given
        return given | {"decoder": PRESETS[name].model_dump() | changes}


class DataSection(Frozen):
    """What is read, and how much at a time."""

    folder: LocalPath
    context: Positive = Field(description="tokens that a sequence predicts")
    batch: Positive = Field(description="sequences of one update, of all devices and microbatches")
    seed: Count = Field(default=0, description="of the order in which windows are read")
    verify: Literal["full", "size"] = Field(
        default="full",
        description="full: compare digests of token files when they are first used; size: sizes",
    )


class MeshSection(Frozen):
    """Devices along each axis; their product is how many there must be."""

    data: Positive = 1
    fsdp: Positive = 1
    tensor: Positive = 1
    context: Positive = 1


class CheckpointSection(Frozen):
    """Where and how often the state is kept."""

    folder: LocalPath
    every: Count = 1000
    keep: Positive = 3
    verify: Literal["full", "size", "off"] = "full"
    lease_seconds: Annotated[Number, Field(ge=1, le=3600)] = Field(
        default=60.0,
        description="a run that gives no sign of life for so long may be taken over elsewhere",
    )


class RunSection(Frozen):
    """How long, and how often something is told."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "run"
    steps: Positive
    seed: Count = Field(default=0, description="of the first weights and of all draws")
    log_every: Count = 10
    evaluate_every: Count = 0
    evaluation_batches: Positive = 8
    check_replicas_every: Count = Field(
        default=0, description="compares copies of parameters that should be equal, bit by bit"
    )
    hang_seconds: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="a step that takes longer writes what every thread is doing"
    )


class TrainingConfig(Frozen):
    """A training run.

    Example:
        >>> config = TrainingConfig.of({
        ...     "model": {"preset": "tiny", "decoder": {"layers": 2}},
        ...     "data": {"folder": "corpus", "context": 128, "batch": 8},
        ...     "optimizer": {"peak_learning_rate": 1e-3},
        ...     "checkpoint": {"folder": "run/checkpoints"},
        ...     "run": {"steps": 100},
        ... }, overrides=["optimizer.accumulation=2"])
        >>> config.model.decoder.layers, config.optimizer.accumulation, config.total_steps
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
    def of(cls, document: dict[str, Any], overrides: Sequence[str] = ()) -> "TrainingConfig":
        """A config from nested dictionaries; what is wrong with it is told in its own words.

        Args:
            document: what the TOML file says.
            overrides: such as `optimizer.accumulation=4`; values as TOML writes them.
        """
        for text in overrides:
            document = _overridden(document, text)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise describe(error, TrainingConfig) from error

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> "TrainingConfig":
        """A config from a TOML file, at most 1 MB; see `of`."""
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES} bytes")
            document = _parse_toml(data.decode("utf-8"))
        except OSError as error:
            raise ArgumentError(
                "the configuration cannot be read", got=f"{path}: {error.strerror}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                "the configuration is not TOML", got=f"{path}: {error}", expected="UTF-8 TOML"
            ) from error
        return cls.of(document, overrides)

    def to_json(self) -> str:
        """Its record: every setting with its value. Reading it gives an equal config."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "TrainingConfig":
        """A config from its record, at most 1 MB."""
        if len(text) > MOST_BYTES:
            raise ArgumentError(
                "the record of a run is too large",
                got=f"{len(text):,} characters",
                expected=f"at most {MOST_BYTES:,}",
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise describe(error, TrainingConfig) from error

    @property
    def digest(self) -> str:
        """Names the configuration: equal digests, equal settings."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def total_steps(self) -> int:
        """Updates after which the learning rate is at its end."""
        return self.optimizer.total_steps or self.run.steps

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingConfig":
        _require_batch(self)
        _require_lengths(self)
        require_native(self.attention, self.model.decoder, self.mesh.context)
        _require_steps(self)
        _require_blocks(self)
        if self.data.folder == self.checkpoint.folder:
            raise ArgumentError(
                "data and checkpoints share a folder",
                got=str(self.data.folder),
                expected="a folder for each",
                fix="change checkpoint.folder",
            )
        return self


def _require_batch(config: TrainingConfig) -> None:
    parts, shards = config.optimizer.accumulation, config.mesh.data * config.mesh.fsdp
    if config.data.batch % (parts * shards):
        raise ArgumentError(
            "the batch cannot be cut evenly",
            got=f"data.batch={config.data.batch}, optimizer.accumulation={parts}, "
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
            "a sequence cannot be cut evenly over the devices",
            got=f"data.context={context}, mesh.context={mesh.context}",
            expected=f"data.context a multiple of {mesh.context}",
        )
    if decoder.kv_heads % mesh.tensor:
        raise ArgumentError(
            "heads cannot be cut evenly over the devices",
            got=f"{decoder.kv_heads} kv heads, mesh.tensor={mesh.tensor}",
            expected=f"a mesh.tensor that divides {decoder.kv_heads}",
        )


def _require_steps(config: TrainingConfig) -> None:
    total, steps = config.total_steps, config.run.steps
    if config.optimizer.warmup_steps >= total:
        raise ArgumentError(
            "the warmup leaves no step for the rest of the schedule",
            got=f"optimizer.warmup_steps={config.optimizer.warmup_steps}, {total} steps in all",
            expected=f"fewer than {total} warmup steps",
        )
    if steps > total:
        raise ArgumentError(
            "the run is longer than the schedule of its learning rate",
            got=f"run.steps={steps}, optimizer.total_steps={total}",
            expected=f"at most {total} steps",
            fix="raise optimizer.total_steps, or leave it out",
        )
    annealing = config.attention.annealing
    if annealing and annealing.start_step + annealing.steps > steps:
        raise ArgumentError(
            "the run ends before its budget is reached",
            got=f"annealing until step {annealing.start_step + annealing.steps}, run.steps={steps}",
            expected=f"annealing that ends by step {steps}",
            fix="lower attention.annealing.steps or its start_step",
        )


def _require_blocks(config: TrainingConfig) -> None:
    """Raise now what making a plan would raise after the calibration."""
    attention, decoder, always = config.attention, config.model.decoder, AlwaysOn()
    if attention.kind != "plan" or attention.budget is None or attention.profile is not None:
        return
    n = blocks_of(config.data.context, attention.block)
    if n <= always.level:
        raise ArgumentError(
            "sequences are too short to choose blocks in",
            got=f"data.context={config.data.context}, {n} blocks of {attention.block}",
            expected=f"more blocks than the {always.level} that are always on",
            fix="lower attention.block or raise data.context",
        )
    heads = decoder.layers * decoder.q_heads
    total_blocks(attention.budget, heads=heads, n=n, always=always)


def _overridden(document: dict[str, Any], text: str) -> dict[str, Any]:
    """The document with one setting replaced."""
    path, equals, value = (part.strip() for part in text.partition("="))
    steps = path.split(".")
    if not equals or not all(step.replace("_", "").isalnum() for step in steps):
        raise ArgumentError(
            "an override names a setting and its value",
            got=repr(text),
            expected="section.setting=value, such as optimizer.accumulation=4",
        )
    try:
        parsed = _parse_toml(f"value = {value}")
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"the value of {path} is not TOML",
            got=value or "nothing",
            expected='a TOML value: 3, 0.5, true, [1, 2], "text"',
            fix=f'text needs quotes: {path}="{value}"',
        ) from error
    if parsed.keys() != {"value"}:
        raise ArgumentError("an override sets one value", got=repr(text), expected="one line")
    return _with(document, steps, parsed["value"], path)


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; keys of very many parts, which take quadratic memory, raise `ValueError`."""
    if any(part.count(".") >= MAX_KEY_PARTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def _with(document: Any, steps: list[str], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ArgumentError(
            "an override reaches into something that has no parts", got=path,
            expected="section.setting=value",
        )  # fmt: skip
    first, *rest = steps
    inner = _with(document.get(first, {}), rest, value, path) if rest else value
    return {**document, first: inner}
