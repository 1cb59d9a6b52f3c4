"""Full causal forward compared with torch SDPA, jax.nn and tokamax.

python -m benchmarks.experiments.causal            # 4096 and 8192 tokens
python -m benchmarks.experiments.causal --quick
"""

from benchmarks.experiments.common import (
    RESULTS,
    Contender,
    Outcome,
    Settings,
    command,
    limit_claims,
    race,
)
from xsake.benchmarking import Shape
from xsake.reports.bench_report import draw_times

RIVALS = ("torch.sdpa", "jax.nn", "tokamax", "tokamax.xla")
LIMITS = {"torch.sdpa": 1.25, "jax.nn": 0.25}


def measure(settings: Settings) -> Outcome:
    """Race all of them at every chosen length."""
    rows, claims = [], []
    contenders = [Contender(name, name) for name in ("xsake", *RIVALS)]
    for tokens in settings.choose([4096, 8192]):
        found = race(
            "causal", Shape.square(tokens), contenders, settings=settings, baselines=RIVALS
        )
        rows += found
        claims += limit_claims(f"full causal, {tokens} tokens", found, side="xsake", limits=LIMITS)
        if settings.is_saved:
            draw_times(
                found, RESULTS / f"causal_{tokens}.png", f"Causal attention, {tokens:,} tokens"
            )
    return rows, claims


if __name__ == "__main__":
    command("causal", measure, __doc__)
