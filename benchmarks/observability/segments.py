"""Runs that pause after every segment of steps, so that two of them can take turns on one machine.

As a program it is the run: it says how long a segment took, and waits for a word to go on.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.results import FaultError
from benchmarks.faults.runs import Ground, prepare
from benchmarks.peers.client import ROOT

LARGER = (
    "model.decoder={vocab_size = 320, layers = 4, context = 256}", "data.context=256",
    "data.batch=8", 'attention.kind="plan"', "attention.budget=0.6", "attention.block=32",
)  # fmt: skip
"""A model whose step is long enough to be a step: a plan, four layers, 256 tokens."""

ALL_OFF = ("attention.probe_interval=0",)
ALL_ON = ("attention.probe_interval=100", 'track.trackers=["wandb", "tensorboard"]')


class Segmented:
    """A run that is paused between segments.

    Args:
        process: of the run.
        log: what it says when it fails.
    """

    def __init__(self, process: Any, log: Path):
        self._process, self._log = process, log
        self._answer()  # the first segment compiles, and is no measurement

    def segment(self) -> float:
        """Let it run for one segment; seconds of a step."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        line = self._process.stdout.readline()
        if not line:
            raise FaultError(f"the run has ended\n{self._log.read_text()[-2000:]}")
        return float(json.loads(line)["seconds"])


@contextlib.contextmanager
def segmented(
    ground: Ground, name: str, settings: tuple[str, ...], steps: int, *, is_bare: bool = False
) -> Iterator[Segmented]:
    """A run as a process of its own, paused, after its first segment.

    Args:
        ground: its data.
        name: of its folder.
        settings: what is different.
        steps: of a segment.
        is_bare: whether it writes no metrics at all.
    """
    words = {"settings": [*settings, f"run.log_interval={steps}"], "is_bare": is_bare}
    command = [sys.executable, "-m", "benchmarks.observability.segments", str(ground.folder), name]
    path = ground.folder / f"{name}.log"
    log = path.open("wb")
    process = subprocess.Popen(
        [*command, json.dumps(words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        text=True, cwd=ROOT, env=ground.variables,
    )  # fmt: skip
    try:
        yield Segmented(process, path)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, log):
            stream.close()


def compared(one: Segmented, other: Segmented, pairs: int) -> dict[str, Any]:
    """Seconds of a step of both, in turns, and the ratio of the first to the second.

    Args:
        one: a run.
        other: another.
        pairs: segments of each.
    """
    times = []
    for turn in range(pairs):
        if turn % 2:
            second = other.segment()
            times.append((one.segment(), second))
        else:
            times.append((one.segment(), other.segment()))
    ratios = sorted(first / second for first, second in times)
    return {
        "pairs": pairs,
        "seconds": [round(statistics.median(x), 6) for x in zip(*times, strict=True)],
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    """Be the run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("words", type=json.loads)
    given = parser.parse_args()
    from xsake.observability import MetricsFile
    from xsake.training import metrics_logger
    from xsake.training.config import TrainingConfig
    from xsake.training.train import train

    ground = prepare(given.folder)
    own = [f'checkpoint.folder="{given.folder / given.name}"', "checkpoint.save_interval=0"]
    long = ["run.steps=1000000", "optimizer.total_steps=1000000"]
    config = TrainingConfig.read(ground.settings, [*given.words["settings"], *own, *long])
    if given.words["is_bare"]:
        metrics_logger.MetricsFile = lambda path: MetricsFile(None)
    begin = time.perf_counter()

    def pause(progress: Any) -> None:
        nonlocal begin
        seconds = (time.perf_counter() - begin) / config.run.log_interval
        print(json.dumps({"step": progress.done - 1, "seconds": seconds}), flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        begin = time.perf_counter()

    train(config, on_progress=pause)


if __name__ == "__main__":
    main()
