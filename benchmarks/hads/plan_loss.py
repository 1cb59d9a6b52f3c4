"""Loss of the committed plans, errors propagated through the model: perplexity and next-token KL.

python -m benchmarks.hads.plan_loss  # 8192 tokens, 4 test documents
python -m benchmarks.hads.plan_loss --split fresh --context 4096 --documents 12
python -m benchmarks.hads.plan_loss --plans plan_4096_32 --windows  # and windows of equal cost

A plan holds shares of blocks, so it serves any length. The same plans are timed by
`benchmarks.hads.speed` and `prefill`: a speed and a loss in one sentence belong to one
plan. Answers are kept, so an interrupted run resumes. Rows of other settings stay in
results/hads/plan_loss.jsonl.
"""

import argparse
import json
from pathlib import Path

from benchmarks.baselines import RULES
from benchmarks.experiments.common import RESULTS
from benchmarks.hads.capture import CACHE
from benchmarks.hads.compare import ModelComparison, of_windows, questions
from benchmarks.hads.corpus import COUNTS, documents
from benchmarks.hads.ruled import Ruled
from benchmarks.peers.models import directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.evaluation.record import ResultCache
from xsake.hads import PlanAttention, SparsityPlan
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

PLANS = ("plan_8192_128", "plan_4096_64", "plan_4096_32")
WINDOWS = ("sliding_window", "a_shape")
ROWS = RESULTS / "hads" / "plan_loss.jsonl"


def rows(path: Path = ROWS) -> list[dict]:
    """Return the committed rows; none if the experiment was not run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Answer the open questions and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", default=",".join(PLANS), help="files of results/hads")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a document")
    parser.add_argument("--split", choices=[*COUNTS], default="test")
    parser.add_argument("--documents", type=int, default=4, help="number of documents")
    parser.add_argument("--windows", action="store_true", help="windows that cost as much, too")
    given = parser.parse_args()
    folder = directory()
    model = load(folder).model
    side = ModelComparison(model)
    plans = {x: SparsityPlan.load(RESULTS / "hads" / f"{x}.json") for x in given.plans.split(",")}
    candidates = {}
    for name, plan in plans.items():
        side.add(name, PlanAttention(plan))
        chosen = plan.model_dump(mode="json")  # without the date of its file
        chosen = [chosen[part] for part in ("heads", "scope", "components", "selector")]
        candidates[name] = [name, "plan", _effective(plan), chosen]
        for rule in WINDOWS if given.windows else ():
            label = f"{rule} for {name}"
            ruled = Ruled(
                RULES[rule](), _effective(plan), block=plan.block, layers=model.config.layers
            )
            side.add_rule(label, ruled)
            candidates[label] = [name, rule, _effective(plan), plan.block]
    trials = questions(
        documents(Tokenizer.load(folder)), given.context, given.documents,
        has_copies=False, split=given.split,
    )  # fmt: skip
    journal, answers = ResultCache(CACHE / "plan_loss.jsonl"), {}
    for question in trials:
        for label, known in candidates.items():
            entry = side.answer(label, question.trial, known, journal)
            answers.setdefault(label, []).append((question.trial, entry))
        _write(given, plans, {label: (candidates[label], x) for label, x in answers.items()})


def _effective(plan: SparsityPlan) -> float:
    """Share of dense attention that a plan costs, block selection included."""
    return plan.budget + plan.selector.cost


def _write(given: argparse.Namespace, plans: dict[str, SparsityPlan], answers: dict) -> None:
    here = environment(checkout_root())
    made = []
    for (name, rule, effective, _), windows in answers.values():
        plan = plans[name]
        made.append({
            "plan": name, "policy": plan.policy.name, "block": plan.block, "rule": rule,
            "effective": round(effective, 6), "context": given.context, "split": given.split,
            **of_windows(windows),
            "names": [trial.document for trial, _ in windows],
            **here.fields("utc", "commit", "versions"),
        })  # fmt: skip
        gap = made[-1]["perplexity_gap"]
        print(f"{name}, {rule}: {len(windows)} documents, perplexity {gap['value']:+.2%}, "
              f"KL {made[-1]['kl']['value']:.4f}", flush=True)  # fmt: skip
    key = lambda row: [row[x] for x in ("plan", "rule", "context", "split")]
    known = [key(row) for row in made]
    kept = [row for row in rows() if key(row) not in known]
    ordered = sorted([*kept, *made], key=key)
    atomic_write(ROWS, "".join(json.dumps(row) + "\n" for row in ordered))


if __name__ == "__main__":
    main()
