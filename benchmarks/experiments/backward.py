"""Forward and backward at budget 25%, compared with full causal attention and CPU peers.

python -m benchmarks.experiments.backward          # 4096 and 8192 tokens
python -m benchmarks.experiments.backward --quick
"""

from benchmarks.experiments.common import (
    RESULTS,
    Contender,
    Outcome,
    Settings,
    blocks_of,
    budget_of,
    command,
    limit_claims,
    race,
)
from xsake.benchmarking import Shape
from xsake.layout.synthetic import ragged_grid
from xsake.reports.bench_report import draw_times

GRID = "ragged_25"
LIMITS = {
    "full causal": 0.35,
    "jax.nn": 0.2,
    "torch.sdpa": 1 / 3,
    "tokamax": 1 / 3,
    "ejkernel": 1 / 3,
}
SPARSE = ("ejkernel",)  # takes the grid; the others compute all blocks


def measure(settings: Settings) -> Outcome:
    """Race value_and_grad with respect to q, k and v."""
    rows, claims = [], []
    contenders = [
        Contender(GRID, "xsake", GRID, is_backward=True),
        Contender("full causal", "xsake", is_backward=True),
    ]
    for name in list(LIMITS)[1:]:
        grid = GRID if name in SPARSE else None
        contenders.append(Contender(name, name, grid, is_backward=True))
    for tokens in settings.choose([4096, 8192]):
        shape = Shape.square(tokens)
        grid = ragged_grid(shape.q_heads, blocks_of(tokens), 0.25, seed=settings.seed)
        found = race(
            "backward",
            shape,
            contenders,
            settings=settings,
            baselines=list(LIMITS),
            grids={GRID: grid},
        )
        rows += found
        topic = f"forward+backward, budget {budget_of(grid):.1%}, {tokens} tokens"
        claims += limit_claims(topic, found, side=GRID, limits=LIMITS)
        if settings.is_saved:
            title = f"Forward and backward, {tokens:,} tokens"
            draw_times(found, RESULTS / f"backward_{tokens}.png", title)
    return rows, claims


if __name__ == "__main__":
    command("backward", measure, __doc__)
