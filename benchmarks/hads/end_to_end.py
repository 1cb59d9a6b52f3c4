"""What a model loses with each rule at equal effective cost: perplexity, divergence, far copies.

python -m benchmarks.hads.end_to_end --context 4096 --tests 12     # after benchmarks.hads.capture
python -m benchmarks.hads.end_to_end --context 8192 --block 128 --tests 4 --no-far-copy \\
    --rules 'hads, by effect;sliding_window;a_shape;flexprefill'

Every layer sees what the sparse layers before it left: errors propagate. Answers are kept, so that
a run that is stopped goes on; rows go to results/hads/end_to_end_<context>_<block>.jsonl.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.hads.capture import CACHE
from benchmarks.hads.corpus import Document, documents
from benchmarks.hads.ladder import ENTRIES, RESULTS, Ladder
from benchmarks.hads.ladder import Entry as Rung
from benchmarks.hads.ruled import Ruled
from benchmarks.smollm2 import directory
from xsake.bench.environment import environment, own_checkout, source_digest
from xsake.bench.whole_file import write_whole
from xsake.cli.calibrate import COPIED_DOCUMENTS, EFFECT_DOCUMENTS
from xsake.evaluation.bootstrap import estimate
from xsake.evaluation.documents import Document as Text
from xsake.evaluation.far_copy import far_copies
from xsake.evaluation.journal import Entry, Journal
from xsake.evaluation.score import Scores, in_chunks
from xsake.evaluation.trial import Trial, position_spans
from xsake.evaluation.windows import Library
from xsake.hads.attend import Planned
from xsake.hads.making import make_plan, policy_named
from xsake.hads.rules import RULES
from xsake.hads.selectors import Sampled
from xsake.model import Decoder, Dense
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

BEST = "hads, by effect"
OURS = tuple(entry for entry in ENTRIES if entry.name in ("hads", BEST))
EFFECTIVE = 0.3
GAPS = (1024, 2048, 4096)
SAMPLES = 2
CHUNK = 256
SOURCES = (
    "attention", "evaluation/score.py", "hads/attend.py", "hads/budget.py", "hads/choose.py",
    "hads/measure.py", "hads/plan.py", "hads/rules", "hads/selectors", "kernels", "layout", "masks",
    "model",
)  # fmt: skip
# First those that the claims name, so that a run cut short has them.
FIRST = (BEST, "hads", "sliding_window", "a_shape", "ada_kv", "sparge", "flexprefill", "minference",
         "xattention_16", "vertical_slash", "oracle_model")  # fmt: skip
SKIPPED = ("oracle_rows", "entropy_original_literal", "xattention_8_top_k", "xattention_8_top_p",
           "xattention_16_top_k", "xattention_16_top_p")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question: what the model reads, and the gap between copies if it is a far copy."""

    trial: Trial
    gap: int | None


class Course:
    """The model with every rule, beside itself with dense attention.

    Args:
        ladder: prepared: its rules have watched the calibration documents.
        model: the decoder.
    """

    def __init__(self, ladder: Ladder, model: Decoder):
        self.ladder, self.model = ladder, model
        self._read = {"dense": jax.jit(lambda m, t: m.hidden(t, attend=Dense()))}
        self.plans = {entry.name: self._plan(entry) for entry in OURS}
        for name, plan in self.plans.items():
            attend = Planned(plan)
            self._read[name] = jax.jit(lambda m, t, attend=attend: m.hidden(t, attend=attend))
        layers = model.config.layers
        for name, rule in ladder.rules.items():
            ruled = Ruled(rule, EFFECTIVE, block=ladder.block, layers=layers)
            self._read[name] = lambda m, t, ruled=ruled: m.hidden(t, attend=ruled)
        self._dense: tuple[str, jax.Array] | None = None

    def _plan(self, entry: Rung):
        """Our plan: its blocks and its selector together cost what is asked."""
        profile, policy = self.ladder.profile, policy_named(entry.policy)
        cost = make_plan(profile, policy, EFFECTIVE, Sampled()).selector.cost
        return make_plan(profile, policy, EFFECTIVE - cost, Sampled())

    def sums(self, side: str, trial: Trial) -> dict[str, list[float]]:
        """The scores of one side on one trial, summed over its spans."""
        tokens = np.asarray(trial.tokens, np.int32)
        if self._dense is None or self._dense[0] != trial.digest:
            self._dense = trial.digest, self._read["dense"](self.model, tokens[None])[0, :-1]
        hidden = self._dense[1], self._read[side](self.model, tokens[None])[0, :-1]
        found = in_chunks(self.model, hidden, tokens[1:], chunk=CHUNK)
        sums = Scores(*(np.asarray(part) for part in found)).sums(trial.spans)
        assert all(np.isfinite(values).all() for values in sums.values()), f"{side}: {sums}"
        return sums


