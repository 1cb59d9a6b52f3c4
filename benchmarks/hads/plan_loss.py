"""A plan that was calibrated on shorter texts, read at 8192 tokens beside windows of equal cost.

python -m benchmarks.hads.longer                               # 4 test documents, plan_4096_32.json
python -m benchmarks.hads.longer --plan plan_4096_64.json --tests 2

A plan promises shares of blocks, so it serves any length. Layers see what the sparse layers before
them left. Answers are kept, so that a run that is stopped goes on; rows go to
results/hads/longer_<context>_<block>.jsonl.
"""

import argparse
import dataclasses
import json

from benchmarks.experiment import RESULTS
from benchmarks.hads.beside import Beside, of_windows, questions
from benchmarks.hads.capture import CACHE
from benchmarks.hads.corpus import documents
from benchmarks.hads.end_to_end import BEST
from benchmarks.hads.ruled import Ruled
from benchmarks.smollm2 import directory
from xsake.bench.environment import environment, own_checkout
from xsake.bench.whole_file import write_whole
from xsake.evaluation.journal import Journal
from xsake.hads import Planned, SparsityPlan
from xsake.hads.rules import RULES
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

WINDOWS = ("sliding_window", "a_shape")


def main() -> None:
    """Ask what has not been answered yet and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="plan_4096_32.json", help="a file of results/hads")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tests", type=int, default=4, help="test documents, the first so many")
    asked = parser.parse_args()
    folder = directory()
    plan = SparsityPlan.load(RESULTS / "hads" / asked.plan)
    effective = plan.budget + plan.selector.cost
    side = Beside(load(folder).model)
    side.add(BEST, Planned(plan))
    for name in WINDOWS:
        layers = side.model.config.layers
        side.add_rule(name, Ruled(RULES[name](), effective, block=plan.block, layers=layers))
    trials = questions(
        documents(Tokenizer.load(folder)), asked.context, asked.tests, has_copies=False
    )
    journal, answers = Journal(CACHE / "longer.jsonl"), {}
    chosen = plan.model_dump(mode="json")  # its file has a date; what it chooses does not
    chosen = [chosen[name] for name in ("heads", "scope", "components", "selector")]
    for question in trials:
        for name in (BEST, *WINDOWS):
            known = [name, effective, plan.block, chosen if name == BEST else None]
            entry = side.answer(name, question.trial, known, journal)
            answers.setdefault(name, []).append((question.trial, entry))
        _write(asked, plan, answers)


def _write(asked: argparse.Namespace, plan: SparsityPlan, answers: dict[str, list]) -> None:
    here = dataclasses.asdict(environment(own_checkout()))
    rows = [
        {"plan": asked.plan, "calibrated_tokens": plan.calibration.context, "environment": here}
    ]
    for name, windows in answers.items():
        cost = plan.selector.cost if name == BEST else 0.0
        rows.append({
            "context": asked.context, "block": plan.block, "rule": name,
            "budget": round(plan.budget + plan.selector.cost - cost, 6),
            "effective": round(plan.budget + plan.selector.cost, 6), **of_windows(windows),
        })  # fmt: skip
    path = RESULTS / "hads" / f"longer_{asked.context}_{plan.block}.jsonl"
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows[1:]:
        gap, kl = row["perplexity_gap"], row["kl"]["value"]
        told = " ".join(f"{x:+.2%}" for x in gap.values() if isinstance(x, float))
        print(f"{row['rule']}: {row['documents']} documents, gap {told}, KL {kl:.4f}", flush=True)


if __name__ == "__main__":
    main()
