"""Attention settings of a training run."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from xsake import masks
from xsake._schema import Count, Frozen, LocalPath, Number, Positive
from xsake.errors import ArgumentError
from xsake.hads.topk import BudgetScope
from xsake.model.config import DecoderConfig

Budget = Annotated[Number, Field(gt=0, le=1)]


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


class AttentionSection(Frozen):
    """Attention used during training."""

    kind: Literal["dense", "mask", "plan", "native_sparse"] = "dense"
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
    balance_heads: Annotated[bool, Field(strict=True)] = Field(
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
        _reject_unused_settings(self)
        if self.kind == "mask":
            masks.parse(self.mask or "")
        if self.kind == "plan" and (self.plan is None) == (self.budget is None):
            raise ArgumentError(
                "attention.kind='plan' needs either a plan or a budget",
                got=f"attention.plan={self.plan}, attention.budget={self.budget}",
                expected="exactly one of the two",
            )
        if self.annealing and self.budget and self.annealing.start_budget <= self.budget:
            raise ArgumentError(
                "annealing must decrease the budget",
                got=f"start_budget={self.annealing.start_budget}, budget={self.budget}",
                expected="a start_budget above the budget",
            )
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether the run starts with a calibration."""
        return self.kind == "plan" and self.plan is None and self.profile is None


def _reject_unused_settings(section: AttentionSection) -> None:
    """Raise if a setting is given that this kind of attention does not use."""
    fields = AttentionSection.model_fields
    made = {"profile", "budget", "policy", "selector", "block", "annealing"}
    used = {
        "dense": {"kind", "probe_interval", "probe_rows"},
        "native_sparse": {"kind"},
        "mask": {"kind", "mask", "probe_interval", "probe_rows"},
        "plan": set(fields) - {"mask"} - (made if section.plan else set()),
    }[section.kind]
    unused = [x for x in fields if x not in used and getattr(section, x) != fields[x].default]
    if unused:
        suffix = " together with attention.plan" if section.plan and section.kind == "plan" else ""
        raise ArgumentError(
            f"attention.kind={section.kind!r} does not use all given settings",
            got=", ".join(f"attention.{name}" for name in unused) + suffix,
            expected="only " + ", ".join(name for name in fields if name in used),
            fix="remove the setting, or change attention.kind",
        )
    if section.kind == "mask" and not section.mask:
        raise ArgumentError(
            "attention.kind='mask' needs a mask",
            expected="attention.mask, such as window(255, 0) | sinks(4)",
        )


def require_native(section: AttentionSection, decoder: DecoderConfig, context_shards: int) -> None:
    """Raise unless attention and model agree on native sparse attention.

    Args:
        section: the settings.
        decoder: the model.
        context_shards: size of the context axis of the mesh.
    """
    is_native = section.kind == "native_sparse"
    if is_native != (decoder.native_sparse is not None):
        state = "is missing" if is_native else "is set"
        raise ArgumentError(
            "native sparse attention must be set for both attention and model, or neither",
            got=f"attention.kind={section.kind!r}, model.decoder.native_sparse {state}",
            expected="attention.kind='native_sparse' and its sizes in model.decoder.native_sparse",
            fix="set model.decoder.native_sparse = {} for the sizes of the paper",
        )
    if is_native and context_shards > 1:
        raise ArgumentError(
            "native sparse attention does not support context parallelism",
            got=f"mesh.context={context_shards}",
            expected="mesh.context=1",
            fix="shard the batch (mesh.data, mesh.fsdp) and the heads (mesh.tensor)",
        )
