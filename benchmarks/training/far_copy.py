"""Does an attention learn to copy from afar? A small decoder, trained on passages that come twice.

python -m benchmarks.training.far_copy            # dense, window, NSA, MSA and MoBA, three seeds
python -m benchmarks.training.far_copy --sides native --seeds 0 --steps 300 --no-save

A sequence is filler, a mark, a passage of drawn symbols, filler, the mark, and the passage again.
The window is too short to reach the first copy, even layer upon layer. Accuracy is that of the most
probable token over the second copy, on sequences that were never trained on. A run ends when it has
learnt the task. Rows go to results/training/far_copy.jsonl.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training.openwebtext import RESULTS
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.training.attention import make_attention
from xsake.training.config import TrainingConfig
from xsake.training.state import (
    ModelDefinition,
    TrainState,
    build_optimizer,
    define_model,
    init_state,
)
from xsake.training.step import make_step

CONTEXT, PASSAGE, FREE = 128, 40, 8  # the first copy begins within the first FREE tokens
SYMBOLS, FILLERS = 48, 1  # a passage has each symbol once: what comes next is never in doubt
MARK = SYMBOLS + FILLERS
WINDOW, LAYERS = 16, 2
BATCH, TESTED = 32, 64
EVALUATE_EVERY, ENOUGH = 100, 0.995
SIDES = ("dense", "window", "native", "msa", "moba")
NATIVE = {"length": 8, "stride": 4, "size": 8, "count": 8, "window": WINDOW}
INDEXERS = {
    "msa": {"blocks": {"size": 8, "count": 8}, "dim": 16},
    "moba": {"blocks": {"size": 8, "count": 8, "pooling": "mean"}, "dim": None},
}


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    """Sequences [count, CONTEXT + 1] with a passage twice.

    Example:
        >>> tokens = drawn(np.random.default_rng(0), 3)
        >>> begin = int((tokens[0] == MARK).argmax())
        >>> bool((tokens[0, begin + 1 : begin + 1 + PASSAGE] == tokens[0, -PASSAGE:]).all())
        True
    """
    tokens = rng.integers(SYMBOLS, SYMBOLS + FILLERS, (count, CONTEXT + 1)).astype(np.int32)
    passages = rng.permuted(np.tile(np.arange(SYMBOLS), (count, 1)), axis=1)[:, :PASSAGE]
    for row, passage, begin in zip(tokens, passages, rng.integers(0, FREE, count), strict=True):
        for place in (begin, CONTEXT - PASSAGE):
            row[place] = MARK
            row[place + 1 : place + 1 + PASSAGE] = passage
    return tokens


def config_of(side: str, seed: int, steps: int) -> TrainingConfig:
    """A run; nothing is read from its folders."""
    decoder: dict[str, Any] = {
        "vocab_size": MARK + 1, "width": 64, "mlp_width": 192, "layers": LAYERS, "q_heads": 4,
        "kv_heads": 2, "head_dim": 16, "context": CONTEXT,
    }  # fmt: skip
    attention: dict[str, Any] = {}
    if side == "native":
        decoder["native_sparse"], attention = NATIVE, {"kind": "native_sparse"}
    if side in INDEXERS:
        decoder["indexer"], attention = INDEXERS[side], {"kind": "indexed"}
    if side == "window":
        attention = {"kind": "mask", "mask": f"window({WINDOW - 1}, 0)"}
    return TrainingConfig.from_dict({
        "model": {"decoder": decoder, "compute_dtype": "float32"},
        "data": {"folder": "drawn", "context": CONTEXT, "batch": BATCH},
        "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": min(50, steps // 2)},
        "attention": attention,
        "checkpoint": {"folder": "none"},
        "run": {"steps": steps, "seed": seed},
    })  # fmt: skip


def trained(side: str, seed: int, steps: int) -> dict[str, Any]:
    """The row of one run: accuracy of the second copy as it was learnt, and the last loss."""
    config = config_of(side, seed, steps)
    definition = define_model(config)
    attend = make_attention(config.attention, config.model.decoder).attends[0]
    step = make_step(config, definition, build_optimizer(config, definition), attend)
    state: TrainState = init_state(config)
    batches, tests = np.random.default_rng(seed), drawn(np.random.default_rng(10**6), TESTED)

    @jax.jit
    def accuracy_of(parameters, tokens):
        return _accuracy(definition, parameters, tokens, attend)

    curve, losses, begin = [], [], time.monotonic()
    for number in range(1, steps + 1):
        state, metrics = step(state, drawn(batches, BATCH))
        losses.append(metrics.loss)
        if number % EVALUATE_EVERY == 0 or number == steps:
            accuracy = float(accuracy_of(state.parameters, tests))
            curve.append([number, round(accuracy, 4)])
            passed = time.monotonic() - begin
            loss = float(losses[-1])
            print(f"{side} {seed} {number}: loss {loss:.3f}, copied {accuracy:.3f}, {passed:.0f} s",
                  flush=True)  # fmt: skip
            if accuracy >= ENOUGH:
                break
    return {
        "side": side, "seed": seed, "steps": number, "accuracy": curve[-1][1], "curve": curve,
        "loss_every_20": [round(float(x), 4) for x in losses[::20]],
        "seconds": round(time.monotonic() - begin, 1),
        "parameters": sum(x.size for x in jax.tree.leaves(state.parameters)),
    }  # fmt: skip


def _accuracy(definition: ModelDefinition, parameters, tokens, attend):
    model = definition.merge(parameters)
    logits = model.logits(model.hidden(tokens[:, :-1], attend=attend))
    is_right = logits.argmax(-1) == tokens[:, 1:]
    return is_right[:, -PASSAGE:].mean(dtype=jnp.float32)


def main() -> None:
    """Train every side with every seed; rows are written as runs end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=2000, help="at most")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    head = {
        "context": CONTEXT, "passage": PASSAGE, "window": WINDOW, "layers": LAYERS,
        "native": NATIVE, "indexers": INDEXERS, "batch": BATCH, "tested_sequences": TESTED,
        "most_steps": asked.steps,
        "environment": dataclasses.asdict(environment(checkout_root())),
    }  # fmt: skip
    rows = [head]
    for seed in map(int, asked.seeds.split(",")):
        for side in asked.sides.split(","):
            rows.append(trained(side, seed, asked.steps))
            if asked.save:
                _write(RESULTS / "far_copy.jsonl", rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
