"""Selectors: estimate block masses of an input at run time from its queries and keys."""

from xsake.hads.selectors.antidiagonal import Antidiagonal
from xsake.hads.selectors.base import ScoringContext, Selector, correct_masses
from xsake.hads.selectors.cumulant import Cumulant
from xsake.hads.selectors.pooled import Pooled
from xsake.hads.selectors.sampled import Sampled

SELECTORS: dict[str, type[Selector]] = {
    "sampled": Sampled,
    "cumulant": Cumulant,
    "antidiagonal": Antidiagonal,
    "pooled": Pooled,
}

__all__ = [
    "SELECTORS",
    "Antidiagonal",
    "Cumulant",
    "ScoringContext",
    "Pooled",
    "Sampled",
    "Selector",
    "correct_masses",
]
