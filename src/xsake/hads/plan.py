"""Sparsity plan: per-head block budgets and the selector, saved as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from pydantic import FailFast, Field, model_validator

from xsake import _json
from xsake._schema import PRINTABLE, Fraction, Frozen, Number, Positive, validate
from xsake.errors import ArgumentError
from xsake.hads import plan_diff
from xsake.hads.allocate import take_units
from xsake.hads.budget import (
    MAX_BLOCKS,
    apportion,
    closest_total,
    head_row_counts,
    visible_blocks,
)
from xsake.hads.choose import BudgetScope
from xsake.hads.fields import ForcedField
from xsake.hads.plan_parts import (
    Calibration,
    Components,
    Layer,
    PolicySpec,
    SelectorSpec,
    effective_budget,
    head_plans,
    policy_settings,
    require_components,
    require_heads,
    resolve_selector,
)
from xsake.hads.policy import EntropyRandom, Policy, Sensitivity, with_curve
from xsake.hads.profile import CalibratedModel, Profile
from xsake.layout.grid import count_blocks

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
        return plan_diff.format_plan(
            self.model_dump(mode="json"), self.blocks / visible_blocks(self.n)
        )

    def diff(self, other: "SparsityPlan") -> str:
        """Return a readable summary of the differences to another plan."""
        return plan_diff.diff_plans(self.model_dump(mode="json"), other.model_dump(mode="json"))

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