def questions(corpus: list[Document], context: int, tests: int, *, has_copies: bool) -> list[Asked]:
    """Windows of the first test documents, and far copies made of them."""
    chosen = [x for x in corpus if x.split == "test"][:tests]
    asked = [
        Asked(Trial(x.name, x.name, x.tokens[:context], position_spans(context)), None)
        for x in chosen
    ]
    if has_copies:
        by_name = {x.name: x.tokens for x in chosen}
        library = Library([Text(x.name, x.name) for x in chosen], by_name.__getitem__, 2**31)
        copies, notes = far_copies(library, library.documents, GAPS, samples=SAMPLES)
        assert not notes, notes
        asked += [Asked(copy.trial, copy.gap) for copy in copies]
    return asked


def main() -> None:
    """Ask what has not been answered yet and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--tests", type=int, default=12, help="test documents, the first so many")
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
    ladder = Ladder(asked.context, asked.block, corpus, named, OURS, asked.effects, asked.copies)
    ladder.prepare()
    course = Course(ladder, load(folder).model)
    trials = questions(corpus, asked.context, asked.tests, has_copies=asked.far_copy)
    journal = Journal(CACHE / "end_to_end.jsonl")
    answers: dict[str, list[tuple[Asked, Entry]]] = {}
    plan_file = RESULTS / "hads" / f"plan_{asked.context}_{asked.block}.json"
    write_whole(plan_file, course.plans[BEST].to_json())
    for group in groups:
        for question in trials:
            for side in group:
                entry = _answered(course, side, question.trial, journal)
                answers.setdefault(side, []).append((question, entry))
            _write(ladder, answers)


def _answered(course: Course, side: str, trial: Trial, journal: Journal) -> Entry:
    rules = course.ladder
    # A plan's file has a date; what it chooses does not.
    plan = course.plans[side].model_dump(mode="json") if side in course.plans else {}
    plan = {name: plan.get(name) for name in ("heads", "scope", "components", "selector")}
    base = [side, EFFECTIVE, rules.context, rules.block, plan]
    text = json.dumps([*base, trial.digest, source_digest(*SOURCES)])
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    entry = journal.find(key)
    if entry is None:
        begin = time.monotonic()
        sums = course.sums(side, trial)
        entry = Entry(key=key, seconds=time.monotonic() - begin, sums=sums)
        journal.add(entry)
        print(f"  {side}: {trial.label}: {entry.seconds:.0f} s", flush=True)
    return entry


def _write(ladder: Ladder, answers: dict[str, list]) -> None:
    """The rows of these rules, beside those that earlier runs left of others."""
    here = environment(own_checkout())
    path = RESULTS / "hads" / f"end_to_end_{ladder.context}_{ladder.block}.jsonl"
    rows = []
    for side, pairs in answers.items():
        windows = [(a.trial, e) for a, e in pairs if a.gap is None]
        rows.append({
            "context": ladder.context, "block": ladder.block, "rule": side,
            "budget": round(EFFECTIVE - ladder.cost(side), 6), "effective": EFFECTIVE,
            **_of_windows(windows), "far_copy": _of_copies(pairs), "commit": here.commit,
        })  # fmt: skip
    head = {"effective": EFFECTIVE, "environment": dataclasses.asdict(here)}
    rows += [row for row in _known(path) if row["rule"] not in answers]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in [head, *rows]))


def _known(path: Path) -> list[dict]:
    if not path.exists():
        return []
    head, *rows = map(json.loads, path.read_text().splitlines())
    return [{"commit": head["environment"]["commit"], **row} for row in rows]


def _of_windows(windows: list[tuple[Trial, Entry]]) -> dict:
    names = ("dense_nll", "candidate_nll", "kl", "agreement")
    sums = np.array([
        [len(trial.tokens) - 1, *(sum(entry.sums[name]) for name in names)]
        for trial, entry in windows
    ])  # fmt: skip
    dense, ours, kl, same = (
        lambda x, place=place: x[..., place] / x[..., 0] for place in range(1, 5)
    )
    told = lambda statistic: estimate(statistic, sums, 0).model_dump()
    return {
        "documents": len(windows),
        "perplexity_dense": told(lambda x: np.exp(dense(x))),
        "perplexity": told(lambda x: np.exp(ours(x))),
        "perplexity_gap": told(lambda x: np.exp(ours(x) - dense(x)) - 1),
        "kl": told(kl),
        "agreement": told(same),
    }


def _of_copies(pairs: list[tuple[Asked, Entry]]) -> dict[str, dict[str, float]]:
    """NLL of the second copy, nats per token, mean over the samples, by gap."""
    found = {}
    for gap in GAPS:
        own = [(a.trial.spans[1], e.sums) for a, e in pairs if a.gap == gap]
        if own:
            found[str(gap)] = {
                side: float(np.mean([s[f"{side}_nll"][1] / (b - a) for (a, b), s in own]))
                for side in ("dense", "candidate")
            }
    return found


if __name__ == "__main__":
    main()
