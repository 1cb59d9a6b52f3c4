"""Two commits, interleaved in one run: regressions.

python -m benchmarks.experiments.commits main~5 main  # 4096 tokens, forward and both passes
python -m benchmarks.experiments.commits main HEAD --quick  # 1024 tokens, 5 rounds

Each commit is checked out into a folder of its own and answers from its own process. Exit code 1 if
a case is slower than the limit even by its better quartile.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.experiments.common import BLOCK, blocks_of, draw_inputs, show
from benchmarks.peers.client import ROOT, Worker
from xsake.benchmarking import Shape, Spread, TimedSide, interleave, pair_ratio
from xsake.layout.synthetic import ragged_grid

CASES = {
    "forward, all blocks": (None, False),
    "forward, 43%": ("ragged_43", False),
    "forward, 25%": ("ragged_25", False),
    "both passes, 25%": ("ragged_25", True),
}


def main() -> int:
    """Race both commits; 0 when nothing is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.1, help="slower than this fails")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    tokens = asked.tokens or (1024 if asked.quick else 4096)
    rounds = asked.rounds or (5 if asked.quick else 15)
    found = race_commits(asked.before, asked.after, tokens, rounds, asked.threads)
    table = Table("case", f"{asked.after} / {asked.before}", "verdict")
    for case, ratio in found.items():
        verdict = "not slower" if ratio.is_clear else "unclear"
        verdict = "slower" if ratio.q25 > asked.limit else verdict
        table.add_row(case, ratio.describe(), verdict)
    show(table)
    return 1 if any(ratio.q25 > asked.limit for ratio in found.values()) else 0


def race_commits(
    before: str, after: str, tokens: int, rounds: int, threads: int
) -> dict[str, Spread]:
    """Time after / time before, by case, round by round.

    Args:
        before, after: whatever git takes for a commit.
        tokens: of the sequence.
        rounds: timed rounds.
        threads: cores for each.
    """
    shape, found = Shape.square(tokens), {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "inputs").mkdir()
        arrays = draw_inputs(shape, 0) | {
            "ragged_43": ragged_grid(shape.q_heads, blocks_of(tokens), 0.43, seed=0),
            "ragged_25": ragged_grid(shape.q_heads, blocks_of(tokens), 0.25, seed=0),
        }
        for key, array in arrays.items():
            np.save(folder / "inputs" / f"{key}.npy", array)
        workers = {}
        for side, commit in (("before", before), ("after", after)):
            source = stack.enter_context(checked_out(commit, folder / side)) / "src"
            worker = Worker(
                Path(sys.executable), "xsake_worker", threads=threads, is_isolated=True,
                source=source,
            )  # fmt: skip
            workers[side] = stack.enter_context(worker)
            worker.load(folder / "inputs")
        for case, (grid, is_backward) in CASES.items():
            asked = {"call": "attention", "grid": grid, "block": BLOCK, "backward": is_backward}
            for worker in workers.values():
                worker.compile(case, asked)
            sides = [TimedSide(x, lambda w=w, case=case: w.run(case)) for x, w in workers.items()]
            times = interleave(sides, rounds=rounds)
            found[case] = pair_ratio(times["after"], times["before"])
    return found


@contextlib.contextmanager
def checked_out(commit: str, folder: Path):
    """The files of a commit in a folder of their own."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
