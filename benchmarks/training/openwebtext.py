"""A small GPT on OpenWebText: dense, HADS plans, a window and trained indexers at equal cost, NSA.

python -m benchmarks.training.openwebtext --folder RUNS         # 18 runs; stopped ones resume
python -m benchmarks.training.openwebtext --folder RUNS --draw  # rows and plot of what is there
python -m benchmarks.training.openwebtext --folder RUNS --only dense-0 hads-0   # one of two lanes

Every side of a seed starts from the same weights and reads the same windows in the same order; the
validation loss is that of the attention that was trained. Rows go to
results/training/openwebtext.jsonl, one per run and evaluation.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hads.corpus import TEXTS
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.hads.budget import visible_blocks
from xsake.hads.selectors import Sampled
from xsake.observability import read_metrics
from xsake.reports import plots
from xsake.training.build_data import BuildSettings, NewTokenizer, build
from xsake.training.config import TrainingConfig
from xsake.training.train import RunStatus, train

RESULTS = Path(__file__).resolve().parents[1] / "results" / "training"
CONTEXT, BLOCK, HEAD_DIM = 1024, 32, 32
WINDOW_BLOCKS = 5  # that a row of the window touches
VALIDATION_WINDOWS = 24
SIDES = ("dense", "hads", "window", "msa", "moba", "native")
SEEDS = (0, 1, 2)
NATIVE = {"length": 16, "stride": 8, "size": BLOCK, "count": 6, "window": 128}
# As many blocks as the window touches; MoBA selects by mean keys and has no parameters.
INDEXERS = {
    "msa": {"blocks": {"size": BLOCK, "count": WINDOW_BLOCKS}, "dim": HEAD_DIM},
    "moba": {"blocks": {"size": BLOCK, "count": WINDOW_BLOCKS, "pooling": "mean"}, "dim": None},
}
DECODER = {
    "vocab_size": 8192, "width": 128, "mlp_width": 384, "layers": 4, "q_heads": 4, "kv_heads": 4,
    "head_dim": HEAD_DIM, "context": CONTEXT,
}  # fmt: skip


def window_share() -> float:
    """Blocks of the window / visible blocks: what every sparse side may spend, choosing included.

    Example:
        >>> round(window_share(), 4)
        0.2841
    """
    n = CONTEXT // BLOCK
    return sum(min(row + 1, WINDOW_BLOCKS) for row in range(n)) / visible_blocks(n)


def attention_of(side: str, steps: int) -> dict[str, Any]:
    """The section of a side's configuration."""
    if side == "dense":
        return {}
    if side == "window":
        return {"kind": "mask", "mask": f"window({(WINDOW_BLOCKS - 1) * BLOCK}, 0)"}
    if side == "native":
        return {"kind": "native_sparse"}
    if side in INDEXERS:
        return {"kind": "indexed", "indexer": {"dense_steps": steps // 10}}
    budget = window_share() - Sampled().cost(CONTEXT, BLOCK, HEAD_DIM)
    return {
        "kind": "plan", "budget": round(budget, 6), "block": BLOCK, "policy": "kl",
        "recalibration_interval": steps // 4, "calibration_windows": 4,
    }  # fmt: skip


def config_of(folder: Path, side: str, seed: int, steps: int, batch: int) -> TrainingConfig:
    """One run; indexers and native sparse attention are part of the model."""
    decoder = DECODER | ({"native_sparse": NATIVE} if side == "native" else {})
    if side in INDEXERS:
        decoder["indexer"] = INDEXERS[side]
    return TrainingConfig.from_dict({
        "model": {"decoder": decoder, "compute_dtype": "float32"},
        "data": {"folder": str(folder / "data"), "context": CONTEXT, "batch": batch, "seed": seed},
        "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": steps // 20},
        "attention": attention_of(side, steps),
        "checkpoint": {
            "folder": str(folder / f"{side}-{seed}"), "save_interval": steps // 4, "max_to_keep": 1,
        },
        "run": {
            "name": f"{side}-{seed}", "steps": steps, "seed": seed, "log_interval": 20,
            "eval_interval": steps // 10, "eval_batches": VALIDATION_WINDOWS // batch,
        },
    })  # fmt: skip


def main() -> None:
    """Train what has not been trained yet, then write rows and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of data and runs")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--only", nargs="+", help="these runs, such as dense-0; others are left")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not asked.draw:
        build_corpus(asked.folder / "data")
        # Those of equal cost first, so that a run cut short has them.
        *equal, native = SIDES
        runs = [(side, seed) for seed in SEEDS for side in equal]
        for side, seed in runs + [(native, seed) for seed in SEEDS]:
            if asked.only and f"{side}-{seed}" not in asked.only:
                continue
            _run(config_of(asked.folder, side, seed, asked.steps, asked.batch))
            _write(asked)
    _write(asked)


def build_corpus(folder: Path) -> None:
    """Tokens of OpenWebText in a vocabulary of its own; an earlier build is kept."""
    text = TEXTS / "openwebtext_train_1000docs.txt"
    build(NewTokenizer(DECODER["vocab_size"]), [text], folder, BuildSettings(validation=0.05))


def _run(config: TrainingConfig) -> None:
    done = config.checkpoint.folder / "seconds.json"
    if done.exists():
        return
    begin = time.monotonic()

    def show(progress) -> None:
        left = f"{progress.remaining_seconds:.0f} s to go"
        print(f"{config.run.name} {progress.done}: {progress.label}, {left}", flush=True)

    if train(config, on_progress=show) is RunStatus.STOPPED:
        raise SystemExit(75)
    atomic_write(done, json.dumps(time.monotonic() - begin))


def _write(asked: argparse.Namespace) -> None:
    """All finished runs, and the gaps between them."""
    runs = {}
    for side in SIDES:
        for seed in SEEDS:
            folder = asked.folder / f"{side}-{seed}"
            if (folder / "seconds.json").exists():
                runs[side, seed] = _read(folder)
    if not runs:
        return
    config = config_of(asked.folder, "hads", 0, asked.steps, asked.batch)
    head = {
        "steps": asked.steps, "batch": asked.batch, "context": CONTEXT, "block": BLOCK,
        "decoder": DECODER, "native": NATIVE, "indexers": INDEXERS,
        "window_share": round(window_share(), 6),
        "hads_budget": config.attention.budget, "environment":
        dataclasses.asdict(environment(checkout_root())),
    }  # fmt: skip
    rows = [head, *({"side": side, "seed": seed, **run} for (side, seed), run in runs.items())]
    rows += [_gap(side, runs) for side in SIDES[1:] if any(key[0] == side for key in runs)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    atomic_write(RESULTS / "openwebtext.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    _draw(runs)
    for row in rows[-len(SIDES) + 1 :]:
        print(json.dumps(row), flush=True)


def _read(folder: Path) -> dict[str, Any]:
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    evaluations = [(x["step"], x["validation_loss"]) for x in lines if "validation_loss" in x]
    return {
        "seconds": round(json.loads((folder / "seconds.json").read_text()), 1),
        "validation": [[step, round(loss, 5)] for step, loss in evaluations],
        "loss_every_10": [round(line["loss"], 4) for line in steps[::10]],
        "skipped": sum(line["is_skipped"] for line in steps),
    }


def _gap(side: str, runs: dict) -> dict[str, Any]:
    """Return perplexity relative to dense at the last step, paired by seed, with a t interval."""
    pairs = [seed for seed in SEEDS if (side, seed) in runs and ("dense", seed) in runs]
    last = lambda name, seed: runs[name, seed]["validation"][-1][1]
    gaps = np.array([np.expm1(last(side, seed) - last("dense", seed)) for seed in pairs])
    found = {"gap_of": side, "seeds": pairs, "gaps": [round(float(x), 5) for x in gaps]}
    if len(gaps) == len(SEEDS):
        half = 4.3027 * gaps.std(ddof=1) / np.sqrt(len(gaps))  # t of 2 degrees of freedom, 97.5%
        found |= {"mean": round(float(gaps.mean()), 5), "half_width_95": round(float(half), 5)}
    return found


def _draw(runs: dict) -> None:
    colours = dict(zip(SIDES, (plots.INK, plots.OURS, *plots.SERIES[1:]), strict=False))
    with plots.open_png(RESULTS / "openwebtext.png", (7, 4.2)) as figure:
        axes = figure.subplots()
        for (side, seed), run in runs.items():
            steps, losses = zip(*run["validation"], strict=True)
            style = {"color": colours[side], "label": side if seed == SEEDS[0] else None}
            axes.plot(np.array(steps) + 1, losses, alpha=0.8, lw=1.3, **style)
        axes.set(xlabel="step", ylabel="validation loss, nats per token")
        axes.set_title("OpenWebText, 1024 tokens: attention that was trained, three seeds")
        axes.legend()
        axes.grid()


if __name__ == "__main__":
    main()
