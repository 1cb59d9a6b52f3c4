"""Head-Adaptive Dynamic Sparsity: calibration profiles, sparsity plans, attention by a plan."""

from xsake.hads.budget import ForcedBlocks
from xsake.hads.calibrate import CalibrationDocument, CalibrationSettings, MassCache, calibrate
from xsake.hads.error_bounds import Audit, audited_choice, bounded_choice, dropped_bound
from xsake.hads.hooks import AttentionRecorder, observer
from xsake.hads.plan import SparsityPlan, make_plan, make_policy, make_selector
from xsake.hads.policies import POLICIES, Policy
from xsake.hads.profile import CalibratedModel, Profile
from xsake.hads.selectors import SELECTORS, Selector
from xsake.hads.sparse_attention import PlanAttention
from xsake.hads.topk import BudgetScope

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
