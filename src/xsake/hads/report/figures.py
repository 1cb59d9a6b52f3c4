"""Data of a report, from its files."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from xsake.hads.budget import visible_blocks
from xsake.hads.drift import loss_at, require_profile
from xsake.hads.plan import SparsityPlan
from xsake.hads.profile import Profile
from xsake.hads.report.bounds import BoundFigures
from xsake.hads.report.ladder import RuleComparison

ORACLE = "oracle"


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Inputs of a report."""

    plan: SparsityPlan
    profile: Profile | None = None
    comparisons: tuple[RuleComparison, ...] = ()
    bounds: BoundFigures | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            require_profile(self.plan, self.profile)

    @property
    def shares(self) -> Float[np.ndarray, "L Hq"]:
        """Computed / visible blocks of each head."""
        return self.plan.blocks / visible_blocks(self.plan.n)

    def curves(self, name: str | None = None) -> Float[np.ndarray, "L Hq levels"] | None:
        """Return the mean of -log(kept mass) at every level, by the plan's selector or another.

        None without a profile and for selectors that were not calibrated (static and random plans).
        """
        curves = {} if self.profile is None else self.profile.curves
        return curves.get(self.plan.selector.name if name is None else name)

    def losses(self, name: str | None = None) -> Float[np.ndarray, "L Hq"] | None:
        """Return KL(sparse || dense) of each head at the plan's budget, or None."""
        curves = self.curves(name)
        return None if curves is None else loss_at(curves, self.plan.blocks, self.plan.forced)

    def effects(self) -> Float[np.ndarray, "L Hq"] | None:
        """Return the KL of the model's predictions caused by each head alone, or None."""
        by_selector = {} if self.profile is None else self.profile.effects
        effects = by_selector.get(self.plan.selector.name)
        return None if effects is None else loss_at(effects, self.plan.blocks, self.plan.forced)

    def head_metrics(self) -> dict[str, Float[np.ndarray, "L Hq"]]:
        """Return the available metrics of each head, by name."""
        metrics = {"share": self.shares}
        if self.profile is not None:
            names = ("entropy", "outside", "need90")
            metrics |= {name: getattr(self.profile, name) for name in names}
        losses = {"kl": self.losses(), "kl_oracle": self.losses(ORACLE), "effect": self.effects()}
        return metrics | {name: array for name, array in losses.items() if array is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return all data of the page as JSON values."""
        plan, metrics = self.plan, self.head_metrics()
        heads = [
            [
                {"kind": head.kind, "blocks": head.blocks}
                | {name: _digits(array[i, j]) for name, array in metrics.items()}
                for j, head in enumerate(layer)
            ]
            for i, layer in enumerate(plan.heads)
        ]
        parts = {"model", "calibration", "policy", "selector", "budget", "effective_budget"}
        return {
            "summary": plan.summary,
            **plan.model_dump(mode="json", include=parts | {"block", "forced"}),
            "means": {name: _digits(array.mean()) for name, array in metrics.items()},
            "heads": heads,
            "comparisons": [one.to_dict() for one in self.comparisons],
            "bounds": None if self.bounds is None else dataclasses.asdict(self.bounds),
        }


def _digits(number: float) -> float:
    return float(f"{number:.6g}")
