"""Cost of the training loop relative to its bare compiled step: data, metrics, progress.

python -m benchmarks.training.loop_cost --data TOKENS

The loop runs as `xsake train` does. After every progress event, the bare step runs as often on
tokens that lie on the device already: both sides alternate in one process. No segment contains a
save or an evaluation. Rows go to results/training/loop_cost.jsonl.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.training.openwebtext import RESULTS, build_corpus, config_of
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.benchmarking.training_step import TimedStep
from xsake.training.config import TrainingConfig
from xsake.training.train import train

SEGMENT, SEGMENTS = 10, 9  # the first segment warms up


def main() -> None:
    """Run both sides and write the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of tokens, made if absent")
    asked = parser.parse_args()
    build_corpus(asked.data)
    with tempfile.TemporaryDirectory() as name:
        config = _config(asked.data, Path(name))
        bare = TimedStep(config)
        loop_side: list[float] = []
        bare_side: list[float] = []
        left = [0.0]

        def show(progress) -> None:
            # One step is under way here and is waited for: so the loop's segment has one less.
            if left[0]:
                loop_side.append((time.perf_counter() - left[0]) / (SEGMENT - 1))
            bare.seconds(1)
            bare_side.append(bare.seconds(SEGMENT))
            ratio = bare_side[-1] / loop_side[-1] if loop_side else float("nan")
            print(f"step {progress.done - 1}: bare / loop {ratio:.4f}", flush=True)
            left[0] = time.perf_counter()

        train(config, on_progress=show)
    _write(config, np.array(loop_side[1:]), np.array(bare_side[1:]))


def _config(data: Path, folder: Path) -> TrainingConfig:
    steps = SEGMENT * SEGMENTS
    config = config_of(folder, "dense", 0, steps, 8).model_dump()
    config["data"]["folder"] = data
    config["checkpoint"]["save_interval"] = 0
    config["run"] |= {"log_interval": SEGMENT, "eval_interval": 0}
    return TrainingConfig.from_dict(config)


def _write(config: TrainingConfig, loop: np.ndarray, bare: np.ndarray) -> None:
    # A bare segment lies between two of the loop: it is compared with the one before it.
    ratios = np.sort(bare[: len(loop)] / loop)
    row = {
        "tokens_of_a_step": config.data.batch * config.data.context,
        "bare_seconds": round(float(np.median(bare)), 5),
        "loop_seconds": round(float(np.median(loop)), 5),
        "throughput": round(float(np.median(ratios)), 4),
        "throughput_from": round(float(ratios[0]), 4),
        "throughput_to": round(float(ratios[-1]), 4),
        "segments": len(ratios), "steps_of_a_segment": SEGMENT,
        "environment": dataclasses.asdict(environment(checkout_root())),
    }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    atomic_write(RESULTS / "loop_cost.jsonl", json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
