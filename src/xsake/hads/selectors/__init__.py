"""Selectors: estimate block masses of an input at run time from its queries and keys."""

from xsake.hads.selectors.antidiagonal import Antidiagonal
from xsake.hads.selectors.base import (
    Chunk,
    ScoringContext,
    Selector,
    SelectorSpec,
    correct_later_rows,
    correct_masses,
    make_by_name,
)
from xsake.hads.selectors.cumulant import Cumulant
from xsake.hads.selectors.pooled import Pooled
from xsake.hads.selectors.sampled import Sampled

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector for selector in (Sampled, Cumulant, Antidiagonal, Pooled)
}

__all__ = [
    "SELECTORS", "Antidiagonal", "Chunk", "Cumulant", "Pooled", "Sampled", "ScoringContext",
    "Selector", "SelectorSpec", "correct_later_rows", "correct_masses", "from_spec",
    "make_selector",
]  # fmt: skip


def make_selector(name: str, **settings: int) -> Selector:
    """Build a selector by name."""
    return make_by_name("selector", SELECTORS, name, settings)


def from_spec(spec: SelectorSpec) -> Selector:
    """Build the selector of a plan, the inverse of `Selector.spec`."""
    return make_by_name("selector", SELECTORS, spec.name, spec.settings)
