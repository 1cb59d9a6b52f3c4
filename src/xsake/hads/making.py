"""Factories: policies, selectors and plans by name."""

import dataclasses

from xsake.errors import ArgumentError
from xsake.hads.plan import SparsityPlan
from xsake.hads.plan_parts import SelectorSpec as SelectorChoice
from xsake.hads.policy import POLICIES, EntropyRandom, Policy, Static
from xsake.hads.profile import Profile
from xsake.hads.selectors import SELECTORS, Selector


def make_policy(name: str, **settings: float) -> Policy:
    """Build a policy by name."""
    return _make("policy", POLICIES, name, settings)


def make_selector(name: str, **settings: int) -> Selector:
    """Build a selector by name."""
    return _make("selector", SELECTORS, name, settings)


def _make(what: str, registry: dict, name: str, settings: dict):
    if name not in registry:
        raise ArgumentError(f"unknown {what}", got=name, expected=", ".join(registry))
    try:
        return registry[name](**settings)
    except TypeError as error:
        fields = [field.name for field in dataclasses.fields(registry[name]) if field.init]
        raise ArgumentError(
            f"unknown settings of the {what} {name!r}",
            got=", ".join(settings) or "none",
            expected=", ".join(fields) or "none",
        ) from error


def make_plan(
    profile: Profile, policy: Policy, budget: float | None, selector: Selector
) -> SparsityPlan:
    """Build the plan of a policy; `static` and `original` do not use the selector."""
    is_implied = isinstance(policy, Static | EntropyRandom)
    spec = None if is_implied else selector_spec(selector, profile)
    return SparsityPlan.of(profile, policy, budget, selector=spec)


def selector_spec(selector: Selector, profile: Profile) -> SelectorChoice:
    """Return the spec of a selector, with its cost at the calibrated length."""
    fields = [field.name for field in dataclasses.fields(selector) if field.init]  # pyrefly: ignore
    return SelectorChoice(
        name=selector.name,
        settings={name: getattr(selector, name) for name in fields},
        cost=round(selector.cost(profile.context, profile.block, profile.model.head_dim), 9),
    )
