"""HADS: what heads look at, what they may skip under a budget, and the plan that says so."""

from xsake.hads.attend import Planned
from xsake.hads.audit import Audit, audited_choice
from xsake.hads.bounds import bounded_choice, dropped_bound
from xsake.hads.budget import AlwaysOn
from xsake.hads.calibrate import Reading, Settings, calibrate
from xsake.hads.choose import Scope
from xsake.hads.making import make_plan, policy_named, selector_named
from xsake.hads.plan import SparsityPlan
from xsake.hads.policy import POLICIES, Policy
from xsake.hads.profile import CalibratedModel, Profile
from xsake.hads.recorder import Recorder, observer
from xsake.hads.selectors import SELECTORS, Selector
from xsake.hads.shelf import Shelf

__all__ = [
    "POLICIES",
    "SELECTORS",
    "AlwaysOn",
    "Audit",
    "CalibratedModel",
    "Planned",
    "Policy",
    "Profile",
    "Reading",
    "Recorder",
    "Scope",
    "Selector",
    "Settings",
    "Shelf",
    "SparsityPlan",
    "audited_choice",
    "bounded_choice",
    "calibrate",
    "dropped_bound",
    "make_plan",
    "observer",
    "policy_named",
    "selector_named",
]
