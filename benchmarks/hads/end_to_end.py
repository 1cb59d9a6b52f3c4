"""What a model loses with each rule at equal effective cost: perplexity, divergence, far copies.

python -m benchmarks.hads.end_to_end --context 4096 --tests 12     # after benchmarks.hads.capture
python -m benchmarks.hads.end_to_end --context 8192 --block 128 --tests 4 --no-far-copy \\
    --rules 'hads, by effect;sliding_window;a_shape;flexprefill'

Every layer sees what the sparse layers before it left: errors propagate. Answers are kept, so that
an interrupted run resumes; rows go to results/hads/end_to_end_<context>_<block>.jsonl.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.baselines import RULES
from benchmarks.hads.capture import CACHE
from benchmarks.hads.compare import Asked, ModelComparison, of_copies, of_windows, questions
from benchmarks.hads.corpus import documents
from benchmarks.hads.ladder import ENTRIES, RESULTS, Ladder
from benchmarks.hads.ladder import Entry as Rung
from benchmarks.hads.ruled import Ruled
from benchmarks.peers.models import directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.cli.calibrate import COPIED_DOCUMENTS, EFFECT_DOCUMENTS
from xsake.evaluation.record import CachedResult, ResultCache
from xsake.evaluation.trial import Trial
from xsake.hads import make_plan, make_policy
from xsake.hads.selectors import Sampled
from xsake.hads.sparse_attention import PlanAttention
from xsake.model import Decoder
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

BEST = "hads, by effect"
OURS = tuple(entry for entry in ENTRIES if entry.name in ("hads", BEST))
EFFECTIVE = 0.3
# First those that the claims name, so that a run cut short has them.
FIRST = (BEST, "hads", "sliding_window", "a_shape", "ada_kv", "sparge", "flexprefill", "minference",
         "xattention_16", "vertical_slash", "oracle_model")  # fmt: skip
SKIPPED = ("oracle_rows", "entropy_original_literal", "xattention_8_top_k", "xattention_8_top_p",
           "xattention_16_top_k", "xattention_16_top_p")  # fmt: skip


class Course(ModelComparison):
    """The model with every rule, compared with dense attention.

    Args:
        ladder: prepared: its rules have watched the calibration documents.
        model: the decoder.
    """

    def __init__(self, ladder: Ladder, model: Decoder):
        super().__init__(model)
        self.ladder = ladder
        self.plans = {entry.name: self._plan(entry) for entry in OURS}
        for name, plan in self.plans.items():
            self.add(name, PlanAttention(plan))
        layers = model.config.layers
        for name, rule in ladder.rules.items():
            self.add_rule(name, Ruled(rule, EFFECTIVE, block=ladder.block, layers=layers))

    def _plan(self, entry: Rung):
        """Our plan: its blocks and its selector together cost what is asked."""
        profile, policy = self.ladder.profile, make_policy(entry.policy)
        cost = make_plan(profile, policy, EFFECTIVE, Sampled()).selector.cost
        return make_plan(profile, policy, EFFECTIVE - cost, Sampled())


def main() -> None:
    """Ask what has not been answered yet and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--tests", type=int, default=12, help="maximum number of test documents")
    parser.add_argument("--far-copy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rules", help="names with semicolons; default: all but variants")
    parser.add_argument("--effects", type=int, default=EFFECT_DOCUMENTS, help="documents")
    parser.add_argument("--copies", type=int, default=COPIED_DOCUMENTS, help="of those documents")
    asked = parser.parse_args()
    folder = directory()
    corpus = documents(Tokenizer.load(folder))
    others = [name for name in RULES if name not in (*FIRST, *SKIPPED)]
    groups = [asked.rules.split(";")] if asked.rules else [FIRST, others]
    named = [name for group in groups for name in group if name in RULES]
    ladder = Ladder(
        asked.context, asked.block, corpus, named, OURS, effects=asked.effects, copies=asked.copies
    )
    ladder.prepare()
    course = Course(ladder, load(folder).model)
    trials = questions(corpus, asked.context, asked.tests, has_copies=asked.far_copy)
    journal = ResultCache(CACHE / "end_to_end.jsonl")
    answers: dict[str, list[tuple[Asked, CachedResult]]] = {}
    plan_file = RESULTS / "hads" / f"plan_{asked.context}_{asked.block}.json"
    atomic_write(plan_file, course.plans[BEST].to_json())
    for group in groups:
        for question in trials:
            for side in group:
                entry = _answered(course, side, question.trial, journal)
                answers.setdefault(side, []).append((question, entry))
            _write(ladder, answers)


def _answered(course: Course, side: str, trial: Trial, journal: ResultCache) -> CachedResult:
    rules = course.ladder
    # A plan's file has a date; what it chooses does not.
    plan = course.plans[side].model_dump(mode="json") if side in course.plans else {}
    plan = {name: plan.get(name) for name in ("heads", "scope", "components", "selector")}
    base = [side, EFFECTIVE, rules.context, rules.block, plan]
    return course.answer(side, trial, base, journal)


def _write(ladder: Ladder, answers: dict[str, list]) -> None:
    """Return the rows of these rules, and earlier rows of others."""
    here = environment(checkout_root())
    path = RESULTS / "hads" / f"end_to_end_{ladder.context}_{ladder.block}.jsonl"
    rows = []
    for side, pairs in answers.items():
        windows = [(a.trial, e) for a, e in pairs if a.gap is None]
        rows.append({
            "context": ladder.context, "block": ladder.block, "rule": side,
            "budget": round(EFFECTIVE - ladder.cost(side), 6), "effective": EFFECTIVE,
            **of_windows(windows), "far_copy": of_copies(pairs), "commit": here.commit,
        })  # fmt: skip
    head = {"effective": EFFECTIVE, "environment": dataclasses.asdict(here)}
    rows += [row for row in _known(path) if row["rule"] not in answers]
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in [head, *rows]))


def _known(path: Path) -> list[dict]:
    if not path.exists():
        return []
    head, *rows = map(json.loads, path.read_text().splitlines())
    return [{"commit": head["environment"]["commit"], **row} for row in rows]


if __name__ == "__main__":
    main()
