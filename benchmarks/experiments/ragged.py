"""Heads with budgets from 10% to 90%: does our time follow the budget?

python -m benchmarks.experiments.ragged            # mean 43% and 25%, 4096 and 8192 tokens
python -m benchmarks.experiments.ragged --quick
"""

from benchmarks.experiments.common import (
    RESULTS,
    Contender,
    Outcome,
    Settings,
    blocks_of,
    budget_of,
    command,
    limit_claim,
    race,
)
from xsake.benchmarking import Shape
from xsake.layout.synthetic import ragged_grid
from xsake.reports.bench_report import draw_budgets

BUDGETS = {"ragged_43": 0.43, "ragged_25": 0.25}
OVERHEAD = 1.15
FULL = "full causal"


def measure(settings: Settings) -> Outcome:
    """Race our ragged calls with our own full causal call."""
    rows, claims = [], []
    contenders = [Contender(FULL, "xsake"), *(Contender(name, "xsake", name) for name in BUDGETS)]
    for tokens in settings.choose([4096, 8192]):
        shape = Shape.square(tokens)
        grids = {
            name: ragged_grid(shape.q_heads, blocks_of(tokens), mean, seed=settings.seed)
            for name, mean in BUDGETS.items()
        }
        found = race("ragged", shape, contenders, settings=settings, baselines=[FULL], grids=grids)
        rows += found
        for name, grid in grids.items():
            budget = budget_of(grid)
            claims.append(
                limit_claim(
                    f"ragged heads, budget {budget:.1%}, {tokens} tokens",
                    f"{OVERHEAD} x budget x own full causal",
                    found,
                    side=name,
                    baseline=FULL,
                    limit=OVERHEAD * budget,
                )
            )
    if settings.is_saved:
        draw_budgets(rows, RESULTS / "ragged.png", "Time follows the budget", baseline=FULL)
    return rows, claims


if __name__ == "__main__":
    command("ragged", measure, __doc__)
