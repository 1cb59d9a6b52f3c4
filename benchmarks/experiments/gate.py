"""The gate's own measurement: a handful of ratios that must not become worse; half a minute.

python -m benchmarks.experiments.gate

Ratios are taken inside one interleaved run, and limits lie far above what was measured, so that a
busy machine does not fail a change, and a loop that stopped skipping does.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import xsake
from benchmarks.experiments.common import show
from xsake.benchmarking import (
    Claim,
    TimedSide,
    Verdict,
    check_limit,
    claims_table,
    interleave,
    pair_ratio,
)
from xsake.benchmarking.measure import DENSE, PRODUCT, BenchKind, BenchSettings, measure
from xsake.benchmarking.runner import time_warm
from xsake.masks import Causal, Window

SPARSE = "xsake, 25%"
LIMITS: dict[tuple[BenchKind, str, str], float] = {
    ("attention", DENSE, "jax.nn"): 0.6,
    ("attention", SPARSE, DENSE): 0.75,
    ("attention", DENSE, PRODUCT): 6.0,
    ("backward", SPARSE, DENSE): 0.75,
    ("backward", SPARSE, "jax.nn"): 0.4,
}
SETTINGS = BenchSettings(tokens=(2048,), budgets=(0.25,), rounds=5)

WINDOW = 1024
SHORT_LIMIT = 2.5  # 0.9 to 1.6 measured; 3 and more is a cliff


def decode_ratio():
    """One query on a window of a cache of 32,768 tokens, next to `jax.nn` on a slice of it."""
    q = jax.random.normal(jax.random.key(0), (1, 1, 32, 64))
    k, v = jax.random.normal(jax.random.key(1), (2, 1, 32_768, 8, 64))
    mask = Causal() & Window(WINDOW - 1, 0)

    def ours(q, k, v, at):
        return xsake.attention(q, k, v, mask=mask, q_positions=at)

    def theirs(q, k, v, at):
        cut = lambda x: lax.dynamic_slice_in_dim(x, at[0] - WINDOW + 1, WINDOW, 1)
        return jax.nn.dot_product_attention(q, cut(k), cut(v))

    return _ratio(ours, theirs, (q, k, v, jnp.array([32_767])))


def short_ratio(*shape: int):
    """Causal attention on sequences of about one block and its gradients, next to `jax.nn`."""
    arrays = jax.random.normal(jax.random.key(0), (3, *shape))
    gradient = lambda attend: jax.grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2))
    ours = gradient(lambda *x: xsake.attention(*x, mask=Causal()))
    theirs = gradient(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))
    return _ratio(ours, theirs, tuple(arrays))


def _ratio(ours: Callable, theirs: Callable, arrays: tuple):
    def side(name: str, function: Callable) -> TimedSide:
        compiled = jax.jit(function).lower(*arrays).compile()
        return TimedSide(name, lambda: time_warm(lambda: jax.block_until_ready(compiled(*arrays))))

    times = interleave([side("xsake", ours), side("jax.nn", theirs)], rounds=15)
    return pair_ratio(times["xsake"], times["jax.nn"])


SHORT = {
    "decode, window of 1,024 in 32,768": decode_ratio,
    "backward, 129 tokens": lambda: short_ratio(1, 129, 12, 64),
    "backward, 1,024 x 8 tokens": lambda: short_ratio(1024, 8, 4, 32),
}


def main() -> int:
    """0 unless a ratio is above its limit by three quarters of the rounds, or a result is wrong."""
    kinds: list[BenchKind] = ["attention", "backward"]
    rows = {(kind, row.side): row for kind in kinds for row in measure(kind, SETTINGS)}
    claims = []
    for (kind, side, baseline), limit in LIMITS.items():
        row = rows[kind, side]
        ratio = row.ratio_to(baseline)
        verdict = check_limit(ratio, limit) if row.is_correct else Verdict.FAIL
        promise = f"{side}: at most {limit}x of {baseline}"
        claims.append(Claim(f"{kind}, 2048 tokens", promise, ratio.describe(), verdict))
    for topic, measured in SHORT.items():
        ratio, promise = measured(), f"xsake: at most {SHORT_LIMIT}x of jax.nn"
        claims.append(Claim(topic, promise, ratio.describe(), check_limit(ratio, SHORT_LIMIT)))
    show(claims_table(claims, title="Ratios that must not become worse"))
    return 1 if any(claim.verdict is Verdict.FAIL for claim in claims) else 0


if __name__ == "__main__":
    raise SystemExit(main())
