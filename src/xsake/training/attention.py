"""Attention used during training: dense, masked, sparse by a plan, native sparse, or indexed.

Block selection is not differentiated: gradients flow through the selected blocks only. The scope of
selection is one row of blocks (`BudgetScope.ROW`). In a wider scope later rows would compete with
earlier ones, so the visible tokens of a query would depend on later tokens. Queries of one block
share their selection.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from xsake import hads, masks
from xsake.attention import BlockSparseAttention
from xsake.distributed import HeadPlacement, place_heads
from xsake.errors import ArgumentError
from xsake.hads.policies import Sensitivity
from xsake.hads.selectors import from_spec
from xsake.hads.topk import BudgetScope
from xsake.model import (
    AttentionFn,
    Decoder,
    DecoderConfig,
    DenseAttention,
    LayerCall,
    MaskedAttention,
)
from xsake.model.observer import Observer
from xsake.training.sections import AttentionSection
from xsake.training.state import KvOrder


@dataclasses.dataclass(frozen=True, eq=False)
class StopGradientPlanAttention:
    """Plan attention with block selection excluded from differentiation."""

    planned: hads.PlanAttention  # the plan, its scope and its operator

    def __call__(self, q, k, v, call: LayerCall):
        layout = self.planned.layout(*jax.lax.stop_gradient((q, k)), call)
        return call.apply(self.planned.operator, q, k, v, layout)


@dataclasses.dataclass(frozen=True)
class DenseWarmup:
    """Dense attention in layers with a block indexer, which learns from all keys."""

    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        return dataclasses.replace(call, native=None).apply(self.operator, q, k, v)


class PlanRecipe(NamedTuple):
    """Policy, selector, block size and budgets of plans."""

    policy: hads.Policy
    selector: hads.Selector
    block: int
    budgets: tuple[float | None, ...]  # by level; None for a policy that chooses its own

    @classmethod
    def from_section(cls, section: AttentionSection) -> "PlanRecipe":
        """Build the recipe from the settings, or from the plan they name."""
        if section.plan is None:
            assert section.budget is not None, "checked by the section"
            last, annealing = section.budget, section.annealing
            budgets = (last,) if annealing is None else annealing.budgets(last)
            policy = hads.make_policy(section.policy)
            return cls(policy, hads.make_selector(section.selector), section.block, budgets)
        plan = hads.SparsityPlan.load(section.plan)
        policy = hads.POLICIES[plan.policy.name](**plan.policy.settings)
        is_scored = plan.selector.name in hads.SELECTORS
        selector = from_spec(plan.selector) if is_scored else hads.make_selector(section.selector)
        has_own_budget = plan.policy.name in ("entropy", "top_p")
        return cls(policy, selector, plan.block, (None if has_own_budget else plan.budget,))

    def plans(self, profile: hads.Profile) -> "tuple[hads.SparsityPlan | None, ...]":
        """Make a plan for each budget; None for dense attention."""
        if profile.block != self.block:
            raise ArgumentError(
                "profile-block", "the profile has another block size",
                got=f"{profile.block} tokens",
                expected=f"{self.block} tokens",
                fix="set attention.block to that of the profile, or recalibrate",
            )  # fmt: skip
        make = lambda budget: hads.make_plan(profile, self.policy, budget, self.selector)
        return tuple(None if budget == 1.0 else make(budget) for budget in self.budgets)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingAttention:
    """Attention of a run by step."""

    section: AttentionSection  # the settings
    attends: tuple[AttentionFn, ...]  # attention functions by level; one compiled step for each
    plans: tuple[
        hads.SparsityPlan | None, ...
    ]  # by level; None: dense, masked, native sparse or indexed
    profile: hads.Profile | None = None  # source of the plans, if known
    operator: BlockSparseAttention = BlockSparseAttention()  # implementation and mesh
    kv_order: KvOrder | None = None  # order of the profile's heads in the plans; None: unchanged

    def level(self, step: int) -> int:
        """Return the annealing level of a step, or whether the warm-up of an indexer is over."""
        annealing, indexer = self.section.annealing, self.section.indexer
        if indexer is not None and indexer.dense_steps:
            return int(step >= indexer.dense_steps)
        return 0 if annealing is None else annealing.level(step)

    def attend(self, step: int) -> AttentionFn:
        """Return the attention function of a step."""
        return self.attends[self.level(step)]

    def budget(self, step: int) -> float | None:
        """Return computed / visible blocks of a step; None for those of masks and of the model."""
        plan = self.plans[self.level(step)]
        if plan is not None:
            return plan.budget
        return 1.0 if self.section.kind in ("dense", "plan") else None

    def probe_target(self, step: int) -> AttentionFn:
        """Return the attention that a probe measures: of the step, or the next plan if dense."""
        level = self.level(step)
        planned_levels = [i for i in range(level, len(self.plans)) if self.plans[i] is not None]
        return self.attends[planned_levels[0] if planned_levels else level]

    def is_probe_due(self, step: int) -> bool:
        """Return whether to probe before this step; the model's own selection is not probed."""
        is_own = self.section.kind in ("native_sparse", "indexed")
        interval = 0 if is_own else self.section.probe_interval
        return bool(interval) and step % interval == 0

    def is_calibration_due(self, step: int) -> bool:
        """Return whether to recalibrate before this step."""
        interval = self.section.recalibration_interval
        return bool(interval) and step > 0 and step % interval == 0

    def replan(self, profile: hads.Profile, decoder: DecoderConfig) -> "TrainingAttention":
        """Return the attention with plans from a new profile; steps must be recompiled.

        The profile must have the current order of heads.
        """
        return make_attention(self.section, decoder, profile=profile, operator=self.operator)

    def record(self, step: int) -> dict[str, Any]:
        """Return the checkpoint's record of the attention, for `restore_attention`."""
        plan = self.plans[self.level(step)]
        record: dict[str, Any] = {
            "kind": self.section.kind,
            "budget": self.budget(step),
            "plan": None if plan is None else plan_digest(plan),
            "profile": None if self.profile is None else self.profile.digest,
        }
        if self.kv_order is not None:
            record["kv_order"] = [list(layer) for layer in self.kv_order]
        return record

    def save(self, folder: Path) -> None:
        """Save the profile under its digest, for `restore_attention`."""
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
    kv_order: KvOrder | None = None,
) -> TrainingAttention:
    """Build the attention of a run, with plans from `profile` or from the one in the settings."""
    if section.kind != "plan":
        attends: tuple[AttentionFn, ...] = (DenseAttention(operator),)
        if section.mask is not None:
            attends = (MaskedAttention(masks.parse(section.mask), operator),)
        elif section.indexer is not None and section.indexer.dense_steps:
            attends = (DenseWarmup(operator), *attends)
        return TrainingAttention(section, attends, (None,) * len(attends), None, operator)
    if profile is None and section.profile is not None:
        profile = hads.Profile.load(section.profile)
    if profile is not None:
        plans = PlanRecipe.from_section(section).plans(profile)
    elif section.plan is not None:
        plans = (hads.SparsityPlan.load(section.plan),)
    else:
        raise ArgumentError(
            "plan-without-profile", "a plan needs a profile",
            got="neither attention.plan nor attention.profile, and no calibration",
            expected="a profile", fix="calibrate the initial weights with `calibrate_model`",
        )  # fmt: skip
    if kv_order is not None:
        plans = tuple(None if plan is None else plan.reorder_heads(kv_order) for plan in plans)
    return TrainingAttention(
        section,
        tuple(_make_attend(plan, section.scope, decoder, operator) for plan in plans),
        plans,
        profile,
        operator,
        kv_order,
    )


