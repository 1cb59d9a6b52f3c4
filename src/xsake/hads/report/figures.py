"""The figures behind a report, from its files alone; draws nothing."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from xsake.hads.budget import visible_blocks
from xsake.hads.drift import loss_at, require_profile
from xsake.hads.plan import SparsityPlan
from xsake.hads.profile import Profile
from xsake.hads.report.bounds import Bounds
from xsake.hads.report.ladder import Comparison

ORACLE = "oracle"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a report is made of.

    Args:
        plan: whose report it is.
        profile: the one that the plan was made of.
        comparisons: of rules, measured elsewhere.
        bounds: figures about proved bounds, likewise.
    """

    plan: SparsityPlan
    profile: Profile | None = None
    comparisons: tuple[Comparison, ...] = ()
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            require_profile(self.plan, self.profile)

    @property
    def shares(self) -> Float[np.ndarray, "L Hq"]:
        """Of the visible blocks that each head computes."""
        return self.plan.blocks / visible_blocks(self.plan.n)

    def curves(self, name: str | None = None) -> Float[np.ndarray, "L Hq levels"] | None:
        """Mean of -log(kept mass) at every level, by the plan's selector or another.

        None without a profile, and where no such selector was calibrated: what a static plan or
        a random one keeps was not measured.
        """
        curves = {} if self.profile is None else self.profile.curves
        return curves.get(self.plan.selector.name if name is None else name)

    def losses(self, name: str | None = None) -> Float[np.ndarray, "L Hq"] | None:
        """KL(sparse || dense) of each head where the plan puts it, likewise."""
        curves = self.curves(name)
        return None if curves is None else loss_at(curves, self.plan.blocks, self.plan.always)

    def effects(self) -> Float[np.ndarray, "L Hq"] | None:
        """KL of the model's predictions that each head causes alone, if that was measured."""
        known = {} if self.profile is None else self.profile.effects
        effects = known.get(self.plan.selector.name)
        return None if effects is None else loss_at(effects, self.plan.blocks, self.plan.always)

    def measured(self) -> dict[str, Float[np.ndarray, "L Hq"]]:
        """Numbers of each head that the files have, by name."""
        found = {"share": self.shares}
        if self.profile is not None:
            names = ("entropy", "outside", "need90")
            found |= {name: getattr(self.profile, name) for name in names}
        losses = {"kl": self.losses(), "kl_oracle": self.losses(ORACLE), "effect": self.effects()}
        return found | {name: array for name, array in losses.items() if array is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything the page shows, as JSON has it."""
        plan, measured = self.plan, self.measured()
        heads = [
            [
                {"kind": head.kind, "blocks": head.blocks}
                | {name: _digits(array[i, j]) for name, array in measured.items()}
                for j, head in enumerate(layer)
            ]
            for i, layer in enumerate(plan.heads)
        ]
        parts = {"model", "calibration", "policy", "selector", "budget", "effective_budget"}
        return {
            "summary": plan.summary,
            **plan.model_dump(mode="json", include=parts | {"block", "always"}),
            "means": {name: _digits(array.mean()) for name, array in measured.items()},
            "heads": heads,
            "comparisons": [one.to_dict() for one in self.comparisons],
            "bounds": None if self.bounds is None else dataclasses.asdict(self.bounds),
        }


def _digits(number: float) -> float:
    return float(f"{number:.6g}")
