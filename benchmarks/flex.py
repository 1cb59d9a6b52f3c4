"""The same ragged block grids through our kernel and through compiled FlexAttention.

python -m benchmarks.flex              # mean 25% and 43%, 4096 tokens
python -m benchmarks.flex --quick
"""

from benchmarks.experiment import (
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
from benchmarks.ragged import BUDGETS
from xsake.bench import Shape, ragged_grid
from xsake.bench.plot import draw_times

SPEEDUP = 2.5


def measure(settings: Settings) -> Outcome:
    """One race per budget: ours against FlexAttention."""
    rows, claims = [], []
    for tokens in settings.choose([4096]):
        shape = Shape.square(tokens)
        for name, mean in BUDGETS.items():
            grid = ragged_grid(shape.q_heads, blocks_of(tokens), mean, seed=settings.seed)
            contenders = [
                Contender("xsake", "xsake", name),
                Contender("torch.flex", "torch.flex", name),
            ]
            found = race(
                "flex",
                shape,
                contenders,
                settings=settings,
                baselines=["torch.flex"],
                grids={name: grid},
            )
            rows += found
            claims.append(
                limit_claim(
                    f"same blocks, budget {budget_of(grid):.1%}, {tokens} tokens",
                    f"{SPEEDUP} times faster than FlexAttention",
                    found,
                    side="xsake",
                    baseline="torch.flex",
                    limit=1 / SPEEDUP,
                )
            )
            if settings.is_saved:
                title = f"Budget {mean:.0%}, {tokens:,} tokens"
                draw_times(found, RESULTS / f"flex_{name}_{tokens}.png", title)
    return rows, claims


if __name__ == "__main__":
    command("flex", measure, __doc__)
