"""What a model loses at several costs: plans, and windows that cost as much."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xsake.errors import ArgumentError
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Texts
from xsake.evaluation.journal import Journal
from xsake.evaluation.record import Report
from xsake.evaluation.run import Settings, Subject, Watch, evaluate
from xsake.hads import Policy, Profile, Selector, make_plan
from xsake.masks import Sinks, Window


@dataclasses.dataclass(frozen=True)
class Point:
    """One attention at one cost.

    Args:
        name: plan or window.
        asked: what it may cost, as a share of dense attention, choosing included.
        effective: what it does cost.
        report: the evaluation.
    """

    name: str
    asked: float
    effective: float
    report: Report

    @property
    def kl(self) -> float:
        """Nats that the distribution of the next token moves away from dense attention's."""
        compared = self.report.contexts[0].comparison
        assert compared is not None, "every point has a candidate"
        return compared.kl.value

    def row(self) -> dict[str, Any]:
        """As one line of JSON, with everything that the evaluation depends on."""
        return {
            "name": self.name,
            "asked": self.asked,
            "effective": round(self.effective, 6),
            "report": json.loads(self.report.model_dump_json()),
        }


@dataclasses.dataclass(frozen=True)
class Planner:
    """How plans are made for a cost.

    Args:
        profile: of the model.
        policy: how blocks are spent.
        selector: what chooses them.
    """

    profile: Profile
    policy: Policy
    selector: Selector

    def candidate(self, effective: float) -> tuple[Candidate, float]:
        """A plan whose blocks and selector cost so much together, and what they cost."""
        cost = make_plan(self.profile, self.policy, effective, self.selector).selector.cost
        if effective <= cost:
            raise ArgumentError(
                "choosing blocks alone costs more than that",
                got=f"{effective:.1%}",
                expected=f"above {cost:.1%}",
            )
        plan = make_plan(self.profile, self.policy, effective - cost, self.selector)
        return Candidate.of_plan(plan), plan.budget + cost


def widest_window(effective: float, tokens: int, block: int) -> tuple[Candidate, float]:
    """The first block and a window, as wide as the cost allows, and what they cost.

    Args:
        effective: share of the visible blocks.
        tokens: at this length.
        block: tokens of a block; windows are multiples of it.

    Example:
        >>> candidate, cost = widest_window(0.3, 4096, 64)
        >>> candidate.description, round(cost, 3)
        ('Window(left=512, right=0) | Sinks(count=64) in blocks of 64', 0.286)
    """
    found = None
    for width in range(block, tokens + block, block):
        candidate = Candidate.of_mask(Window(width, 0) | Sinks(block), block)
        cost = candidate.budget(tokens)
        assert cost is not None, "masks have a known budget"
        if cost > effective:
            break
        found = candidate, cost
    if found is None:
        raise ArgumentError(
            "no window costs so little",
            got=f"{effective:.1%} at {tokens} tokens in blocks of {block}",
            fix="ask for a larger share, a longer context or smaller blocks",
        )
    return found


def frontier(
    subject: Subject,
    texts: Texts,
    settings: Settings,
    planner: Planner,
    shares: Sequence[float],
    *,
    journal: Journal | None = None,
    watch: Watch = lambda _: None,
    done: Callable[[Point], None] = lambda _: None,
) -> list[Point]:
    """Evaluate a plan and a window at every cost, on the same texts.

    Args:
        subject: the model.
        texts: what it reads.
        settings: what is asked; one context.
        planner: makes plans.
        shares: costs, as shares of dense attention, choosing included.
        journal: keeps answers, so that an interrupted run goes on.
        watch: told about every answer.
        done: told about every point.
    """
    if len(settings.contexts) != 1:
        raise ArgumentError(
            "costs are compared at one length", got=settings.contexts, expected="one context"
        )
    journal = Journal() if journal is None else journal
    points = []
    for name, asked, candidate, effective in _sides(planner, shares, settings.contexts[0]):
        report = evaluate(
            subject, texts, settings, candidate=candidate, journal=journal, watch=watch
        )
        points.append(Point(name, asked, effective, report))
        done(points[-1])
    return points


def _sides(
    planner: Planner, shares: Sequence[float], tokens: int
) -> Iterator[tuple[str, float, Candidate, float]]:
    for asked in shares:
        yield "plan", asked, *planner.candidate(asked)
        yield "window", asked, *widest_window(asked, tokens, planner.profile.block)
