"""How layers look at each other while a model is trained: dense, by a mask, or by HADS plans.

A plan is not differentiated: gradients flow through the blocks that were chosen, and the choice
itself is a constant. Blocks are chosen row by row (`Scope.ROW`), because a wider scope lets later
rows take blocks from earlier ones: what a token sees would depend on what comes after it, which a
model must not learn to read. Queries of one block still share their choice.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int
from pydantic import Field, model_validator

from xsake import hads, masks
from xsake.attention import BlockSparseAttention
from xsake.errors import ArgumentError
from xsake.hads.attend import selector_of
from xsake.hads.choose import Scope
from xsake.hads.fields import Count, Number, Positive, Strict
from xsake.model import Attend, Decoder, DecoderConfig, Dense, LayerCall, Masked
from xsake.model.observer import Observer

Budget = Annotated[Number, Field(gt=0, le=1)]


class Annealing(Strict):
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


class AttentionSection(Strict):
    """How layers look at each other while the model is trained."""

    kind: Literal["dense", "mask", "plan"] = "dense"
    mask: str | None = Field(default=None, description="such as window(255, 0) | sinks(4)")
    plan: Path | None = Field(default=None, description="file of a plan that was made before")
    profile: Path | None = Field(
        default=None, description="plans are made of it; None: of a calibration at the start"
    )
    budget: Budget | None = Field(default=None, description="computed / visible blocks")
    policy: Literal["kl", "mass", "uniform", "entropy_budget", "static"] = "kl"
    selector: Literal["sampled", "cumulant", "antidiagonal", "pooled"] = "sampled"
    block: Annotated[Positive, Field(le=2**16)] = Field(default=64, description="tokens")
    scope: Scope = Field(
        default=Scope.ROW,
        description="what shares a budget; row: no row's choice depends on later rows",
    )
    annealing: Annealing | None = None
    probe_every: Count = 0
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
        "dense": {"kind"},
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


@dataclasses.dataclass(frozen=True, eq=False)
class Selected:
    """Attention by a plan whose choice of blocks is a constant to gradients.

    Args:
        planned: the plan, its scope and what computes it.
    """

    planned: hads.Planned

    def __call__(self, q, k, v, call: LayerCall):
        layout = self.planned.layout(*jax.lax.stop_gradient((q, k)), call)
        return call.through(self.planned.operator, q, k, v, layout)


class Recipe(NamedTuple):
    """How plans are made of a profile."""

    policy: hads.Policy
    selector: hads.Selector
    block: int
    budgets: tuple[float | None, ...]  # of all levels; None for a policy that finds its own

    @classmethod
    def of(cls, section: AttentionSection) -> "Recipe":
        """As the section says it, or the plan that it names."""
        if section.plan is None:
            assert section.budget is not None, "the section is checked"
            last, annealing = section.budget, section.annealing
            budgets = (last,) if annealing is None else annealing.budgets(last)
            policy = hads.policy_named(section.policy)
            return cls(policy, hads.selector_named(section.selector), section.block, budgets)
        plan = hads.SparsityPlan.load(section.plan)
        policy = hads.POLICIES[plan.policy.name](**plan.policy.settings)
        is_scored = plan.selector.name in hads.SELECTORS
        selector = selector_of(plan) if is_scored else hads.selector_named(section.selector)
        finds_own = plan.policy.name in ("entropy", "top_p")
        return cls(policy, selector, plan.block, (None if finds_own else plan.budget,))

    def plans(self, profile: hads.Profile) -> "tuple[hads.SparsityPlan | None, ...]":
        """A plan for each budget; None where everything is computed."""
        if profile.block != self.block:
            raise ArgumentError(
                "the profile was measured in other blocks",
                got=f"{profile.block} tokens",
                expected=f"{self.block} tokens, as the settings say",
                fix="set attention.block to that of the profile, or calibrate again",
            )
        make = lambda budget: hads.make_plan(profile, self.policy, budget, self.selector)
        return tuple(None if budget == 1.0 else make(budget) for budget in self.budgets)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingAttention:
    """What layers look at, step by step.

    Args:
        section: the settings.
        attends: by level; the same object for the same program.
        plans: by level; None where there is none.
        profile: what the plans were made of, if it is known.
        operator: implementation, mesh.
    """

    section: AttentionSection
    attends: tuple[Attend, ...]
    plans: tuple[hads.SparsityPlan | None, ...]
    profile: hads.Profile | None = None
    operator: BlockSparseAttention = BlockSparseAttention()

    def level(self, step: int) -> int:
        """Which of the programs a step runs."""
        annealing = self.section.annealing
        return 0 if annealing is None else annealing.level(step)

    def attend(self, step: int) -> Attend:
        """What layers look at in a step."""
        return self.attends[self.level(step)]

    def budget(self, step: int) -> float | None:
        """Computed / visible blocks in a step; None for masks, which have none."""
        plan = self.plans[self.level(step)]
        if plan is not None:
            return plan.budget
        return None if self.section.kind == "mask" else 1.0

    def judged(self, step: int) -> Attend:
        """What a probe judges: what the step runs, or the first plan to come if that is dense."""
        level = self.level(step)
        coming = [i for i in range(level, len(self.plans)) if self.plans[i] is not None]
        return self.attends[coming[0] if coming else level]

    def is_probe_due(self, step: int) -> bool:
        """Whether a probe belongs before this step."""
        every = self.section.probe_every
        return bool(every) and step % every == 0

    def is_calibration_due(self, step: int) -> bool:
        """Whether new plans belong before this step."""
        every = self.section.recalibrate_every
        return bool(every) and step > 0 and step % every == 0

    def replanned(self, profile: hads.Profile, decoder: DecoderConfig) -> "TrainingAttention":
        """The same with plans made of another profile: the programs are compiled anew."""
        return make_attention(self.section, decoder, profile=profile, operator=self.operator)

    def record(self, step: int) -> dict[str, Any]:
        """What a checkpoint has to say about it, for `resumed`."""
        plan = self.plans[self.level(step)]
        return {
            "kind": self.section.kind,
            "budget": self.budget(step),
            "plan": None if plan is None else plan_digest(plan),
            "profile": None if self.profile is None else self.profile.digest,
        }

    def save(self, folder: Path) -> None:
        """Keep the profile in a folder under its digest, so that `resumed` finds it."""
        if self.profile is not None:
            path = _profile_path(folder, self.profile.digest)
            if not path.exists():
                self.profile.save(path)


def make_attention(
    section: AttentionSection,
    decoder: DecoderConfig,
    *,
    profile: hads.Profile | None = None,
    operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
) -> TrainingAttention:
    """The attention of a run.

    Args:
        section: the settings.
        decoder: the model that attends.
        profile: plans are made of it rather than of what the settings name.
        operator: implementation, mesh; its block sizes serve dense attention and masks.
    """
    if section.kind != "plan":
        kept = Dense(operator)
        if section.mask is not None:
            kept = Masked(masks.parse(section.mask), operator)
        return TrainingAttention(section, (kept,), (None,), None, operator)
    if profile is None and section.profile is not None:
        profile = hads.Profile.load(section.profile)
    if profile is not None:
        plans = Recipe.of(section).plans(profile)
    elif section.plan is not None:
        plans = (hads.SparsityPlan.load(section.plan),)
    else:
        raise ArgumentError(
            "there is nothing to make a plan of",
            got="neither attention.plan nor attention.profile, and no calibration",
            expected="a profile",
            fix="calibrate the first weights: see `calibrated`",
        )
    return TrainingAttention(
        section,
        tuple(_attend_of(plan, section.scope, decoder, operator) for plan in plans),
        plans,
        profile,
        operator,
    )


def _attend_of(plan: hads.SparsityPlan | None, scope: Scope, decoder: DecoderConfig, operator):
    if plan is None:
        return Dense(operator)
    sizes = {"kv_heads": decoder.kv_heads, "head_dim": decoder.head_dim}
    plan.validate_for(decoder.layers, decoder.q_heads, **sizes)
    return Selected(hads.Planned(plan, scope=scope, operator=operator))


def calibrated(
    section: AttentionSection,
    model: Decoder,
    windows: Int[Array | np.ndarray, "B T"],
    *,
    name: str,
    digest: str,
    attend: Attend = Dense(),  # noqa: B008 (frozen)
) -> hads.Profile:
    """What the heads of a model look at now, by all their attention, whatever they compute of it.

    Args:
        section: the settings.
        model: with the weights of now.
        windows: sequences to read; equal ones count once.
        name: of the run.
        digest: names the weights, such as the run's digest and the step.
        attend: what the model reads with: that of the step, so that its states are those of now.
    """
    recipe, config = Recipe.of(section), model.config
    identity = hads.CalibratedModel(
        name=name, digest=digest, layers=config.layers, q_heads=config.q_heads,
        kv_heads=config.kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    rows = np.unique(np.asarray(windows, np.int32), axis=0)
    readings = [hads.Reading(f"window#{i}", row) for i, row in enumerate(rows)]
    settings = hads.Settings(block=recipe.block, selectors=(recipe.selector,))
    return hads.calibrate(Observer(model, attend=attend), identity, readings, settings)


def resumed(
    section: AttentionSection,
    decoder: DecoderConfig,
    record: dict[str, Any],
    folder: Path,
    *,
    step: int,
    operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
    profile: hads.Profile | None = None,
) -> TrainingAttention:
    """The attention that a checkpoint was made with; raises if it cannot be had again.

    Args:
        section: the settings.
        decoder: the model that attends.
        record: what `TrainingAttention.record` said at that step.
        folder: where profiles were saved.
        step: of the checkpoint.
        operator: implementation, mesh.
        profile: instead of the one that was saved.
    """
    known = record.get("profile")
    if profile is None and known is not None:
        profile = hads.Profile.load(_profile_path(folder, known))
    found = make_attention(section, decoder, profile=profile, operator=operator)
    if found.record(step) != record:
        raise ArgumentError(
            "the attention is not the one that the checkpoint was made with",
            got=json.dumps(found.record(step)),
            expected=json.dumps(record),
            fix="use the plan and the settings of the interrupted run, or start a new one",
        )
    return found


def set_profile_aside(folder: Path, digest: str) -> None:
    """Rename the file of a profile that cannot be read, so that `save` writes it again."""
    path = _profile_path(folder, digest)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.damaged"))


def _profile_path(folder: Path, digest: Any) -> Path:
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ArgumentError("this is no digest of a profile", got=repr(digest)[:80])
    return folder / f"profile-{digest[:16]}.json"


def plan_digest(plan: hads.SparsityPlan) -> str:
    """Names what a plan decides, whatever machine made it and when."""
    content = plan.model_dump(mode="json", exclude={"calibration": {"environment"}})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
