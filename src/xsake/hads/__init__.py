"""Head-Adaptive Dynamic Sparsity: calibration profiles, sparsity plans, attention by a plan."""

from xsake.hads.attend import PlanAttention
from xsake.hads.audit import Audit, audited_choice
from xsake.hads.bounds import bounded_choice, dropped_bound
from xsake.hads.budget import ForcedBlocks
from xsake.hads.calibrate import CalibrationDocument, CalibrationSettings, calibrate
from xsake.hads.choose import BudgetScope
from xsake.hads.making import make_plan, make_policy, make_selector
from xsake.hads.plan import SparsityPlan
from xsake.hads.policy import POLICIES, Policy
from xsake.hads.profile import CalibratedModel, Profile
from xsake.hads.recorder import AttentionRecorder, observer
from xsake.hads.selectors import SELECTORS, Selector
from xsake.hads.shelf import MassCache

__all__ = [
    "POLICIES",
    "SELECTORS",
    "ForcedBlocks",
    "Audit",
    "CalibratedModel",
    "PlanAttention",
    "Policy",
    "Profile",
    "CalibrationDocument",
    "AttentionRecorder",
    "BudgetScope",
    "Selector",
    "CalibrationSettings",
    "MassCache",
    "SparsityPlan",
    "audited_choice",
    "bounded_choice",
    "calibrate",
    "dropped_bound",
    "make_plan",
    "observer",
    "make_policy",
    "make_selector",
]
