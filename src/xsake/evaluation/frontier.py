"""Loss against cost: plans and windows of equal cost."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from xsake._progress import ProgressFn
from xsake.errors import ArgumentError
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Texts
from xsake.evaluation.record import DenseComparison, EvaluationReport, ResultCache
from xsake.evaluation.run import EvalModel, EvaluationSettings, evaluate
from xsake.hads import Policy, Profile, Selector, make_plan
from xsake.masks import Sinks, Window


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """Evaluation of one attention; costs are shares of dense attention, selection included."""

    name: str  # plan or window
    asked: float  # maximum cost
    effective: float  # actual cost
    report: EvaluationReport

    @property
    def comparison(self) -> DenseComparison:
        """Comparison with dense attention."""
        comparison = self.report.contexts[0].comparison
        assert comparison is not None, "every point has a candidate"
        return comparison

    @property
    def kl(self) -> float:
        """KL of next-token distributions from dense attention, nats."""
        return self.comparison.kl.value

    def row(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        report = json.loads(self.report.model_dump_json())
        effective = round(self.effective, 6)
        return {"name": self.name, "asked": self.asked, "effective": effective, "report": report}


@dataclasses.dataclass(frozen=True)
class Planner:
    """Factory of plans by cost."""

    profile: Profile
    policy: Policy
    selector: Selector

    def candidate(self, effective: float) -> tuple[Candidate, float]:
        """Return a plan whose blocks and selector have the given cost, and the actual cost."""
        cost = make_plan(self.profile, self.policy, effective, self.selector).selector.cost
        if effective <= cost:
            got, expected = f"{effective:.1%}", f"above {cost:.1%}"
            raise ArgumentError(
                "cost-below-selector",
                "the cost is below the selector's",
                got=got,
                expected=expected,
            )
        plan = make_plan(self.profile, self.policy, effective - cost, self.selector)
        return Candidate.of_plan(plan), plan.budget + cost


def widest_window(effective: float, tokens: int, block: int) -> tuple[Candidate, float]:
    """Return a sink block with the widest window of at most the given cost, and its cost.

    Example:
        >>> candidate, cost = widest_window(0.3, 4096, 64)
        >>> candidate.description, round(cost, 3)
        ('Window(left=512, right=0) | Sinks(count=64) in blocks of 64', 0.286)
    """
    widest = None
    for width in range(block, tokens + block, block):
        candidate = Candidate.of_mask(Window(width, 0) | Sinks(block), block)
        cost = candidate.budget(tokens)
        assert cost is not None, "masks have a known budget"
        if cost > effective:
            break
        widest = candidate, cost
    if widest is None:
        raise ArgumentError(
            "cost-below-window",
            "the cost is below that of the smallest window",
            got=f"{effective:.1%} at {tokens} tokens in blocks of {block}",
            fix="use a larger share, a longer context or smaller blocks",
        )
    return widest


def frontier(
    eval_model: EvalModel,
    texts: Texts,
    settings: EvaluationSettings,
    planner: Planner,
    shares: Sequence[float],
    *,
    cache: ResultCache | None = None,
    on_progress: ProgressFn = lambda _: None,
) -> list[FrontierPoint]:
    """Evaluate a plan and a window at every cost, on the same texts with one context."""
    if len(settings.contexts) != 1:
        raise ArgumentError(
            "frontier-contexts", "a frontier requires one context", got=settings.contexts
        )
    cache, points = ResultCache() if cache is None else cache, []
    for asked in shares:
        window = widest_window(asked, settings.contexts[0], planner.profile.block)
        sides = {"plan": planner.candidate(asked), "window": window}
        for name, (candidate, effective) in sides.items():
            report = evaluate(
                eval_model, texts, settings, candidate=candidate, cache=cache,
                on_progress=on_progress,
            )  # fmt: skip
            points.append(FrontierPoint(name, asked, effective, report))
    return points