def choose_placement(attention: TrainingAttention, *, shards: int) -> HeadPlacement | None:
    """Choose the order of heads with equal work per tensor shard; None if none is better."""
    plan = attention.plans[-1]
    if plan is None or shards == 1 or not attention.section.balance_heads:
        return None
    placement = place_heads(plan.blocks, kv_heads=plan.model.kv_heads, shards=shards)
    return placement if placement.excess_after < placement.excess_before else None


def to_kv_order(placement: HeadPlacement) -> KvOrder:
    """Return the order of a placement in the form of plans and checkpoints."""
    return tuple(tuple(layer) for layer in placement.kv_order.tolist())


def _make_attend(
    plan: hads.SparsityPlan | None, scope: BudgetScope, decoder: DecoderConfig, operator
):
    if plan is None:
        return DenseAttention(operator)
    sizes = {"kv_heads": decoder.kv_heads, "head_dim": decoder.head_dim}
    plan.validate_for(decoder.layers, decoder.q_heads, **sizes)
    return StopGradientPlanAttention(hads.PlanAttention(plan, scope=scope, operator=operator))


def calibrate_model(
    section: AttentionSection,
    model: Decoder,
    windows: Int[Array | np.ndarray, "B T"],
    *,
    name: str,
    digest: str,
    attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
) -> hads.Profile:
    """Measure the dense attention of a model on some sequences; `digest` identifies its weights."""
    recipe, config = PlanRecipe.from_section(section), model.config
    identity = hads.CalibratedModel(
        name=name, digest=digest, layers=config.layers, q_heads=config.q_heads,
        kv_heads=config.kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    rows = np.unique(np.asarray(windows, np.int32), axis=0)
    readings = [hads.CalibrationDocument(f"window#{i}", row) for i, row in enumerate(rows)]
    settings = hads.CalibrationSettings(
        block=recipe.block, selectors=(recipe.selector,),
        effect_documents=len(readings) if isinstance(recipe.policy, Sensitivity) else 0,
    )  # fmt: skip
    return hads.calibrate(Observer(model, attend=attend), identity, readings, settings)


def restore_attention(
    section: AttentionSection,
    decoder: DecoderConfig,
    record: dict[str, Any],
    folder: Path,
    *,
    step: int,
    operator: BlockSparseAttention = BlockSparseAttention(),  # noqa: B008 (frozen)
    profile: hads.Profile | None = None,
) -> TrainingAttention:
    """Rebuild the attention of a checkpoint; raise if it differs from the record."""
    profile_digest, order = record.get("profile"), record.get("kv_order")
    if profile is None and profile_digest is not None:
        profile = hads.Profile.load(_profile_path(folder, profile_digest))
    order = None if order is None else tuple(map(tuple, order))
    attention = make_attention(section, decoder, profile=profile, operator=operator, kv_order=order)
    if attention.record(step) != record:
        raise ArgumentError(
            "changed-attention", "the attention differs from that of the checkpoint",
            got=json.dumps(attention.record(step)), expected=json.dumps(record),
            fix="use the plan and the settings of the interrupted run, or start a new run",
        )  # fmt: skip
    return attention


def quarantine_profile(folder: Path, digest: str) -> None:
    """Rename a profile that cannot be read, so that `save` writes it again."""
    path = _profile_path(folder, digest)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.damaged"))


def _profile_path(folder: Path, digest: Any) -> Path:
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ArgumentError("profile-digest", "invalid digest of a profile", got=repr(digest)[:80])
    return folder / f"profile-{digest[:16]}.json"


def plan_digest(plan: hads.SparsityPlan) -> str:
    """Return a SHA-256 of a plan without the environment it was made in."""
    content = plan.model_dump(mode="json", exclude={"calibration": {"environment"}})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
