"""Head-Adaptive Dynamic Sparsity: calibration profiles, sparsity plans, attention by a plan."""

from xsake.hads.budget import ForcedBlocks
from xsake.hads.calibrate import CalibrationDocument, CalibrationSettings, MassCache, calibrate
from xsake.hads.error_bounds import Audit, audited_choice, bounded_choice, dropped_bound
from xsake.hads.hooks import AttentionRecorder, observer
from xsake.hads.plan import SparsityPlan, make_plan
from xsake.hads.policies import POLICIES, Policy, make_policy
from xsake.hads.profile import CalibratedModel, Profile
from xsake.hads.selectors import SELECTORS, Selector, make_selector
from xsake.hads.sparse_attention import PlanAttention
from xsake.hads.sparse_decoding import PlanDecoding
from xsake.hads.topk import BudgetScope

__all__ = [
    "POLICIES", "SELECTORS", "AttentionRecorder", "Audit", "BudgetScope", "CalibratedModel",
    "CalibrationDocument", "CalibrationSettings", "ForcedBlocks", "MassCache", "PlanAttention",
    "PlanDecoding", "Policy", "Profile", "Selector", "SparsityPlan", "audited_choice",
    "bounded_choice", "calibrate", "dropped_bound", "make_plan", "make_policy", "make_selector",
    "observer",
]  # fmt: skip
