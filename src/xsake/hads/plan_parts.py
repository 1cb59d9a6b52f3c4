"""The parts of a plan: its heads, its selector and its origin, and what a policy makes of them."""

import itertools
from typing import Annotated, Literal

import numpy as np
from pydantic import FailFast, Field

from xsake._schema import Count, Fraction, Frozen, Number, Positive, Text
from xsake.errors import ArgumentError
from xsake.hads.budget import MOST_BLOCKS, AlwaysOn, visible_blocks
from xsake.hads.fields import Machine
from xsake.hads.policy import Original, Policy, Static
from xsake.hads.profile import MOST_WEIGHTS, CalibratedModel, Profile

Numbers = Annotated[tuple[Number, ...], Field(max_length=MOST_WEIGHTS), FailFast()]
Indices = Annotated[tuple[Count, ...], Field(max_length=MOST_BLOCKS), FailFast()]
Settings = dict[Text, Annotated[int, Field(strict=True)] | Number | Text]


class HeadPlan(Frozen):
    """What one head computes."""

    kind: Literal["dynamic", "static", "dense"] = Field(
        description="blocks chosen by the selector, by diagonals and columns, or all; a dense head"
        " that another length leaves fewer blocks is dynamic there"
    )
    blocks: Positive = Field(description="at the calibrated length, always-on ones counted")
    share: Fraction = Field(description="the same / visible blocks, 6 digits")
    offsets: Indices = Field(default=(), description="static: diagonals besides always-on ones")
    columns: Indices = Field(default=(), description="static: kv blocks seen by all later rows")
    weights: Numbers = Field(default=(), description="of the selector")


Layer = Annotated[tuple[HeadPlan, ...], FailFast()]


KvHead = Annotated[tuple[Count, ...], FailFast()]
Components = Annotated[tuple[Annotated[tuple[KvHead, ...], FailFast()], ...], FailFast()]


class Calibration(Frozen):
    """Where the numbers come from."""

    profile: Text = Field(description="digest of the profile")
    documents: Count
    tokens: Count = Field(description="that were read, of all documents")
    context: Positive
    seed: Annotated[int, Field(strict=True)]
    environment: Machine


class PolicyChoice(Frozen):
    """Which policy made the plan, and with what settings."""

    name: Text
    settings: Settings


class Selector(Frozen):
    """What scores blocks at run time."""

    name: Text
    settings: Settings = Field(default_factory=dict)
    cost: Fraction = Field(description="of scoring all heads / dense causal attention, in flops")


def selector_of(policy: Policy, selector: Selector | None) -> Selector:
    """The selector of a plan: the one that was passed, or the policy's own; never both."""
    own = None
    if isinstance(policy, Static):
        own = Selector(name="none", cost=0.0)
    elif isinstance(policy, Original):
        own = Selector(name="random", settings=settings_of(policy), cost=0.0)
    if own is None and selector is not None:
        return selector
    if own is not None and selector is None:
        return own
    raise ArgumentError(
        f"the policy {policy.name!r} " + ("needs a selector" if own is None else "needs none"),
        got=f"selector={selector!r}",
        fix="pass the selector that will choose the blocks, and none for static and original",
    )


def settings_of(policy: Policy) -> dict[str, int | float | str]:
    """The fields of a policy that are set."""
    return {name: value for name, value in vars(policy).items() if value is not None}


def head_plans(
    profile: Profile, policy: Policy, budget: float | None, selector: Selector
) -> tuple[tuple[HeadPlan, ...], ...]:
    """What a policy gives each head, by layer."""
    units = policy.units(profile, budget) if isinstance(policy, Static) else None
    totals = policy.plan_shares(profile, budget) if units is None else units.totals
    weights = profile.selector_weights.get(selector.name, np.zeros((*totals.shape, 0)))
    chosen = "static" if units is not None else "dynamic"
    plans = [
        HeadPlan(
            kind="dense" if units is None and total == visible_blocks(profile.n) else chosen,
            blocks=total,
            share=share_of(total, profile.n),
            offsets=units.offsets[head] if units else (),
            columns=units.columns[head] if units else (),
            weights=tuple(weights.reshape(totals.size, -1)[head].tolist()),
        )
        for head, total in enumerate(totals.ravel().tolist())
    ]
    return tuple(itertools.batched(plans, profile.model.q_heads))


def require_heads(heads: tuple[tuple[HeadPlan, ...], ...], n: int, always: AlwaysOn) -> None:
    """Raise unless every head can compute what it says, of `n` query blocks."""
    visible, least = visible_blocks(n), always.total(n)
    for head in itertools.chain.from_iterable(heads):
        if not least <= head.blocks <= visible or head.share != share_of(head.blocks, n):
            raise ValueError(f"{head.blocks} blocks of {visible}, share {head.share}")
        if (head.kind == "dense") != (head.kind != "static" and head.blocks == visible):
            raise ValueError(f"a head of {head.blocks} blocks is not {head.kind}")
        if len(head.weights) != len(heads[0][0].weights):
            raise ValueError("heads with more weights than others")
        for listed in (head.offsets, head.columns):
            if listed and (head.kind != "static" or listed[-1] >= n):
                raise ValueError("diagonals or columns of a head that has none such")
            if any(a >= b for a, b in itertools.pairwise(listed)):
                raise ValueError("diagonals or columns that do not ascend")


def require_components(
    components: tuple[tuple[tuple[int, ...], ...], ...], model: CalibratedModel
) -> None:
    """Raise unless every kv head of the model lists each component once, or nobody lists any."""
    sizes = (len(components), *({len(layer) for layer in components}))
    if components and sizes != (model.layers, model.kv_heads):
        raise ValueError("components of other layers or kv heads than its model has")
    for head in itertools.chain.from_iterable(components):
        if len(head) != model.head_dim or sorted(head) != list(range(len(head))):
            raise ValueError("components that are not each there once")


def share_of(blocks: int, n: int) -> float:
    """Blocks of a head / what it sees, as a plan says it."""
    return round(blocks / visible_blocks(n), 6)


def effective_budget(
    heads: tuple[tuple[HeadPlan, ...], ...], share: float, selector: Selector
) -> float:
    """A share of computed blocks and what choosing them costs, as a plan says it."""
    scored = [head.kind == "dynamic" for layer in heads for head in layer]
    return round(share + selector.cost * sum(scored) / len(scored), 6)
