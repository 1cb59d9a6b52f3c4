"""From names to a plan: policies and selectors as people ask for them, and what each needs."""

import dataclasses

from xsake.errors import ArgumentError
from xsake.hads.plan import SparsityPlan
from xsake.hads.plan_parts import Selector as SelectorChoice
from xsake.hads.policy import POLICIES, Original, Policy, Static
from xsake.hads.profile import Profile
from xsake.hads.selectors import SELECTORS, Selector


def policy_named(name: str, **settings: float) -> Policy:
    """A policy by its name, with its settings if it has any."""
    return _made("policy", POLICIES, name, settings)


def selector_named(name: str, **settings: int) -> Selector:
    """A selector by its name, with its settings if it has any."""
    return _made("selector", SELECTORS, name, settings)


def _made(what: str, known: dict, name: str, settings: dict):
    if name not in known:
        raise ArgumentError(f"there is no such {what}", got=name, expected=", ".join(known))
    try:
        return known[name](**settings)
    except TypeError as error:
        fields = [field.name for field in dataclasses.fields(known[name]) if field.init]
        raise ArgumentError(
            f"the {what} {name!r} has other settings",
            got=", ".join(settings) or "none",
            expected=", ".join(fields) or "none",
        ) from error


def make_plan(
    profile: Profile, policy: Policy, budget: float | None, selector: Selector
) -> SparsityPlan:
    """The plan of a policy whose blocks a selector will choose; some policies choose their own.

    Args:
        profile: what calibration measured.
        policy: how the budget is spent.
        budget: computed / causally visible blocks; None for policies that find their own.
        selector: one whose estimates the profile has measured.
    """
    own = isinstance(policy, Static | Original)
    choice = None if own else choice_of(selector, profile)
    return SparsityPlan.of(profile, policy, budget, selector=choice)


def choice_of(selector: Selector, profile: Profile) -> SelectorChoice:
    """A selector as a plan names it, and its price at the calibrated length."""
    fields = [field.name for field in dataclasses.fields(selector) if field.init]  # pyrefly: ignore
    return SelectorChoice(
        name=selector.name,
        settings={name: getattr(selector, name) for name in fields},
        cost=round(selector.cost(profile.context, profile.block, profile.model.head_dim), 9),
    )
