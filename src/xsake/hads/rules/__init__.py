"""Published rules that choose blocks, from their papers, under one interface and at any budget."""

from collections.abc import Callable

from xsake.hads.rules.calibrated import AdaKv, EqualCoverage
from xsake.hads.rules.cumulative import TopK, TopP
from xsake.hads.rules.entropy import EntropyShares
from xsake.hads.rules.fixed import BigBird, Longformer, Random, Window
from xsake.hads.rules.gates import Moba
from xsake.hads.rules.minference import Minference
from xsake.hads.rules.oracle import OracleModel, OracleRows
from xsake.hads.rules.rule import HeadRule, Ranking, Rule, Scene, Scope
from xsake.hads.rules.scores import BOUNDS, POOLED, antidiagonals
from xsake.hads.rules.sparge import Sparge
from xsake.hads.rules.vertical_slash import FlexPrefill, VerticalSlash

__all__ = ["RULES", "HeadRule", "Ranking", "Rule", "Scene", "Scope"]

RULES: dict[str, Callable[[], Rule]] = {
    "sliding_window": lambda: Window("sliding_window", sinks=0),
    "a_shape": lambda: Window("a_shape", sinks=1),
    "longformer": Longformer,
    "bigbird": BigBird,
    "random": lambda: Random("random", sinks=0, locals=1),
    "random_with_always_on": lambda: Random("random_with_always_on", sinks=1, locals=2),
    "vertical_slash": VerticalSlash,
    "pooled_top_k": lambda: TopK("pooled_top_k", POOLED),
    "pooled_top_p": lambda: TopP("pooled_top_p", POOLED),
    "xattention_8": lambda: EqualCoverage("xattention_8", antidiagonals(8)),
    "xattention_8_top_k": lambda: TopK("xattention_8_top_k", antidiagonals(8)),
    "xattention_8_top_p": lambda: TopP("xattention_8_top_p", antidiagonals(8)),
    "xattention_16": lambda: EqualCoverage("xattention_16", antidiagonals(16)),
    "xattention_16_top_k": lambda: TopK("xattention_16_top_k", antidiagonals(16)),
    "xattention_16_top_p": lambda: TopP("xattention_16_top_p", antidiagonals(16)),
    "minference": Minference,
    "flexprefill": FlexPrefill,
    "sparge": Sparge,
    "quest": lambda: TopK("quest", BOUNDS),
    "moba": Moba,
    "ada_kv": AdaKv,
    "ada_kv_raw": lambda: TopK("ada_kv_raw", POOLED, scope=Scope.MODEL),
    "entropy_original": EntropyShares,
    "entropy_original_literal": lambda: EntropyShares(
        "entropy_original_literal", from_first_layer=True
    ),
    "oracle_rows": OracleRows,
    "oracle_model": OracleModel,
}
"""Makes a fresh rule by its name; a rule that learns keeps what it has watched."""
