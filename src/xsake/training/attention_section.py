"""How layers look at each other while a model is trained, as a configuration says it."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from xsake import masks
from xsake._schema import Count, Frozen, LocalPath, Number, Positive
from xsake.errors import ArgumentError
from xsake.hads.choose import Scope
from xsake.model.config import DecoderConfig

Budget = Annotated[Number, Field(gt=0, le=1)]


class Annealing(Frozen):
    """From many blocks to the budget, in few levels, since each is a program of its own."""

    start_step: Count = 0
    steps: Positive = Field(description="after which the budget is reached")
    start_budget: Budget = Field(default=1.0, description="1: dense attention")
    levels: Annotated[Positive, Field(ge=2, le=16)] = Field(
        default=4, description="budgets, the first and the last included"
    )

    def budgets(self, last: float) -> tuple[float, ...]:
        """The budgets of all levels, evenly spaced.

        Example:
            >>> Annealing(steps=100, levels=3).budgets(0.25)
            (1.0, 0.625, 0.25)
        """
        return tuple(round(float(x), 6) for x in np.linspace(self.start_budget, last, self.levels))

    def level(self, step: int) -> int:
        """The level of a step; its budget is never below the straight line between the ends.

        Example:
            >>> annealing = Annealing(start_step=10, steps=100, levels=3)
            >>> [annealing.level(step) for step in (0, 59, 60, 109, 110, 999)]
            [0, 0, 1, 1, 2, 2]
        """
        passed = max(step - self.start_step, 0) * (self.levels - 1) // self.steps
        return min(passed, self.levels - 1)


class AttentionSection(Frozen):
    """How layers look at each other while the model is trained."""

    kind: Literal["dense", "mask", "plan", "native_sparse"] = "dense"
    mask: str | None = Field(default=None, description="such as window(255, 0) | sinks(4)")
    plan: LocalPath | None = Field(default=None, description="file of a plan that was made before")
    profile: LocalPath | None = Field(
        default=None, description="plans are made of it; None: of a calibration at the start"
    )
    budget: Budget | None = Field(default=None, description="computed / visible blocks")
    policy: Literal["effect", "kl", "mass", "uniform", "entropy_budget", "static"] = "kl"
    selector: Literal["sampled", "cumulant", "antidiagonal", "pooled"] = "sampled"
    block: Annotated[Positive, Field(le=2**16)] = Field(default=64, description="tokens")
    scope: Scope = Field(
        default=Scope.ROW,
        description="what shares a budget; row: no row's choice depends on later rows",
    )
    is_balanced: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="heads are placed so that tensor shards have equal work"
    )
    annealing: Annealing | None = None
    probe_every: Count = Field(
        default=100, description="measures what every head looks at and loses; changes nothing"
    )
    probe_rows: Positive = Field(default=4, description="query blocks that a probe looks at")
    recalibrate_every: Count = 0
    calibration_windows: Positive = Field(default=4, description="sequences that it reads")

    @model_validator(mode="after")
    def _consistent(self) -> "AttentionSection":
        _require_used(self)
        if self.kind == "mask":
            masks.parse(self.mask or "")
        if self.kind == "plan" and (self.plan is None) == (self.budget is None):
            raise ArgumentError(
                "attention by a plan needs a plan, or a budget to make one for",
                got=f"attention.plan={self.plan}, attention.budget={self.budget}",
                expected="one of the two; a plan has its own budget",
            )
        if self.annealing and self.budget and self.annealing.start_budget <= self.budget:
            raise ArgumentError(
                "annealing goes from more blocks to fewer",
                got=f"start_budget={self.annealing.start_budget}, budget={self.budget}",
                expected="a start_budget above the budget",
            )
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether the run has to begin with one."""
        return self.kind == "plan" and self.plan is None and self.profile is None


def _require_used(section: AttentionSection) -> None:
    """Raise if something is set that this kind of attention does not look at."""
    fields = AttentionSection.model_fields
    made = {"profile", "budget", "policy", "selector", "block", "annealing"}
    used = {
        "dense": {"kind", "probe_every", "probe_rows"},
        "native_sparse": {"kind"},
        "mask": {"kind", "mask", "probe_every", "probe_rows"},
        "plan": set(fields) - {"mask"} - (made if section.plan else set()),
    }[section.kind]
    idle = [x for x in fields if x not in used and getattr(section, x) != fields[x].default]
    if idle:
        beside = " beside attention.plan" if section.plan and section.kind == "plan" else ""
        raise ArgumentError(
            f"attention of the kind {section.kind!r} does not use a setting that is there",
            got=", ".join(f"attention.{name}" for name in idle) + beside,
            expected="only " + ", ".join(name for name in fields if name in used),
            fix="leave it out, or change attention.kind",
        )
    if section.kind == "mask" and not section.mask:
        raise ArgumentError(
            "attention of the kind 'mask' needs a mask",
            expected="attention.mask, such as window(255, 0) | sinks(4)",
        )


def require_native(section: AttentionSection, decoder: DecoderConfig, parts: int) -> None:
    """Raise unless the kind of attention is the one that the model was made for.

    Args:
        section: the settings.
        decoder: the model that is trained.
        parts: devices that share the tokens of a sequence.
    """
    is_native = section.kind == "native_sparse"
    if is_native != (decoder.native_sparse is not None):
        state = "is missing" if is_native else "is there"
        raise ArgumentError(
            "native sparse attention is a kind of attention and a kind of model, or neither",
            got=f"attention.kind={section.kind!r}, model.decoder.native_sparse {state}",
            expected="attention.kind='native_sparse' and its sizes in model.decoder.native_sparse",
            fix="model.decoder.native_sparse = {} takes the paper's sizes",
        )
    if is_native and parts > 1:
        raise ArgumentError(
            "native sparse attention keeps the tokens of a sequence together",
            got=f"mesh.context={parts}",
            expected="mesh.context=1",
            fix="spread the batch (mesh.data, mesh.fsdp) and the heads (mesh.tensor)",
        )
