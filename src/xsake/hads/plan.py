"""The plan: how many blocks each head computes, and which; a small file that people share."""

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
    MOST_BLOCKS,
    closest_total,
    row_counts_of_heads,
    shared_out,
    visible_blocks,
)
from xsake.hads.choose import Scope
from xsake.hads.fields import Always
from xsake.hads.plan_parts import (
    Calibration,
    Components,
    Layer,
    PolicyChoice,
    Selector,
    effective_budget,
    head_plans,
    require_components,
    require_heads,
    selector_of,
    settings_of,
)
from xsake.hads.policy import Effect, Original, Policy, with_curve
from xsake.hads.profile import CalibratedModel, Profile
from xsake.layout.grid import blocks_of

MOST_BYTES, MOST_PARTS = 2**22, 2**17
MOST_ROWS = 2**26  # of all heads, in one answer
WHAT = "a sparsity plan"


class SparsityPlan(Frozen):
    """How many blocks each head computes, by shares that serve any length."""

    schema_version: Literal[1] = 1
    summary: Annotated[str, Field(min_length=1, max_length=1000), PRINTABLE]
    model: CalibratedModel
    calibration: Calibration
    policy: PolicyChoice
    block: Positive = Field(description="tokens of a query block and of a kv block")
    always: Always = Field(description="blocks that every head computes")
    budget: Fraction = Field(description="computed / visible blocks, as asked, or as it came out")
    selector: Selector
    scope: Scope = Field(
        default=Scope.LAYER, description="what shares a budget at run time: row, head or layer"
    )
    effective_budget: Annotated[Number, Field(ge=0)] = Field(
        description="computed / visible blocks + cost of the selector for the heads that need it"
    )
    components: Components = Field(
        description="by layer and kv head: those of queries and keys that move scores most first;"
        " empty where nothing is scored"
    )
    heads: Annotated[tuple[Layer, ...], FailFast()] = Field(description="by layer and query head")

    @classmethod
    def of(
        cls,
        profile: Profile,
        policy: Policy,
        budget: float | None = None,
        *,
        selector: Selector | None = None,
    ) -> "SparsityPlan":
        """The plan that a policy makes of a profile.

        Args:
            profile: what calibration measured.
            policy: how the budget is spent, by the curves of `selector` if it names no others.
            budget: computed / causally visible blocks, met exactly; None for policies that find
                their own.
            selector: what will choose the blocks; `Static` needs none, and `Original` draws them.
        """
        is_free, selector = selector is None, selector_of(policy, selector)
        policy = with_curve(policy, selector.name)
        heads = head_plans(profile, policy, budget, selector)
        visible = profile.model.heads * visible_blocks(profile.n)
        share = sum(head.blocks for layer in heads for head in layer) / visible
        effective = effective_budget(heads, share, selector)
        read = len(profile.documents) * profile.context
        return cls(
            summary=f"{profile.model.name}: policy {policy.name} computes {share:.1%} of the"
            f" visible {profile.block}-token blocks ({effective:.1%} with selector"
            f" {selector.name}), by calibration on {read:,} tokens of {profile.model.heads} heads.",
            model=profile.model,
            calibration=Calibration(
                profile=profile.digest,
                documents=len(profile.documents),
                tokens=read,
                context=profile.context,
                seed=profile.seed,
                environment=profile.environment,
            ),
            policy=PolicyChoice(name=policy.name, settings=settings_of(policy)),
            block=profile.block,
            always=policy.always if isinstance(policy, Original) else profile.always,
            budget=share if budget is None else budget,
            selector=selector,
            scope=Scope.ROW if isinstance(policy, Effect) else Scope.LAYER,
            effective_budget=effective,
            components=() if is_free else profile.components.tolist(),
            heads=heads,
        )

    @model_validator(mode="after")
    def _consistent(self) -> "SparsityPlan":
        lengths = {len(layer) for layer in self.heads}
        if len(self.heads) != self.model.layers or lengths != {self.model.q_heads}:
            raise ValueError("other layers or heads than its model has")
        if self.n > MOST_BLOCKS or not self.always.level:
            raise ValueError(f"{self.n} blocks are more than {MOST_BLOCKS}, or none is always on")
        require_heads(self.heads, self.n, self.always)
        require_components(self.components, self.model)
        heads, total = self.model.heads, int(self.blocks.sum())
        if total != closest_total(self.budget, heads=heads, n=self.n, always=self.always):
            raise ValueError(f"{total} blocks are not what the budget {self.budget} buys")
        share = total / (heads * visible_blocks(self.n))
        if self.effective_budget != effective_budget(self.heads, share, self.selector):
            raise ValueError("effective_budget is not what blocks and selector cost")
        return self

    def reordered(self, kv_order: Sequence[Sequence[int]]) -> "SparsityPlan":
        """The plan of the same model with its heads in another order.

        Args:
            kv_order: by layer, the kv head that comes to each place, with its query heads.
        """
        if [sorted(order) for order in kv_order] != [
            list(range(self.model.kv_heads)) for _ in range(self.model.layers)
        ]:
            raise ArgumentError(
                "this is no order of the model's kv heads",
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
        return blocks_of(self.calibration.context, self.block)

    @property
    def blocks(self) -> Int[np.ndarray, "L Hq"]:
        """Blocks of each head at the calibrated length."""
        return np.array([[head.blocks for head in layer] for layer in self.heads], np.int64)

    @property
    def weights(self) -> Float[np.ndarray, "L Hq weights"]:
        """The selector's weights of each head."""
        return np.array([[head.weights for head in layer] for layer in self.heads], np.float64)

    @property
    def components_array(self) -> Int[np.ndarray, "L Hk D"]:
        """Components of queries and keys, those that move scores most first."""
        sizes = self.model.layers, self.model.kv_heads, -1
        return np.array(self.components, np.int32).reshape(sizes)

    def totals(self, n: int) -> Int[np.ndarray, "L Hq"]:
        """Blocks of each head at any length, in proportion to what they are at the calibrated one.

        They add up to what the budget buys, exactly, or to the always-on blocks where a short
        sequence has more of those.

        Args:
            n: query blocks of the sequence.
        """
        _require_length(n, MOST_BLOCKS)
        if n == self.n:
            return self.blocks
        weights = self.blocks.ravel() / visible_blocks(self.n)
        total = closest_total(self.budget, heads=weights.size, n=n, always=self.always)
        least = np.full(weights.size, self.always.total(n))
        most = np.full(weights.size, visible_blocks(n))
        return shared_out(weights, total, least, most).reshape(self.blocks.shape)

    def row_counts(self, n: int) -> Int[np.ndarray, "L Hq Nq"]:
        """Blocks of each row at any length, as `budget.row_counts` spreads the totals.

        Static heads spend the same totals along their diagonals and columns: see `static_grid`.
        """
        _require_length(n, MOST_ROWS // self.model.heads)
        return row_counts_of_heads(self.totals(n), n, self.always)

    def static_grid(self, layer: int, head: int, n: int) -> Bool[np.ndarray, "Nq Nk"]:
        """The blocks of a static head at any length, exactly its total."""
        plan = self.heads[layer][head]
        if plan.kind != "static":
            raise ArgumentError("the blocks of this head are chosen per input", got=plan.kind)
        total = int(self.totals(n)[layer, head])
        return take_units(plan.offsets, plan.columns, total, n, self.always)

    def validate_for(
        self,
        layers: int,
        q_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        digest: str | None = None,
    ) -> None:
        """Raise unless the plan was made for such a model.

        Args:
            layers: of the model.
            q_heads: query heads of a layer.
            kv_heads: kv heads of a layer; None: not compared.
            head_dim: likewise.
            digest: of its files, likewise.
        """
        asked = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads}
        asked |= {"head_dim": head_dim, "digest": digest}
        own = self.model.model_dump()
        if any(value not in (None, own[name]) for name, value in asked.items()):
            raise ArgumentError(
                "the plan was made for another model",
                got=", ".join(f"{name}={value!r}" for name, value in asked.items() if value),
                expected=repr(self.model),
                fix="calibrate this model and make a plan of that profile",
            )

    def __hash__(self) -> int:
        return hash((self.calibration.profile, self.policy.name, self.budget, self.block))

    def __str__(self) -> str:
        return plan_diff.told(self.model_dump(mode="json"), self.blocks / visible_blocks(self.n))

    def diff(self, other: "SparsityPlan") -> str:
        """What is different in another plan, for people."""
        return plan_diff.difference(self.model_dump(mode="json"), other.model_dump(mode="json"))

    def to_json(self) -> str:
        """The text of its file, one head per line."""
        document = self.model_dump(mode="json")
        document["heads"] = [
            [{name: value for name, value in head.items() if value != []} for head in layer]
            for layer in document["heads"]
        ]
        return _json.dumps(document, {"heads": 2, "components": 1, "calibration": 1})

    @classmethod
    def from_json(cls, data: bytes) -> "SparsityPlan":
        """A plan from the bytes of its file, checked."""
        document = _json.loads(
            data, what=WHAT, max_bytes=MOST_BYTES, max_containers=MOST_PARTS, max_values=MOST_BYTES
        )
        return validate(cls, document, what=WHAT)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        _json.write(path, self.to_json(), max_bytes=MOST_BYTES)

    @classmethod
    def load(cls, path: Path) -> "SparsityPlan":
        """Read the file, at most 4 MB."""
        return cls.from_json(_json.read(path, max_bytes=MOST_BYTES))


def _require_length(n: int, most: int) -> None:
    if not 1 <= n <= min(most, MOST_BLOCKS):
        raise ArgumentError(
            "no plan serves such a length",
            got=f"{n} query blocks",
            expected=f"1 to {min(most, MOST_BLOCKS)} query blocks",
        )
