"""Every experiment with a promise, one summary: limit, measured, verdict.

python -m benchmarks.experiments.claims         # appends rows to benchmarks/results
python -m benchmarks.experiments.claims --quick
"""

from benchmarks.experiments import (
    backward,
    causal,
    layout_build,
    memory,
    ragged,
    recompile,
    same_blocks,
)
from benchmarks.experiments.common import parse_settings, report, show
from xsake.benchmarking import Verdict, claims_table

# Races first: the last three start JAX in this process, whose threads should not be there before.
EXPERIMENTS = {
    "causal": causal.measure,
    "ragged": ragged.measure,
    "same_blocks": same_blocks.measure,
    "backward": backward.measure,
    "memory": memory.measure,
    "layout_build": layout_build.measure,
    "recompile": recompile.measure,
}


MISSED = 3  # a crash ends with 1


def main() -> int:
    """Run all; 0 when every promise is kept, else `MISSED`."""
    settings = parse_settings(__doc__)
    claims = []
    for name, measure in EXPERIMENTS.items():
        outcome = measure(settings)
        report(name, outcome, settings)
        claims += outcome[1]
    show(claims_table(claims, title="All promises"))
    return 0 if all(claim.verdict is Verdict.PASS for claim in claims) else MISSED


if __name__ == "__main__":
    raise SystemExit(main())
