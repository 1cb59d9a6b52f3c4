"""Sparsity plan: per-head block budgets and the selector, saved as JSON."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import FailFast, Field, model_validator

from xsake import _json
from xsake._schema import PRINTABLE, Count, Fraction, Frozen, Number, Positive, Text, validate
from xsake.errors import ArgumentError
from xsake.hads.allocation import take_units
from xsake.hads.budget import (
    MAX_BLOCKS,
    ForcedBlocks,
    apportion,
    closest_total,
    head_row_counts,
    visible_blocks,
)
from xsake.hads.policies import POLICIES, EntropyRandom, Policy, Sensitivity, Static, with_curve
from xsake.hads.profile import MAX_WEIGHTS, CalibratedModel, EnvironmentField, ForcedField, Profile
from xsake.hads.selectors import SELECTORS, Selector
from xsake.hads.topk import BudgetScope
from xsake.layout.grid import count_blocks

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


BAR_WIDTH = 40
MAX_HEADS = 10
_SKIPPED = ("heads", "summary")


def format_plan(document: dict[str, Any], shares: Float[np.ndarray, "L Hq"]) -> str:
    """Format a plan: summary, share of blocks by layer, densest and sparsest heads."""
    lines = [
        document["summary"],
        f"budget {document['budget']:.2%}, with selection {document['effective_budget']:.2%}",
        "",
        "layer  mean  share of visible blocks, sparsest and densest head",
    ]
    for layer, row in enumerate(shares):
        length = round(float(row.mean()) * BAR_WIDTH)
        bar = "#" * length + "." * (BAR_WIDTH - length)
        lines.append(f"{layer:5}  {row.mean():4.0%}  {bar}  {row.min():4.0%} {row.max():4.0%}")
    order = np.argsort(shares, axis=None, kind="stable").tolist()
    for name, heads in (("densest", order[::-1][:MAX_HEADS]), ("sparsest", order[:MAX_HEADS])):
        labels = (f"{_head(head, shares.shape[1])} {shares.flat[head]:.0%}" for head in heads)
        lines += ["", f"{name} heads:  " + ", ".join(labels)]
    return "\n".join(lines)


def diff_plans(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Format the differences of two plans, by field and by head."""
    old, new = dict(_fields(before)), dict(_fields(after))
    lines = [
        f"{name}: {old.get(name, 'nothing')} -> {new.get(name, 'nothing')}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    lines += _heads(before["heads"], after["heads"])
    return "\n".join(lines) or "no difference"


def _fields(value: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        if isinstance(part, dict):
            yield from _fields(part, f"{name}{key}.")
        elif key not in _SKIPPED:
            yield f"{name}{key}", part


def _heads(before: list[list[dict]], after: list[list[dict]]) -> list[str]:
    old, new = (
        {(i, j): head for i, row in enumerate(plan) for j, head in enumerate(row)}
        for plan in (before, after)
    )
    if old.keys() != new.keys():
        return [f"heads: {len(old)} -> {len(new)}, not compared"]
    changed = [head for head in old if old[head] != new[head]]
    if not changed:
        return []
    gain = lambda head: new[head]["blocks"] - old[head]["blocks"]
    changed.sort(key=lambda head: -abs(gain(head)))
    lines = [f"heads: {len(changed)} of {len(old)} differ, largest change of blocks first"]
    for layer, head in changed[:MAX_HEADS]:
        lines.append(f"  L{layer}H{head}: " + _change(old[layer, head], new[layer, head]))
    if len(changed) > MAX_HEADS:
        lines.append(f"  and {len(changed) - MAX_HEADS} more")
    return lines


def _change(old: dict[str, Any], new: dict[str, Any]) -> str:
    parts = []
    if old["blocks"] != new["blocks"]:
        blocks = old["blocks"], new["blocks"]
        parts.append(f"{blocks[0]} -> {blocks[1]} blocks ({blocks[1] - blocks[0]:+})")
    if old["kind"] != new["kind"]:
        parts.append(f"{old['kind']} -> {new['kind']}")
    others = [name for name in ("offsets", "columns", "weights") if old[name] != new[name]]
    return ", ".join(parts + ["other " + " and ".join(others)] * bool(others))


def _head(flat: int, heads: int) -> str:
    layer, head = divmod(flat, heads)
    return f"L{layer}H{head}"


MAX_BYTES, MAX_CONTAINERS = 2**22, 2**17
MAX_ROWS = 2**26  # rows of all heads that `row_counts` returns
WHAT = "a sparsity plan"


class SparsityPlan(Frozen, populate_by_name=True, serialize_by_alias=True):
    """Per-head block budgets as shares of the visible blocks, valid at any length."""

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
        is_implied, selector = selector is None, resolve_selector(policy, selector)
        policy = with_curve(policy, selector.name)
        heads = head_plans(profile, policy, budget, selector)
        visible = profile.model.heads * visible_blocks(profile.n)
        share = sum(head.blocks for layer in heads for head in layer) / visible
        effective = effective_budget(heads, share, selector)
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
            policy=PolicySpec(name=policy.name, settings=policy_settings(policy)),
            block=profile.block,
            forced=policy.forced if isinstance(policy, EntropyRandom) else profile.forced,
            budget=share if budget is None else budget,
            selector=selector,
            scope=BudgetScope.ROW if isinstance(policy, Sensitivity) else BudgetScope.LAYER,
            effective_budget=effective,
            components=() if is_implied else profile.components.tolist(),
            heads=heads,
        )

    @model_validator(mode="after")
    def _validate(self) -> "SparsityPlan":
        lengths = {len(layer) for layer in self.heads}
        if len(self.heads) != self.model.layers or lengths != {self.model.q_heads}:
            raise ValueError("number of layers or heads does not match the model")
        if self.n > MAX_BLOCKS or not self.forced.blocks_per_row:
            raise ValueError(f"{self.n} blocks exceed {MAX_BLOCKS}, or no block is forced")
        require_heads(self.heads, self.n, self.forced)
        require_components(self.components, self.model)
        heads, total = self.model.heads, int(self.blocks.sum())
        if total != closest_total(self.budget, heads=heads, n=self.n, forced=self.forced):
            raise ValueError(f"{total} blocks do not match the budget {self.budget}")
        share = total / (heads * visible_blocks(self.n))
        if self.effective_budget != effective_budget(self.heads, share, self.selector):
            raise ValueError("effective_budget does not match blocks and selector cost")
        return self

    def reorder_heads(self, kv_order: Sequence[Sequence[int]]) -> "SparsityPlan":
        """Return the plan for the model with permuted kv heads.

        Args:
            kv_order: by layer, the kv head at each new position; its query heads move with it.
        """
        if [sorted(order) for order in kv_order] != [
            list(range(self.model.kv_heads)) for _ in range(self.model.layers)
        ]:
            raise ArgumentError(
                "not a permutation of the model's kv heads",
                got=f"{len(kv_order)} layers, {kv_order[0] if kv_order else 'none'} ...",
                expected=f"{self.model.layers} layers, each of 0..{self.model.kv_heads - 1} once",
            )
        group = self.model.q_heads // self.model.kv_heads
        pairs = zip(self.heads, kv_order, strict=True)
        heads = tuple(
            tuple(layer[kv * group + i] for kv in order for i in range(group))
            for layer, order in pairs
        )
        pairs = zip(self.components, kv_order, strict=True) if self.components else ()
        components = tuple(tuple(layer[kv] for kv in order) for layer, order in pairs)
        return self.model_copy(update={"heads": heads, "components": components})

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
        """Return the blocks of each head at any length, proportional to the calibrated ones.

        Their sum is exactly the budget, or the forced blocks if a short sequence has more.

        Args:
            n: query blocks of the sequence.
        """
        _require_length(n, MAX_BLOCKS)
        if n == self.n:
            return self.blocks
        weights = self.blocks.ravel() / visible_blocks(self.n)
        total = closest_total(self.budget, heads=weights.size, n=n, forced=self.forced)
        minimum = np.full(weights.size, self.forced.total(n))
        maximum = np.full(weights.size, visible_blocks(n))
        return apportion(weights, total, minimum, maximum).reshape(self.blocks.shape)

    def row_counts(self, n: int) -> Int[np.ndarray, "L Hq Nq"]:
        """Return the blocks of each row at any length; see `budget.row_counts`.

        Static heads spend the same totals on diagonals and columns: see `static_grid`.
        """
        _require_length(n, MAX_ROWS // self.model.heads)
        return head_row_counts(self.totals(n), n, self.forced)

    def static_grid(self, layer: int, head: int, n: int) -> Bool[np.ndarray, "Nq Nk"]:
        """Return the blocks of a static head at any length."""
        plan = self.heads[layer][head]
        if plan.kind != "static":
            raise ArgumentError("this head has no static blocks", got=plan.kind)
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
        """Raise unless the plan belongs to a model of these sizes.

        Args:
            layers: of the model.
            q_heads: query heads of a layer.
            kv_heads: kv heads of a layer; None: not compared.
            head_dim: None: not compared.
            digest: of the model files; None: not compared.
        """
        sizes = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads}
        sizes |= {"head_dim": head_dim, "digest": digest}
        expected = self.model.model_dump()
        if any(value not in (None, expected[name]) for name, value in sizes.items()):
            raise ArgumentError(
                "the plan belongs to another model",
                got=", ".join(f"{name}={value!r}" for name, value in sizes.items() if value),
                expected=repr(self.model),
                fix="calibrate this model and build a plan from its profile",
            )

    def __hash__(self) -> int:
        return hash((self.calibration.profile, self.policy.name, self.budget, self.block))

    def __str__(self) -> str:
        return format_plan(self.model_dump(mode="json"), self.blocks / visible_blocks(self.n))

    def diff(self, other: "SparsityPlan") -> str:
        """Return a readable summary of the differences to another plan."""
        return diff_plans(self.model_dump(mode="json"), other.model_dump(mode="json"))

    def to_json(self) -> str:
        """Return the JSON text of the file, one head per line."""
        document = self.model_dump(mode="json")
        document["heads"] = [
            [{name: value for name, value in head.items() if value != []} for head in layer]
            for layer in document["heads"]
        ]
        return _json.dumps(document, {"heads": 2, "components": 1, "calibration": 1})

    @classmethod
    def from_json(cls, data: bytes) -> "SparsityPlan":
        """Parse and validate a plan file."""
        document = _json.loads(
            data,
            what=WHAT,
            max_bytes=MAX_BYTES,
            max_containers=MAX_CONTAINERS,
            max_values=MAX_BYTES,
        )
        return validate(cls, document, what=WHAT)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        _json.write(path, self.to_json(), max_bytes=MAX_BYTES)

    @classmethod
    def load(cls, path: Path) -> "SparsityPlan":
        """Read a file of at most 4 MB."""
        return cls.from_json(_json.read(path, max_bytes=MAX_BYTES))


def _require_length(n: int, maximum: int) -> None:
    if not 1 <= n <= min(maximum, MAX_BLOCKS):
        raise ArgumentError(
            "sequence length out of range",
            got=f"{n} query blocks",
            expected=f"1 to {min(maximum, MAX_BLOCKS)} query blocks",
        )


def make_policy(name: str, **settings: float) -> Policy:
    """Build a policy by name."""
    return _make("policy", POLICIES, name, settings)


def make_selector(name: str, **settings: int) -> Selector:
    """Build a selector by name."""
    return _make("selector", SELECTORS, name, settings)


def _make(what: str, registry: dict, name: str, settings: dict):
    if name not in registry:
        raise ArgumentError(f"unknown {what}", got=name, expected=", ".join(registry))
    try:
        return registry[name](**settings)
    except TypeError as error:
        fields = [field.name for field in dataclasses.fields(registry[name]) if field.init]
        raise ArgumentError(
            f"unknown settings of the {what} {name!r}",
            got=", ".join(settings) or "none",
            expected=", ".join(fields) or "none",
        ) from error


def make_plan(
    profile: Profile, policy: Policy, budget: float | None, selector: Selector
) -> SparsityPlan:
    """Build the plan of a policy; `static` and `original` do not use the selector."""
    is_implied = isinstance(policy, Static | EntropyRandom)
    spec = None if is_implied else selector_spec(selector, profile)
    return SparsityPlan.of(profile, policy, budget, selector=spec)


def selector_spec(selector: Selector, profile: Profile) -> SelectorSpec:
    """Return the spec of a selector, with its cost at the calibrated length."""
    fields = [field.name for field in dataclasses.fields(selector) if field.init]  # pyrefly: ignore
    return SelectorSpec(
        name=selector.name,
        settings={name: getattr(selector, name) for name in fields},
        cost=round(selector.cost(profile.context, profile.block, profile.model.head_dim), 9),
    )
