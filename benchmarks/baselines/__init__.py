"""Published block selection rules under one interface, for comparison at equal budgets."""

from collections.abc import Callable

from benchmarks.baselines.calibrated import AdaKv, EqualCoverage, Sparge, SpargeTopK
from benchmarks.baselines.estimators import BOUNDS, POOLED, antidiagonals
from benchmarks.baselines.moba import Moba
from benchmarks.baselines.rule import (
    HeadSelectionRule,
    LayerSample,
    Ranking,
    RuleScope,
    SelectionRule,
)
from benchmarks.baselines.static_patterns import (
    BigBirdRule,
    EntropyShares,
    LongformerRule,
    RandomRule,
    WindowRule,
)
from benchmarks.baselines.top_p import OracleModel, OracleRows, TopKRule, TopPRule
from benchmarks.baselines.vertical_slash import FlexPrefill, Minference, VerticalSlash

__all__ = ["RULES", "HeadSelectionRule", "Ranking", "SelectionRule", "LayerSample", "RuleScope"]

RULES: dict[str, Callable[[], SelectionRule]] = {
    "sliding_window": lambda: WindowRule("sliding_window", num_sink=0),
    "a_shape": lambda: WindowRule("a_shape", num_sink=1),
    "longformer": LongformerRule,
    "bigbird": BigBirdRule,
    "random": lambda: RandomRule("random", num_sink=0, num_local=1),
    "random_with_always_on": lambda: RandomRule("random_with_always_on", num_sink=1, num_local=2),
    "vertical_slash": VerticalSlash,
    "pooled_top_k": lambda: TopKRule("pooled_top_k", POOLED),
    "pooled_top_p": lambda: TopPRule("pooled_top_p", POOLED),
    "xattention_8": lambda: EqualCoverage("xattention_8", antidiagonals(8)),
    "xattention_8_top_k": lambda: TopKRule("xattention_8_top_k", antidiagonals(8)),
    "xattention_8_top_p": lambda: TopPRule("xattention_8_top_p", antidiagonals(8)),
    "xattention_16": lambda: EqualCoverage("xattention_16", antidiagonals(16)),
    "xattention_16_top_k": lambda: TopKRule("xattention_16_top_k", antidiagonals(16)),
    "xattention_16_top_p": lambda: TopPRule("xattention_16_top_p", antidiagonals(16)),
    "minference": Minference,
    "flexprefill": FlexPrefill,
    "sparge": Sparge,
    "sparge_top_k": SpargeTopK,
    "quest": lambda: TopKRule("quest", BOUNDS),
    "moba": Moba,
    "ada_kv": AdaKv,
    "ada_kv_raw": lambda: TopKRule("ada_kv_raw", POOLED, scope=RuleScope.MODEL),
    "entropy_original": EntropyShares,
    "entropy_original_literal": lambda: EntropyShares(
        "entropy_original_literal", from_first_layer=True
    ),
    "oracle_rows": OracleRows,
    "oracle_model": OracleModel,
}
"""Factories of rules by name; calibrated rules have state."""
