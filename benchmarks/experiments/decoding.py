"""Decoding steps of SmolLM2: dense, by a plan, by transformers, and by an earlier commit.

python -m benchmarks.experiments.decoding  # needs the model: benchmarks.peers.models
python -m benchmarks.experiments.decoding --tokens 4096 --quick

The prompt is processed before; all rows of a batch have the same one.
"""

import contextlib
import tempfile
import uuid
from pathlib import Path

import numpy as np

from benchmarks.experiments.commits import checked_out
from benchmarks.experiments.common import RESULTS, Settings, parse_settings, plain_row, report
from benchmarks.experiments.generation import smollm2_shape
from benchmarks.hads.corpus import documents
from benchmarks.hads.decoding import PLAN
from benchmarks.peers.client import Worker
from benchmarks.peers.models import directory
from benchmarks.peers.recipes import built_interpreter
from xsake.benchmarking import BenchmarkRow, Spread, TimedSide, interleave, pair_ratio
from xsake.benchmarking.rows import Ratio, TimingStats
from xsake.model.tokenizer import Tokenizer

PROMPTS, BATCHES, NEW, MOST_ROUNDS = (8127, 1024, 4096), (1, 8), 16, 3
BUDGET = 0.2  # of the pages
EARLIER = "7fb7752"  # 0.1.0; of the longest prompt only
SIDES = ("dense", "plan", "transformers", "0.1.0")


def main() -> None:
    """Measure every prompt length and batch size; rows are saved after each."""
    settings = parse_settings(__doc__)
    model = directory(peers_dir=settings.peers_dir)
    text = next(x for x in documents(Tokenizer.load(model)) if x.split == "test")
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "tokens.npy"), text.tokens[None])
        with checked_out(EARLIER, Path(folder, "earlier")) as earlier:
            for batch in BATCHES:
                for prompt in settings.choose(PROMPTS, quick=512):
                    rows = _race(model, Path(folder), earlier, prompt, batch, settings)
                    report("decoding", (rows, []), settings)


def _race(
    model: Path, folder: Path, earlier: Path, prompt: int, batch: int, settings: Settings
) -> list[BenchmarkRow]:
    plan = {"plan": str(RESULTS / "hads" / f"{PLAN}.json"), "budget": BUDGET}
    answers, workers = {}, {}
    with contextlib.ExitStack() as stack:
        for side in SIDES:
            if side == "0.1.0" and prompt < max(PROMPTS):
                continue
            is_peer = side == "transformers"
            worker = Worker(
                built_interpreter("transformers" if is_peer else None, settings.peers_dir),
                "transformers_worker" if is_peer else "decoding_worker",
                threads=settings.threads, is_isolated=is_peer,
                source=earlier / "src" if side == "0.1.0" else None,
            )  # fmt: skip
            workers[side] = stack.enter_context(worker)
            worker.load(folder)
            case = {"model": str(model), "prompt": prompt, "new": NEW, "batch": batch}
            worker.compile(side, case | (plan if side == "plan" else {}))
            answers[side] = worker.check(side)["tokens"]
        sides = [
            TimedSide(side, lambda worker=worker, side=side: worker.run(side))
            for side, worker in workers.items()
        ]
        times = interleave(sides, rounds=min(settings.rounds, MOST_ROUNDS), warmup=0)
    run = uuid.uuid4().hex[:12]
    return [
        plain_row(
            "decoding", run,
            smollm2_shape(1, prompt).model_copy(update={"batch": batch}),
            settings, side=side, implementation=f"SmolLM2-135M with {side}", mask="causal",
            layout=f"{PLAN}, labels" if side == "plan" else "none",
            budget=BUDGET if side == "plan" else None,
            versions=workers[side].versions, repeats=len(taken),
            seconds=TimingStats(**vars(Spread.of([x / NEW for x in taken]))),
            counts={
                "new_tokens": NEW,
                "tokens_as_dense": int((answers[side][0] == answers["dense"][0]).sum()),
            },
            ratios=tuple(
                Ratio(baseline=other, **vars(pair_ratio(taken, times[other])))
                for other in times
                if other != side
            ),
        )
        for side, taken in times.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
