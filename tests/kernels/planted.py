"""Planted bugs: rows of a table, each of which replaces one right thing by a wrong one."""

import dataclasses
import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest

import xsake
from xsake.masks import Explicit
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures


@dataclasses.dataclass(frozen=True)
class Bug:
    """One mistake: what it replaces, by what, and the case in which it must show."""

    name: str
    owner: object
    attribute: str
    # Called in place of a function, with that function as the first argument; takes the place of
    # a number, given that number.
    broken: Callable
    case: str
    interpreter: str = "plain"  # of TPU kernels
    launches: int = 1  # 2: it needs a schedule of two launches


def plant(monkeypatch: pytest.MonkeyPatch, bug: Bug) -> None:
    """Replace the right thing, where a kernel imported it by name too."""
    right = getattr(bug.owner, bug.attribute)
    if not callable(right):
        monkeypatch.setattr(bug.owner, bug.attribute, bug.broken(right))
        return

    def wrong(*arguments, **named):
        return bug.broken(right, *arguments, **named)

    monkeypatch.setattr(bug.owner, bug.attribute, wrong)
    for name, module in list(sys.modules.items()):
        if name.startswith("xsake.kernels") and getattr(module, bug.attribute, None) is right:
            monkeypatch.setattr(module, bug.attribute, wrong)


def noticed(case: ConformanceCase, implementation: str) -> list[str]:
    """Exceeded error budgets, or the error that an interpreter stopped with."""
    try:
        return failures(check_case(xsake.attention, case, implementation))
    except (jax.errors.JaxRuntimeError, IndexError, ValueError, RuntimeError) as error:
        return [str(error)]


def sizes(tokens: int, **more):
    """Sizes of a small case."""
    dims = {"head_dim": 16, "value_dim": 16}
    return {"q_tokens": tokens, "kv_tokens": tokens, "q_heads": 4, "kv_heads": 2, **dims, **more}


def some_pairs(tokens: int, empty_rows: tuple[int, ...] = ()) -> Explicit:
    """A third of all pairs."""
    table = np.random.default_rng(0).random((tokens, tokens)) < 0.3
    table[list(empty_rows)] = False
    return Explicit(table)


def not_rescaled(right, *arguments):
    """`online_softmax.rescale` that leaves earlier sums as they are."""
    m_new, m_safe, alpha = right(*arguments)
    return m_new, m_safe, 0 * alpha + 1


def without_delta(right, p, dp, delta, slope):
    """`online_softmax.score_grad` without the term of the row."""
    return right(p, dp, 0 * delta, slope)


def first_head_only(right, self, tables, grid, q_number):
    """`MaskProgram.scalars` of the first head for every head."""
    return right(self, tables, grid, 0 * q_number)


def without_segments(right, q, kv, *rest):
    """`element_mask` of tiles without segment ids."""
    without = lambda side: dataclasses.replace(side, integers=side.integers._replace(segments=None))
    return right(without(q), without(kv), *rest)
