"""Sections of the configuration of a training run, and presets of models."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from xsake import masks
from xsake._schema import Count, Fraction, Frozen, LocalPath, Number, Positive
from xsake.errors import ArgumentError
from xsake.hads.topk import BudgetScope
from xsake.model.config import DecoderConfig, LayerKind, Llama3Scaling, Rope
from xsake.model.sharding import LOGICAL_AXES
from xsake.observability.trackers import TrackerName

Flag = Annotated[bool, Field(strict=True)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
PositiveNumber = Annotated[Number, Field(gt=0)]
NonNegativeNumber = Annotated[Number, Field(ge=0)]
DecayRate = Annotated[Number, Field(ge=0, lt=1)]
Budget = Annotated[Number, Field(gt=0, le=1)]

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


def require(is_valid: object, slug: str, what: str, **parts: Any) -> None:
    """Raise an `ArgumentError` with these parts unless a condition holds."""
    if not is_valid:
        raise ArgumentError(slug, what, **parts)


class ModelSection(Frozen):
    """Decoder and numerics; parameters are float32."""

    preset: str | None = Field(default=None, description="base of `decoder`")
    decoder: DecoderConfig = Field(description="with a preset: only the fields that differ")
    weights: LocalPath | None = Field(
        default=None,
        description="Hugging Face directory whose weights a run starts with; weights that it lacks,"
        " such as those of an indexer, are drawn",
    )
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Flag = Field(
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
        require(
            name is not None or changes, "no-model", "the configuration has no model",
            expected="model.preset, model.decoder, or a preset and the fields that differ",
            fix=f"set model.preset to one of {', '.join(PRESETS)}",
        )  # fmt: skip
        require(
            name is None or name in tuple(PRESETS), "preset", "unknown preset", got=repr(name),
            expected=", ".join(PRESETS),
        )  # fmt: skip
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

    name: RunName = "run"
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


class OptimizerSection(Frozen):
    """AdamW with a linear warmup and cosine decay to a fraction of the peak learning rate."""

    peak_learning_rate: PositiveNumber
    warmup_steps: Count = 0
    total_steps: Positive | None = Field(
        default=None, description="end of the cosine decay; None: run.steps"
    )
    end_lr_ratio: Fraction = Field(default=0.1, description="final / peak learning rate")
    weight_decay: NonNegativeNumber = 0.1
    no_decay: tuple[Literal["norms", "biases", "embeddings"], ...] = Field(
        default=("norms", "biases", "embeddings"),
        description="groups of parameters without weight decay",
    )
    no_decay_paths: tuple[str, ...] = Field(
        default=(), description="more parameters without weight decay, by path; * is a wildcard"
    )
    no_decay_axes: tuple[str, ...] = Field(
        default=(), description="more parameters without weight decay, by axis, such as vocab"
    )
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.95
    epsilon: PositiveNumber = 1e-8
    clip_norm: NonNegativeNumber = Field(
        default=1.0, description="of all gradients; 0: not clipped"
    )
    grad_accum_steps: Positive = Field(default=1, description="microbatches of one update")

    @field_validator("no_decay_axes")
    @classmethod
    def _check_axes(cls, axes: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [axis for axis in axes if axis not in LOGICAL_AXES]
        require(
            not unknown, "logical-axis", "unknown logical axis", got=", ".join(map(repr, unknown)),
            expected=", ".join(LOGICAL_AXES),
        )  # fmt: skip
        return axes


class BudgetAnnealing(Frozen):
    """Schedule from a large budget to the final one, in levels with one compiled step each."""

    start_step: Count = 0
    steps: Positive = Field(description="length of the schedule")
    start_budget: Budget = Field(default=1.0, description="1: dense attention")
    levels: Annotated[Positive, Field(ge=2, le=16)] = Field(
        default=4, description="number of budgets, including the first and the last"
    )

    def budgets(self, last: float) -> tuple[float, ...]:
        """Return the budgets of all levels, evenly spaced.

        Example:
            >>> BudgetAnnealing(steps=100, levels=3).budgets(0.25)
            (1.0, 0.625, 0.25)
        """
        return tuple(round(float(x), 6) for x in np.linspace(self.start_budget, last, self.levels))

    def level(self, step: int) -> int:
        """Return the level of a step; its budget is never below linear interpolation.

        Example:
            >>> annealing = BudgetAnnealing(start_step=10, steps=100, levels=3)
            >>> [annealing.level(step) for step in (0, 59, 60, 109, 110, 999)]
            [0, 0, 1, 1, 2, 2]
        """
        passed = max(step - self.start_step, 0) * (self.levels - 1) // self.steps
        return min(passed, self.levels - 1)


class IndexerSection(Frozen):
    """Training of the block indexers of a model."""

    weight: PositiveNumber = Field(
        default=1.0, description="factor on KL(attention || index), mean over layers, per token"
    )
    dense_steps: Count = Field(
        default=0, description="first steps, with dense attention; the index learns from all keys"
    )
    freeze_model: Flag = Field(
        default=False, description="train nothing but the indexers in the dense steps"
    )
    learning_rate_ratio: PositiveNumber = Field(
        default=1.0, description="of the indexers, relative to the other weights"
    )


class AttentionSection(Frozen):
    """Attention used during training."""

    kind: Literal["dense", "mask", "plan", "native_sparse", "indexed"] = "dense"
    indexer: IndexerSection | None = Field(
        default=None, description="for kind indexed; None: its defaults"
    )
    mask: str | None = Field(default=None, description="such as window(255, 0) | sinks(4)")
    plan: LocalPath | None = Field(default=None, description="file of an existing plan")
    profile: LocalPath | None = Field(
        default=None, description="source of the plans; None: calibrate the initial weights"
    )
    budget: Budget | None = Field(default=None, description="computed / visible blocks")
    policy: Literal["effect", "kl", "mass", "uniform", "entropy_budget", "static"] = "kl"
    selector: Literal["sampled", "cumulant", "antidiagonal", "pooled"] = "sampled"
    block: Annotated[Positive, Field(le=2**16)] = Field(default=64, description="tokens")
    scope: BudgetScope = Field(
        default=BudgetScope.ROW,
        description="unit that shares a budget; row: selection is independent of later rows",
    )
    balance_heads: Flag = Field(
        default=True, description="order heads so that tensor shards have equal work"
    )
    annealing: BudgetAnnealing | None = None
    probe_interval: Count = Field(
        default=100, description="steps between measurements of the attention mass of every head"
    )
    probe_rows: Positive = Field(default=4, description="query blocks per probe")
    recalibration_interval: Count = 0
    calibration_windows: Positive = Field(default=4, description="sequences per calibration")

    @model_validator(mode="after")
    def _check_consistency(self) -> "AttentionSection":
        self._reject_unused_settings()
        if self.kind == "mask":
            require(
                self.mask, "no-mask", "attention.kind='mask' needs a mask",
                expected="attention.mask, such as window(255, 0) | sinks(4)",
            )  # fmt: skip
            masks.parse(self.mask or "")
        require(
            self.kind != "plan" or (self.plan is None) != (self.budget is None),
            "plan-or-budget",
            "attention.kind='plan' needs either a plan or a budget",
            got=f"attention.plan={self.plan}, attention.budget={self.budget}",
            expected="exactly one of the two",
        )
        if self.annealing and self.budget:
            start = self.annealing.start_budget
            require(
                start > self.budget, "annealing-budget", "annealing must decrease the budget",
                got=f"start_budget={start}, budget={self.budget}",
                expected="a start_budget above the budget",
            )  # fmt: skip
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether the run starts with a calibration."""
        return self.kind == "plan" and self.plan is None and self.profile is None

    def _reject_unused_settings(self) -> None:
        fields = AttentionSection.model_fields
        made = {"profile", "budget", "policy", "selector", "block", "annealing"}
        used = {
            "dense": {"kind", "probe_interval", "probe_rows"},
            "native_sparse": {"kind"},
            "indexed": {"kind", "indexer"},
            "mask": {"kind", "mask", "probe_interval", "probe_rows"},
            "plan": set(fields) - {"mask"} - (made if self.plan else set()),
        }[self.kind]
        unused = [x for x in fields if x not in used and getattr(self, x) != fields[x].default]
        suffix = " together with attention.plan" if self.plan and self.kind == "plan" else ""
        require(
            not unused, "unused-settings",
            f"attention.kind={self.kind!r} does not use all given settings",
            got=", ".join(f"attention.{name}" for name in unused) + suffix,
            expected="only " + ", ".join(name for name in fields if name in used),
            fix="remove the setting, or change attention.kind",
        )  # fmt: skip


class GuardSection(Frozen):
    """Settings of the update filter."""

    enabled: Flag = True
    window: Annotated[Positive, Field(ge=2, le=2**16)] = Field(
        default=128, description="number of accepted gradient norms that a new one is compared with"
    )
    zscore_threshold: PositiveNumber = Field(
        default=6.0, description="accepted distance from their mean, in standard deviations"
    )
    max_consecutive_skips: Positive = Field(
        default=3,
        description="after this many the run fails; large finite norms are accepted one earlier",
    )


class TrackSection(Frozen):
    """Trackers in addition to metrics.jsonl, which is always written."""

    trackers: tuple[TrackerName, ...] = Field(
        default=(), description="installed by the extra `trackers`"
    )
    min_interval_s: Annotated[Number, Field(ge=0, le=3600)] = Field(
        default=1.0,
        description="trackers get at most one line of fast steps per interval; 0: every line",
    )
    project: RunName = "xsake"
    is_online: Flag = Field(
        default=False, description="let wandb use the network; otherwise upload with `wandb sync`"
    )
