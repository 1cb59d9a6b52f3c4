"""Sparsity plan: per-head block budgets and the selector, saved as JSON."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import FailFast, Field, model_validator

from xsake import _json
from xsake._schema import PRINTABLE, Count, Fraction, Frozen, JsonDocument, Number, Positive, Text
from xsake.errors import ArgumentError
from xsake.hads.allocation import take_units
from xsake.hads.budget import (
    MAX_BLOCKS,
    ForcedBlocks,
    apportion,
    closest_total,
    row_counts,
    visible_blocks,
)
from xsake.hads.policies import Policy, Static, with_curve
from xsake.hads.profile import (
    MAX_WEIGHTS,
    CalibratedModel,
    EnvironmentField,
    ForcedField,
    Profile,
)
from xsake.hads.selectors.base import Selector, SelectorSpec, SpecSettings
from xsake.hads.topk import BudgetScope
from xsake.layout.grid import count_blocks

MAX_ROWS = 2**26  # rows of all heads that `row_counts` returns
MAX_LISTED_HEADS = 10
BAR_WIDTH = 40

Numbers = Annotated[tuple[Number, ...], Field(max_length=MAX_WEIGHTS), FailFast()]
Indices = Annotated[tuple[Count, ...], Field(max_length=MAX_BLOCKS), FailFast()]
KvHead = Annotated[tuple[Count, ...], FailFast()]
Components = Annotated[tuple[Annotated[tuple[KvHead, ...], FailFast()], ...], FailFast()]


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


class SparsityPlan(JsonDocument):
    """Per-head block budgets as shares of the visible blocks, valid at any length."""

    file_type: ClassVar[str] = "a sparsity plan"
    max_bytes: ClassVar[int] = 2**22
    max_containers: ClassVar[int] = 2**17

    schema_version: Literal[1] = 1
    summary: Annotated[str, Field(min_length=1, max_length=1000), PRINTABLE]
    model: CalibratedModel
    calibration: Calibration
    policy: PolicySpec
    block: Positive = Field(description="tokens of a query block and of a kv block")
    forced: ForcedField = Field(alias="always", description="blocks that every head computes")
    budget: Fraction = Field(description="computed / visible blocks: requested, or the result")
    selector: SelectorSpec
    scope: BudgetScope = Field(
        default=BudgetScope.LAYER,
        description="unit that shares a budget at run time",
    )
    effective_budget: Annotated[Number, Field(ge=0)] = Field(
        description="computed / visible blocks + selector cost of the dynamic heads"
    )
    components: Components = Field(
        description="by layer and kv head: components of queries and keys, by descending"
        " contribution to scores; empty without a selector"
    )
    heads: Annotated[tuple[Layer, ...], FailFast()] = Field(description="by layer and query head")

    @classmethod
    def of(
        cls,
        profile: Profile,
        policy: Policy,
        budget: float | None = None,
        *,
        selector: SelectorSpec | None = None,
    ) -> "SparsityPlan":
        """Allocate a budget with a policy.

        Args:
            profile: measurements of the model.
            policy: allocation rule; uses the curves of `selector` unless it names others.
            budget: computed / causally visible blocks, met exactly; None for policies without one.
            selector: None for `Static` and `EntropyRandom`.
        """
        implied = policy.implied_selector
        if (implied is None) == (selector is None):
            problem = "requires a selector" if implied is None else "takes no selector"
            raise ArgumentError(
                "policy-selector",
                f"the policy {policy.name!r} {problem}",
                got=f"selector={selector!r}",
                fix="pass a selector, except for the policies static and original",
            )
        if selector is None:
            selector = SelectorSpec(name=implied or "", settings=policy.settings, cost=0.0)
        policy = with_curve(policy, selector.name)
        heads = _head_plans(profile, policy, budget, selector)
        blocks = sum(head.blocks for layer in heads for head in layer)
        share = blocks / (profile.model.heads * visible_blocks(profile.n))
        effective = _effective_budget(heads, share, selector)
        tokens = len(profile.documents) * profile.context
        return cls(
            summary=f"{profile.model.name}: policy {policy.name} computes {share:.1%} of the"
            f" visible {profile.block}-token blocks ({effective:.1%} with selector"
            f" {selector.name}), by calibration on {tokens:,} tokens of {profile.model.heads}"
            " heads.",
            model=profile.model,
            calibration=Calibration(
                profile=profile.digest,
                documents=len(profile.documents),
                tokens=tokens,
                context=profile.context,
                seed=profile.seed,
                environment=profile.environment,
            ),
            policy=PolicySpec(name=policy.name, settings=policy.settings),
            block=profile.block,
            forced=getattr(policy, "forced", profile.forced),
            budget=share if budget is None else budget,
            selector=selector,
            scope=policy.scope,
            effective_budget=effective,
            components=() if implied else profile.components.tolist(),
            heads=heads,
        )

    @model_validator(mode="after")
    def _validate(self) -> "SparsityPlan":
        lengths = {len(layer) for layer in self.heads}
        if len(self.heads) != self.model.layers or lengths != {self.model.q_heads}:
            raise ValueError("number of layers or heads does not match the model")
        if self.n > MAX_BLOCKS or not self.forced.blocks_per_row:
            raise ValueError(f"{self.n} blocks exceed {MAX_BLOCKS}, or no block is forced")
        _require_heads(self.heads, self.n, self.forced)
        _require_components(self.components, self.model)
        heads, total = self.model.heads, int(self.blocks.sum())
        if total != closest_total(self.budget, heads=heads, n=self.n, forced=self.forced):
            raise ValueError(f"{total} blocks do not match the budget {self.budget}")
        share = total / (heads * visible_blocks(self.n))
        if self.effective_budget != _effective_budget(self.heads, share, self.selector):
            raise ValueError("effective_budget does not match blocks and selector cost")
        return self

    def reorder_heads(self, kv_order: Sequence[Sequence[int]]) -> "SparsityPlan":
        """Return the plan for the model with permuted kv heads.

        Args:
            kv_order: by layer, the kv head at each new position; its query heads move with it.
        """
        same = list(range(self.model.kv_heads))
        if [sorted(order) for order in kv_order] != [same] * self.model.layers:
            raise ArgumentError(
                "kv-order",
                "not a permutation of the model's kv heads",
                got=f"{len(kv_order)} layers, {kv_order[0] if kv_order else 'none'} ...",
                expected=f"{self.model.layers} layers, each of 0..{self.model.kv_heads - 1} once",
            )
        group = self.model.q_heads // self.model.kv_heads
        heads = tuple(
            tuple(layer[kv * group + i] for kv in order for i in range(group))
            for layer, order in zip(self.heads, kv_order, strict=True)
        )
        pairs = zip(self.components, kv_order, strict=True) if self.components else ()
        components = tuple(tuple(layer[kv] for kv in order) for layer, order in pairs)
        return self.model_copy(update={"heads": heads, "components": components})

    @property
    def eps(self) -> float | None:
        """Maximum dropped mass of a query by a plan of the policy `bounded`; None for others."""
        return float(self.policy.settings["eps"]) if self.policy.name == "bounded" else None

    @property
    def n(self) -> int:
        """Query blocks at the calibrated length."""
        return count_blocks(self.calibration.context, self.block)

    @property
    def blocks(self) -> Int[np.ndarray, "L Hq"]:
        """Blocks of each head at the calibrated length."""
        return np.array([[head.blocks for head in layer] for layer in self.heads], np.int64)

    @property
    def weights(self) -> Float[np.ndarray, "L Hq weights"]:
        """Correction weights of the selector for each head."""
        return np.array([[head.weights for head in layer] for layer in self.heads], np.float64)

    @property
    def components_array(self) -> Int[np.ndarray, "L Hk D"]:
        """Components of queries and keys by descending contribution to scores."""
        sizes = self.model.layers, self.model.kv_heads, -1
        return np.array(self.components, np.int32).reshape(sizes)

    def totals(self, n: int) -> Int[np.ndarray, "L Hq"]:
        """Return the blocks of each head for sequences of `n` query blocks.

        They are proportional to the calibrated ones. Their sum is exactly the budget, or the forced
        blocks if a short sequence has more.
        """
        _require_length(n, MAX_BLOCKS)
        if n == self.n:
            return self.blocks
        weights = self.blocks.ravel() / visible_blocks(self.n)
        total = closest_total(self.budget, heads=weights.size, n=n, forced=self.forced)
        shares = apportion(weights, total, self.forced.total(n), visible_blocks(n))
        return shares.reshape(self.blocks.shape)

    def row_counts(self, n: int) -> Int[np.ndarray, "L Hq Nq"]:
        """Return the blocks of each row at any length; see `budget.row_counts`.

        Static heads spend the same totals on diagonals and columns: see `static_grid`.
        """
        _require_length(n, MAX_ROWS // self.model.heads)
        return row_counts(self.totals(n), n, self.forced)

    def static_grid(self, layer: int, head: int, n: int) -> Bool[np.ndarray, "Nq Nk"]:
        """Return the blocks of a static head at any length."""
        plan = self.heads[layer][head]
        if plan.kind != "static":
            raise ArgumentError("no-static-blocks", "this head has no static blocks", got=plan.kind)
        total = int(self.totals(n)[layer, head])
        return take_units(plan.offsets, plan.columns, total, n, self.forced)

    def validate_for(
        self,
        layers: int,
        q_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        digest: str | None = None,
    ) -> None:
        """Raise unless the plan belongs to a model of these sizes; None is not compared.

        Args:
            layers: of the model.
            q_heads: query heads of a layer.
            kv_heads: kv heads of a layer.
            head_dim: of a head.
            digest: of the model files.
        """
        sizes = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads}
        sizes |= {"head_dim": head_dim, "digest": digest}
        expected = self.model.model_dump()
        if any(value not in (None, expected[name]) for name, value in sizes.items()):
            raise ArgumentError(
                "plan-model",
                "the plan belongs to another model",
                got=", ".join(f"{name}={value!r}" for name, value in sizes.items() if value),
                expected=repr(self.model),
                fix="calibrate this model and build a plan from its profile",
            )

    def __hash__(self) -> int:
        return hash((self.calibration.profile, self.policy.name, self.budget, self.block))

    def __str__(self) -> str:
        return _format_plan(self, self.blocks / visible_blocks(self.n))

    def diff(self, other: "SparsityPlan") -> str:
        """Return a readable summary of the differences to another plan."""
        return _diff_documents(self.model_dump(mode="json"), other.model_dump(mode="json"))

    def to_json(self) -> str:
        """Return the JSON text of the file, one head per line."""
        document = self.model_dump(mode="json")
        document["heads"] = [
            [{name: value for name, value in head.items() if value != []} for head in layer]
            for layer in document["heads"]
        ]
        return _json.dumps(document, {"heads": 2, "components": 1, "calibration": 1})


def make_plan(
    profile: Profile, policy: Policy, budget: float | None, selector: Selector
) -> SparsityPlan:
    """Build the plan of a policy; `static` and `original` do not use the selector."""
    if policy.implied_selector is not None:
        return SparsityPlan.of(profile, policy, budget)
    spec = selector.spec(profile.context, profile.block, profile.model.head_dim)
    return SparsityPlan.of(profile, policy, budget, selector=spec)


# Parts of a plan


def _head_plans(
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
            share=_block_share(total, profile.n),
            offsets=units.offsets[head] if units else (),
            columns=units.columns[head] if units else (),
            weights=tuple(weights.reshape(totals.size, -1)[head].tolist()),
        )
        for head, total in enumerate(totals.ravel().tolist())
    ]
    return tuple(itertools.batched(plans, profile.model.q_heads))


def _block_share(blocks: int, n: int) -> float:
    return round(blocks / visible_blocks(n), 6)


def _effective_budget(
    heads: tuple[tuple[HeadPlan, ...], ...], share: float, selector: SelectorSpec
) -> float:
    is_scored = [head.kind == "dynamic" for layer in heads for head in layer]
    return round(share + selector.cost * sum(is_scored) / len(is_scored), 6)


def _require_heads(heads: tuple[tuple[HeadPlan, ...], ...], n: int, forced: ForcedBlocks) -> None:
    """Raise unless the heads are consistent with `n` query blocks."""
    visible, minimum = visible_blocks(n), forced.total(n)
    for head in itertools.chain.from_iterable(heads):
        if not minimum <= head.blocks <= visible or head.share != _block_share(head.blocks, n):
            raise ValueError(f"{head.blocks} blocks of {visible}, share {head.share}")
        if (head.kind == "dense") != (head.kind != "static" and head.blocks == visible):
            raise ValueError(f"kind {head.kind} does not fit {head.blocks} blocks")
        if len(head.weights) != len(heads[0][0].weights):
            raise ValueError("heads have different numbers of weights")
        for listed in (head.offsets, head.columns):
            if listed and (head.kind != "static" or listed[-1] >= n):
                raise ValueError("diagonals or columns out of range, or of a head not static")
            if any(a >= b for a, b in itertools.pairwise(listed)):
                raise ValueError("diagonals or columns are not in ascending order")


def _require_components(
    components: tuple[tuple[tuple[int, ...], ...], ...], model: CalibratedModel
) -> None:
    """Raise unless `components` is empty or a permutation per kv head of the model."""
    sizes = (len(components), *({len(layer) for layer in components}))
    if components and sizes != (model.layers, model.kv_heads):
        raise ValueError("number of components does not match the model's layers and kv heads")
    for head in itertools.chain.from_iterable(components):
        if len(head) != model.head_dim or sorted(head) != list(range(len(head))):
            raise ValueError("components are not a permutation")


def _require_length(n: int, maximum: int) -> None:
    if not 1 <= n <= min(maximum, MAX_BLOCKS):
        expected = f"1 to {min(maximum, MAX_BLOCKS)} query blocks"
        raise ArgumentError(
            "plan-length",
            "sequence length out of range",
            got=f"{n} query blocks",
            expected=expected,
        )


# Plans as text


def _format_plan(plan: SparsityPlan, shares: Float[np.ndarray, "L Hq"]) -> str:
    """Format a plan: summary, share of blocks by layer, densest and sparsest heads."""
    lines = [
        plan.summary,
        f"budget {plan.budget:.2%}, with selection {plan.effective_budget:.2%}",
        "",
        "layer  mean  share of visible blocks, sparsest and densest head",
    ]
    for layer, row in enumerate(shares):
        length = round(float(row.mean()) * BAR_WIDTH)
        bar = "#" * length + "." * (BAR_WIDTH - length)
        lines.append(f"{layer:5}  {row.mean():4.0%}  {bar}  {row.min():4.0%} {row.max():4.0%}")
    order = np.argsort(shares, axis=None, kind="stable").tolist()
    for name, heads in (("densest", order[::-1]), ("sparsest", order)):
        places = (divmod(head, shares.shape[1]) for head in heads[:MAX_LISTED_HEADS])
        labels = (f"L{layer}H{head} {shares[layer, head]:.0%}" for layer, head in places)
        lines += ["", f"{name} heads:  " + ", ".join(labels)]
    return "\n".join(lines)


def _diff_documents(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Format the differences of two plans, by field and by head."""
    old, new = dict(_fields(before)), dict(_fields(after))
    lines = [
        f"{name}: {old.get(name, 'nothing')} -> {new.get(name, 'nothing')}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    return "\n".join([*lines, *_diff_heads(before["heads"], after["heads"])]) or "no difference"


def _fields(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        if isinstance(part, dict):
            yield from _fields(part, f"{prefix}{key}.")
        elif key not in ("heads", "summary"):
            yield f"{prefix}{key}", part


def _diff_heads(before: list[list[dict]], after: list[list[dict]]) -> Iterator[str]:
    old, new = (
        {f"L{i}H{j}": head for i, row in enumerate(plan) for j, head in enumerate(row)}
        for plan in (before, after)
    )
    if old.keys() != new.keys():
        yield f"heads: {len(old)} -> {len(new)}, not compared"
        return
    gain = lambda head: new[head]["blocks"] - old[head]["blocks"]
    changed = sorted((h for h in old if old[h] != new[h]), key=lambda head: -abs(gain(head)))
    if changed:
        yield f"heads: {len(changed)} of {len(old)} differ, largest change of blocks first"
    for head in changed[:MAX_LISTED_HEADS]:
        yield f"  {head}: " + ", ".join(_diff_head(old[head], new[head]))
    if len(changed) > MAX_LISTED_HEADS:
        yield f"  and {len(changed) - MAX_LISTED_HEADS} more"


def _diff_head(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    before, after = old["blocks"], new["blocks"]
    if before != after:
        yield f"{before} -> {after} blocks ({after - before:+})"
    if old["kind"] != new["kind"]:
        yield f"{old['kind']} -> {new['kind']}"
    if others := [name for name in ("offsets", "columns", "weights") if old[name] != new[name]]:
        yield "other " + " and ".join(others)
