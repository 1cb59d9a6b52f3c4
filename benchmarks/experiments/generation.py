"""SmolLM2 reads a prompt and generates: the native kernels, the backend `xla`, and transformers.

python -m benchmarks.experiments.generation  # needs the model: benchmarks.peers.models
python -m benchmarks.experiments.generation --quick

Each side generates one token and many; the difference is decoding.
"""

import contextlib
import tempfile
import uuid
from pathlib import Path

import numpy as np

from benchmarks.experiments.common import Outcome, Settings, command, plain_row
from benchmarks.hads.corpus import documents
from benchmarks.peers.client import Worker
from benchmarks.peers.models import directory
from benchmarks.peers.recipes import built_interpreter
from xsake.benchmarking import BenchmarkRow, Shape, Spread, TimedSide, interleave
from xsake.benchmarking.rows import Ratio, TimingStats
from xsake.benchmarking.runner import pair_ratio
from xsake.model.tokenizer import Tokenizer

SIDES = {"xsake": None, "xsake.xla": None, "transformers": "transformers"}
PROMPTS, NEW, MOST_ROUNDS = (8127, 2048), 64, 5  # a prompt and its tokens are at most 8192


def smollm2_shape(q_tokens: int, kv_tokens: int) -> Shape:
    """Shape of a layer's attention."""
    return Shape(q_tokens=q_tokens, kv_tokens=kv_tokens, q_heads=9, kv_heads=3, head_dim=64)


def measure(settings: Settings) -> Outcome:
    """Every prompt length: seconds until the first token, and of the tokens after it."""
    model = directory(peers_dir=settings.peers_dir)
    text = next(x for x in documents(Tokenizer.load(model)) if x.split == "test")
    rows = []
    for prompt in (512,) if settings.is_quick else PROMPTS:
        rows += _race(model, text.tokens[None], prompt, settings)
    return rows, []


def _race(model: Path, tokens: np.ndarray, prompt: int, settings: Settings) -> list[BenchmarkRow]:
    rounds, run = min(settings.rounds, MOST_ROUNDS), uuid.uuid4().hex[:12]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        np.save(Path(folder, "tokens.npy"), tokens)
        workers, answers, sides = {}, {}, []
        for side, environment in SIDES.items():
            adapter = "generation_worker" if environment is None else "transformers_worker"
            python = built_interpreter(environment, settings.peers_dir)
            worker = Worker(
                python, adapter, threads=settings.threads, is_isolated=environment is not None
            )
            workers[side] = stack.enter_context(worker)
            worker.load(Path(folder))
            for new in (1, 1 + NEW):
                case = {"model": str(model), "call": side, "prompt": prompt, "new": new}
                worker.compile(f"{new}", case)
                answers[side] = worker.check(f"{new}")["tokens"]
                time_it = lambda worker=worker, new=new: worker.run(f"{new}")
                sides.append(TimedSide(f"{side} {new}", time_it))
        times = interleave(sides, rounds=rounds, warmup=0)
        versions = {side: worker.versions for side, worker in workers.items()}
    seconds = {
        ("first token", side): times[f"{side} 1"] for side in SIDES
    } | {
        (f"{NEW} tokens", side): [
            more - first
            for more, first in zip(times[f"{side} {1 + NEW}"], times[f"{side} 1"], strict=True)
        ]
        for side in SIDES
    }  # fmt: skip
    agreed = {side: int((answers[side] == answers["transformers"]).sum()) for side in SIDES}
    return [
        plain_row(
            "generation", run,
            smollm2_shape(prompt if what == "first token" else 1, prompt),
            settings, side=f"{side}, {what}", implementation=f"SmolLM2-135M with {side}",
            mask="causal", layout="none", versions=versions[side], repeats=rounds,
            seconds=TimingStats(**vars(Spread.of(taken))),
            counts={"new_tokens": 1 + NEW, "tokens_as_transformers": agreed[side]},
            ratios=tuple(
                Ratio(
                    baseline=f"{other}, {what}",
                    **vars(pair_ratio(taken, seconds[what, other])),
                )
                for other in SIDES
                if other != side
            ),
        )
        for (what, side), taken in seconds.items()
    ]  # fmt: skip


if __name__ == "__main__":
    command("generation", measure, __doc__)
