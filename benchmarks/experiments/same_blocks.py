"""The same ragged block grids through our kernel and through CPU peers.

python -m benchmarks.experiments.same_blocks              # mean 25% and 43%, 4096 and 8192 tokens
python -m benchmarks.experiments.same_blocks --quick

Beside them, in the same rounds, torch SDPA over all blocks: sparsity has to beat it to be of use.
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
from benchmarks.experiments.ragged import BUDGETS
from xsake.benchmarking import Shape
from xsake.layout.synthetic import ragged_grid
from xsake.reports.bench_report import draw_times

SPEEDUPS = {"torch.flex": 2.5, "ejkernel": 2.0}
DENSE, DENSE_SPEEDUP, DENSE_AT = "torch.sdpa", 2.0, "ragged_25"


def measure(settings: Settings) -> Outcome:
    """One race for every length and budget."""
    rows, claims = [], []
    for tokens in settings.choose([4096, 8192]):
        shape = Shape.square(tokens)
        for name, mean in BUDGETS.items():
            grid = ragged_grid(shape.q_heads, blocks_of(tokens), mean, seed=settings.seed)
            contenders = [Contender(side, side, name) for side in ("xsake", *SPEEDUPS)]
            contenders.append(Contender(DENSE, DENSE))
            found = race(
                "same_blocks",
                shape,
                contenders,
                settings=settings,
                baselines=[*SPEEDUPS, DENSE],
                grids={name: grid},
            )
            rows += found
            speedups = SPEEDUPS | ({DENSE: DENSE_SPEEDUP} if name == DENSE_AT else {})
            topic = f"same blocks, budget {budget_of(grid):.1%}, {tokens} tokens"
            limits = {other: 1 / speedup for other, speedup in speedups.items()}
            claims += limit_claims(topic, found, side="xsake", limits=limits)
            if settings.is_saved:
                title = f"Budget {mean:.0%}, {tokens:,} tokens"
                draw_times(found, RESULTS / f"same_blocks_{name}_{tokens}.png", title)
    return rows, claims


if __name__ == "__main__":
    command("same_blocks", measure, __doc__)
