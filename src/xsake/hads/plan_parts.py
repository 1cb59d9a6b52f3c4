"""Records inside a plan file (heads, selector, policy, calibration) and their validation."""

import itertools
from typing import Annotated, Literal

import numpy as np
from pydantic import FailFast, Field

from xsake._schema import Count, Fraction, Frozen, Number, Positive, Text
from xsake.errors import ArgumentError
from xsake.hads.budget import MAX_BLOCKS, ForcedBlocks, visible_blocks
from xsake.hads.fields import EnvironmentField
from xsake.hads.policy import EntropyRandom, Policy, Static
from xsake.hads.profile import MAX_WEIGHTS, CalibratedModel, Profile

Numbers = Annotated[tuple[Number, ...], Field(max_length=MAX_WEIGHTS), FailFast()]
Indices = Annotated[tuple[Count, ...], Field(max_length=MAX_BLOCKS), FailFast()]
SpecSettings = dict[Text, Annotated[int, Field(strict=True)] | Number | Text]


class HeadPlan(Frozen):
    """Blocks of one head."""

    kind: Literal["dynamic", "static", "dense"] = Field(
        description="blocks selected at run time, by diagonals and columns, or all; a dense head"
        " with fewer blocks at another length is dynamic there"
    )
    blocks: Positive = Field(description="at the calibrated length, forced blocks included")
    share: Fraction = Field(description="blocks / visible blocks, 6 digits")
    offsets: Indices = Field(default=(), description="static: diagonals that are not forced")
    columns: Indices = Field(default=(), description="static: kv blocks of all later rows")
    weights: Numbers = Field(default=(), description="correction weights of the selector")


Layer = Annotated[tuple[HeadPlan, ...], FailFast()]


KvHead = Annotated[tuple[Count, ...], FailFast()]
Components = Annotated[tuple[Annotated[tuple[KvHead, ...], FailFast()], ...], FailFast()]


class Calibration(Frozen):
    """Provenance of a plan: the profile and how it was measured."""

    profile: Text = Field(description="digest of the profile")
    documents: Count
    tokens: Count = Field(description="of all documents")
    context: Positive
    seed: Annotated[int, Field(strict=True)]
    environment: EnvironmentField


class PolicySpec(Frozen):
    """Name and settings of the policy that allocated the budget."""

    name: Text
    settings: SpecSettings


class SelectorSpec(Frozen):
    """Name, settings and cost of the selector that scores blocks at run time."""

    name: Text
    settings: SpecSettings = Field(default_factory=dict)
    cost: Fraction = Field(description="of scoring all heads / dense causal attention, in flops")


def resolve_selector(policy: Policy, selector: SelectorSpec | None) -> SelectorSpec:
    """Return the selector of a plan: the given one, or the one that the policy implies."""
    implied = None
    if isinstance(policy, Static):
        implied = SelectorSpec(name="none", cost=0.0)
    elif isinstance(policy, EntropyRandom):
        implied = SelectorSpec(name="random", settings=policy_settings(policy), cost=0.0)
    if implied is None and selector is not None:
        return selector
    if implied is not None and selector is None:
        return implied
    raise ArgumentError(
        f"the policy {policy.name!r} "
        + ("requires a selector" if implied is None else "takes no selector"),
        got=f"selector={selector!r}",
        fix="pass a selector, except for the policies static and original",
    )


def policy_settings(policy: Policy) -> dict[str, int | float | str]:
    """Return the fields of a policy that are not None."""
    return {name: value for name, value in vars(policy).items() if value is not None}


def head_plans(
    profile: Profile, policy: Policy, budget: float | None, selector: SelectorSpec
) -> tuple[tuple[HeadPlan, ...], ...]:
    """Allocate blocks to heads with a policy; returns heads by layer."""
    units = policy.units(profile, budget) if isinstance(policy, Static) else None
    totals = policy.plan_shares(profile, budget) if units is None else units.totals
    weights = profile.selector_weights.get(selector.name, np.zeros((*totals.shape, 0)))
    kind = "static" if units is not None else "dynamic"
    plans = [
        HeadPlan(
            kind="dense" if units is None and total == visible_blocks(profile.n) else kind,
            blocks=total,
            share=block_share(total, profile.n),
            offsets=units.offsets[head] if units else (),
            columns=units.columns[head] if units else (),
            weights=tuple(weights.reshape(totals.size, -1)[head].tolist()),
        )
        for head, total in enumerate(totals.ravel().tolist())
    ]
    return tuple(itertools.batched(plans, profile.model.q_heads))


def require_heads(heads: tuple[tuple[HeadPlan, ...], ...], n: int, forced: ForcedBlocks) -> None:
    """Raise unless the heads are consistent with `n` query blocks."""
    visible, minimum = visible_blocks(n), forced.total(n)
    for head in itertools.chain.from_iterable(heads):
        if not minimum <= head.blocks <= visible or head.share != block_share(head.blocks, n):
            raise ValueError(f"{head.blocks} blocks of {visible}, share {head.share}")
        if (head.kind == "dense") != (head.kind != "static" and head.blocks == visible):
            raise ValueError(f"kind {head.kind} does not fit {head.blocks} blocks")
        if len(head.weights) != len(heads[0][0].weights):
            raise ValueError("heads have different numbers of weights")
        for listed in (head.offsets, head.columns):
            if listed and (head.kind != "static" or listed[-1] >= n):
                raise ValueError(
                    "diagonals or columns out of range, or of a head that is not static"
                )
            if any(a >= b for a, b in itertools.pairwise(listed)):
                raise ValueError("diagonals or columns are not in ascending order")


def require_components(
    components: tuple[tuple[tuple[int, ...], ...], ...], model: CalibratedModel
) -> None:
    """Raise unless `components` is empty or a permutation per kv head of the model."""
    sizes = (len(components), *({len(layer) for layer in components}))
    if components and sizes != (model.layers, model.kv_heads):
        raise ValueError("number of components does not match the model's layers and kv heads")
    for head in itertools.chain.from_iterable(components):
        if len(head) != model.head_dim or sorted(head) != list(range(len(head))):
            raise ValueError("components are not a permutation")


def block_share(blocks: int, n: int) -> float:
    """Return blocks / visible blocks of a head, rounded as in files."""
    return round(blocks / visible_blocks(n), 6)


def effective_budget(
    heads: tuple[tuple[HeadPlan, ...], ...], share: float, selector: SelectorSpec
) -> float:
    """Return computed share + selector cost of the dynamic heads, rounded as in files."""
    is_scored = [head.kind == "dynamic" for layer in heads for head in layer]
    return round(share + selector.cost * sum(is_scored) / len(is_scored), 6)
