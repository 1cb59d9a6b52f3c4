"""Planted bugs: rows of a table, each of which replaces one right thing by a wrong one."""

import dataclasses
import sys
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Bug:
    """One mistake: what it replaces, by what, and the case in which it must show."""

    name: str
    owner: object
    attribute: str
    broken: Callable  # takes the right thing, returns the wrong one
    case: str
    interpreter: str = "plain"  # of TPU kernels
    launches: int = 1  # 2: it needs a schedule of two launches


def plant(monkeypatch, bug: Bug) -> None:
    """Replace the right thing, where a kernel imported it by name too."""
    right = getattr(bug.owner, bug.attribute)
    wrong = bug.broken(right)
    monkeypatch.setattr(bug.owner, bug.attribute, wrong)
    for name, module in list(sys.modules.items()):
        is_kernel = callable(right) and name.startswith("xsake.kernels")
        if is_kernel and getattr(module, bug.attribute, None) is right:
            monkeypatch.setattr(module, bug.attribute, wrong)


def not_rescaled(right):
    """`online_softmax.rescale` that leaves earlier sums as they are."""

    def broken(*arguments):
        m_new, m_safe, alpha = right(*arguments)
        return m_new, m_safe, 0 * alpha + 1

    return broken


def without_delta(right):
    """`online_softmax.score_grad` without the term of the row."""
    return lambda p, dp, delta, slope: right(p, dp, 0 * delta, slope)


def first_head_only(right):
    """`MaskProgram.scalars` of the first head for every head."""
    return lambda self, tables, grid, q_number: right(self, tables, grid, 0 * q_number)


def without_segments(right):
    """`element_mask` of tiles without segment ids."""
    without = lambda side: dataclasses.replace(side, integers=side.integers._replace(segments=None))
    return lambda q, kv, *rest: right(without(q), without(kv), *rest)
