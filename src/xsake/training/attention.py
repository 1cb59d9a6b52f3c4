"""How layers look at each other while a model is trained: all, by a mask, by plans, or natively.

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
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from xsake import hads, masks
from xsake.attention import BlockSparseAttention
from xsake.errors import ArgumentError
from xsake.hads.attend import selector_of
from xsake.hads.choose import Scope
from xsake.hads.policy import Effect
from xsake.model import Attend, Decoder, DecoderConfig, Dense, LayerCall, Masked
from xsake.model.observer import Observer
from xsake.training.attention_section import AttentionSection

KvOrder = tuple[tuple[int, ...], ...]
"""The kv head that stands at each place, by layer, as JSON keeps it."""


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
        kv_order: in which the plans have the heads of the profile; None: as they were measured.
    """

    section: AttentionSection
    attends: tuple[Attend, ...]
    plans: tuple[hads.SparsityPlan | None, ...]
    profile: hads.Profile | None = None
    operator: BlockSparseAttention = BlockSparseAttention()
    kv_order: KvOrder | None = None

    def level(self, step: int) -> int:
        """Which of the programs a step runs."""
        annealing = self.section.annealing
        return 0 if annealing is None else annealing.level(step)

    def attend(self, step: int) -> Attend:
        """What layers look at in a step."""
        return self.attends[self.level(step)]

    def budget(self, step: int) -> float | None:
        """Computed / visible blocks in a step; None for masks and native sparse attention."""
        plan = self.plans[self.level(step)]
        if plan is not None:
            return plan.budget
        return 1.0 if self.section.kind in ("dense", "plan") else None

    def judged(self, step: int) -> Attend:
        """What a probe judges: what the step runs, or the first plan to come if that is dense."""
        level = self.level(step)
        coming = [i for i in range(level, len(self.plans)) if self.plans[i] is not None]
        return self.attends[coming[0] if coming else level]

    def is_probe_due(self, step: int) -> bool:
        """Whether a probe belongs before this step; none looks into native sparse attention."""
        every = 0 if self.section.kind == "native_sparse" else self.section.probe_every
        return bool(every) and step % every == 0

    def is_calibration_due(self, step: int) -> bool:
        """Whether new plans belong before this step."""
        every = self.section.recalibrate_every
        return bool(every) and step > 0 and step % every == 0

    def replanned(self, profile: hads.Profile, decoder: DecoderConfig) -> "TrainingAttention":
        """The same with plans made of another profile: the programs are compiled anew.

        It is one of the weights of now, whose heads are in the order that they have now.
        """
        return make_attention(self.section, decoder, profile=profile, operator=self.operator)

    def record(self, step: int) -> dict[str, Any]:
        """What a checkpoint has to say about it, for `resumed`."""
        plan = self.plans[self.level(step)]
        said: dict[str, Any] = {
            "kind": self.section.kind,
            "budget": self.budget(step),
            "plan": None if plan is None else plan_digest(plan),
            "profile": None if self.profile is None else self.profile.digest,
        }
        if self.kv_order is not None:
            said["kv_order"] = [list(layer) for layer in self.kv_order]
        return said

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
    kv_order: KvOrder | None = None,
) -> TrainingAttention:
    """The attention of a run.

    Args:
        section: the settings.
        decoder: the model that attends.
        profile: plans are made of it rather than of what the settings name.
        operator: implementation, mesh; its block sizes serve dense attention and masks.
        kv_order: in which the plans have the heads of the profile; None: as they were measured.
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
    if kv_order is not None:
        plans = tuple(None if plan is None else plan.reordered(kv_order) for plan in plans)
    return TrainingAttention(
        section,
        tuple(_attend_of(plan, section.scope, decoder, operator) for plan in plans),
        plans,
        profile,
        operator,
        kv_order,
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
    settings = hads.Settings(
        block=recipe.block, selectors=(recipe.selector,),
        effect_documents=len(readings) if isinstance(recipe.policy, Effect) else 0,
    )  # fmt: skip
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
    known, order = record.get("profile"), record.get("kv_order")
    if profile is None and known is not None:
        profile = hads.Profile.load(_profile_path(folder, known))
    order = None if order is None else tuple(map(tuple, order))
    found = make_attention(section, decoder, profile=profile, operator=operator, kv_order=order)
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
