"""The gate's own measurement: a handful of ratios that must not become worse; half a minute.

python -m benchmarks.gate

Ratios are taken inside one interleaved run, and limits lie far above what was measured, so that a
busy machine does not fail a change, and a loop that stopped skipping does.
"""

from benchmarks.experiment import show
from xsake.bench import Claim, Verdict, claims_table, judge
from xsake.bench.measure import DENSE, PRODUCT, Kind, Settings, measure

SPARSE = "xsake, 25%"
LIMITS: dict[tuple[Kind, str, str], float] = {
    ("attention", DENSE, "jax.nn"): 0.6,
    ("attention", SPARSE, DENSE): 0.75,
    ("attention", DENSE, PRODUCT): 6.0,
    ("backward", SPARSE, DENSE): 0.75,
    ("backward", SPARSE, "jax.nn"): 0.4,
}
SETTINGS = Settings(tokens=(2048,), budgets=(0.25,), rounds=5)


def main() -> int:
    """0 unless a ratio is above its limit by three quarters of the rounds, or a result is wrong."""
    kinds: list[Kind] = ["attention", "backward"]
    rows = {
        (kind, row.side): row
        for kind in kinds
        for row in measure(kind, SETTINGS, lambda done, rows: None)
    }
    claims = []
    for (kind, side, baseline), limit in LIMITS.items():
        row = rows[kind, side]
        ratio = row.ratio_to(baseline)
        verdict = judge(ratio, limit) if row.is_correct else Verdict.FAIL
        promise = f"{side}: at most {limit}x of {baseline}"
        claims.append(Claim(f"{kind}, 2048 tokens", promise, ratio.describe(), verdict))
    show(claims_table(claims, title="Ratios that must not become worse"))
    return 1 if any(claim.verdict is Verdict.FAIL for claim in claims) else 0


if __name__ == "__main__":
    raise SystemExit(main())
