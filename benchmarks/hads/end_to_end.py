"""What a model loses with sparse attention in all layers: plans and published rules at equal work.

python -m benchmarks.hads.end_to_end --plans plan_4096_32,plan_8192_64_35 --context 8192
python -m benchmarks.hads.end_to_end --rules all --work 15,20,30,40,50   # the ladder, 4096 tokens
python -m benchmarks.hads.end_to_end --rules quest --split fresh --documents 8

Every layer computes on what the sparse layers before it produced: errors propagate. One row per
document in results/hads/end_to_end.jsonl; documents that have a row are not measured again, so an
interrupted run resumes. Work counts computed blocks and their selection, relative to dense causal
attention. Means of plans over documents go to results/hads/plan_loss.jsonl.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.baselines import RULES, RuleScope
from benchmarks.baselines.token_columns import TokenColumns
from benchmarks.experiments.common import RESULTS
from benchmarks.hads.compare import ModelComparison, summarize
from benchmarks.hads.corpus import COUNTS, Document
from benchmarks.hads.plans import corpus_of, measure
from benchmarks.hads.ruled import Rule, RuleAttention, RuleCalibration
from benchmarks.peers.models import MODELS, SMOLLM2, directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.cli.load import load_eval_model
from xsake.evaluation import EvalModel
from xsake.hads import PlanAttention, SparsityPlan, make_plan, make_policy
from xsake.hads.selectors import Sampled

ROWS = RESULTS / "hads" / "end_to_end.jsonl"
MEANS = RESULTS / "hads" / "plan_loss.jsonl"
OURS = "hads"
TOKEN_COLUMNS = TokenColumns().name
PUBLISHED = ("a_shape", "quest", TOKEN_COLUMNS, "flexprefill", "xattention_16", "sparge_top_k")
KEY = ("model", "side", "work", "context", "block", "split", "document")


class Side(NamedTuple):
    """Something that is compared with dense attention.

    Args:
        name: of a plan's file or a rule.
        work: share of dense attention that it was given.
        block: tokens of a block.
        source: digest of the plan's choices; empty for rules.
        attend: the attention function.
    """

    name: str
    work: float
    block: int
    source: str
    attend: Any


def read_rows(path: Path = ROWS) -> list[dict]:
    """Return committed rows; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan_side(name: str, plan: SparsityPlan) -> Side:
    """Return the side of a plan."""
    work = round(plan.budget + plan.selector.cost, 4)
    return Side(name, work, plan.block, plan.calibration.profile[:16], PlanAttention(plan))


def plan_sides(given: argparse.Namespace) -> Iterator[Side]:
    """Yield the sides of the plan files that were named."""
    for name in filter(None, given.plans.split(",")):
        yield plan_side(name, SparsityPlan.load(RESULTS / "hads" / f"{name}.json"))


def ladder_sides(given: argparse.Namespace, model: EvalModel) -> Iterator[Side]:
    """Calibrate our plans and the rules, and yield one side per share of work."""
    named = [OURS, *PUBLISHED] if given.rules == "all" else given.rules.split(",")
    works = [float(x) / 100 for x in given.work.split(",")]
    if OURS in named:
        profile, selector = measure(given, model), Sampled()
        cost = selector.spec(given.context, given.block, profile.model.head_dim).cost
        for work in works:
            plan = make_plan(profile, make_policy("effect"), round(work - cost, 6), selector)
            yield plan_side(OURS, plan)
    rules = {name: _make_rule(name) for name in named if name != OURS}
    levels = _calibrate_rules(rules, works, given, model)
    for (name, rule), (place, work) in itertools.product(rules.items(), enumerate(works)):
        level = levels[name][place] if name in levels else None
        attend = RuleAttention(rule, work, block=given.block, level=level)
        yield Side(name, work, given.block, "", attend)


def _make_rule(name: str) -> Rule:
    return TokenColumns() if name == TOKEN_COLUMNS else RULES[name]()


def _calibrate_rules(
    rules: dict[str, Rule], works: list[float], given: argparse.Namespace, model: EvalModel
) -> dict[str, list[float]]:
    """Show the calibration documents to rules; return the thresholds of those that have one."""
    competing = {name: rule for name, rule in rules.items() if rule.scope is RuleScope.MODEL}
    if not {TOKEN_COLUMNS, *competing} & {*rules}:
        return {}
    calibration = RuleCalibration([*rules.values()], given.block)
    chosen = [x for x in corpus_of(given.model, model) if x.split == "calibration"]
    for document in chosen[: given.documents_of_rules]:
        begin = time.monotonic()
        model.model.hidden(document.tokens[None, : given.context], attend=calibration)
        seconds = time.monotonic() - begin
        print(f"  rules observed {document.name}: {seconds:.0f} s", flush=True)
    calibration.finish()
    return {name: calibration.levels(rule, works) for name, rule in competing.items()}


def main() -> None:
    """Measure the documents without a row and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default=SMOLLM2)
    parser.add_argument("--plans", default="", help="files of results/hads, with commas")
    parser.add_argument("--rules", default="", help="names with commas, or all")
    parser.add_argument("--work", default="15,20,30,40,50", help="percent, of rules")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block, for rules")
    parser.add_argument("--split", choices=[*COUNTS], default="test")
    parser.add_argument("--tests", type=int, default=24, help="maximum number of test documents")
    parser.add_argument("--documents", type=int, default=12, help="of our calibration")
    parser.add_argument("--effects", type=int, default=6, help="of those, with gradients")
    parser.add_argument("--documents-of-rules", type=int, default=12, help="of their calibration")
    given = parser.parse_args()
    model = load_eval_model(directory(given.model), "float32")
    corpus = corpus_of(given.model, model)
    tests = [x for x in corpus if x.split == given.split and len(x.tokens) >= given.context]
    sides = [*plan_sides(given), *(ladder_sides(given, model) if given.rules else ())]
    comparison = ModelComparison(model.model)
    for side in sides:
        is_compiled = not isinstance(side.attend, RuleAttention)
        comparison.add(_label(side), side.attend, is_compiled=is_compiled)
    for document in tests[: given.tests]:
        for side in sides:
            _measure(given, comparison, side, document)
    _write_means(sides, given)


def _label(side: Side) -> str:
    return f"{side.name} {side.work:.0%} {side.block}"


def _measure(
    given: argparse.Namespace, comparison: ModelComparison, side: Side, document: Document
) -> None:
    """Append the row of a document, unless there is one."""
    row = {
        "model": given.model, "side": side.name, "work": side.work, "context": given.context,
        "block": side.block, "split": given.split, "document": document.name,
        "kind": document.kind, "source": side.source,
    }  # fmt: skip
    known = read_rows()
    if any(row.items() <= x.items() for x in known):
        return
    begin = time.monotonic()
    if isinstance(side.attend, RuleAttention):
        side.attend.pairs = side.attend.visible = 0
    losses = comparison.losses(_label(side), document.tokens[: given.context])
    measured = side.work
    if isinstance(side.attend, RuleAttention):
        dim = comparison.model.config.head_dim
        measured = side.attend.measured_work(given.context, dim)
    here = environment(checkout_root())
    row |= {"measured_work": round(measured, 5), "losses": losses}
    row |= {"seconds": round(time.monotonic() - begin, 1), **here.fields("utc", "commit")}
    key = [row[name] for name in KEY]
    kept = [x for x in known if [x[name] for name in KEY] != key]
    atomic_write(ROWS, "".join(json.dumps(x) + "\n" for x in [*kept, row]))
    kl, gap = losses["all"]["kl"], losses["all"]["nll"] - losses["all"]["dense_nll"]
    said = f"measured work {measured:.3f}, KL {kl:.4f}, {gap:+.4f} nats, {row['seconds']:.0f} s"
    print(f"{_label(side)}, {document.name}: {said}", flush=True)


def select(rows: list[dict], **fields: Any) -> list[dict]:
    """Return the rows with these fields."""
    return [row for row in rows if fields.items() <= row.items()]


def _write_means(sides: list[Side], given: argparse.Namespace) -> None:
    """Replace the means of the plans that were measured."""
    here, made, rows = environment(checkout_root()), [], read_rows()
    for side in sides:
        if not isinstance(side.attend, PlanAttention) or side.name == OURS:
            continue
        own = select(rows, model=given.model, side=side.name, context=given.context,
                     split=given.split, source=side.source)  # fmt: skip
        made.append({
            "model": given.model, "plan": side.name, "policy": side.attend.plan.policy.name,
            "block": side.block, "rule": "plan", "effective": side.work, "context": given.context,
            "split": given.split, **summarize([row["losses"] for row in own]),
            "names": [row["document"] for row in own],
            **here.fields("utc", "commit", "versions"),
        })  # fmt: skip
        gap, kl = (made[-1][name]["value"] for name in ("perplexity_gap", "kl"))
        print(f"{side.name}: {len(own)} documents, perplexity {gap:+.2%}, KL {kl:.4f}")
    key = lambda row: [row[name] for name in ("plan", "rule", "context", "split")]
    known = [key(row) for row in made]
    kept = [row for row in read_rows(MEANS) if key(row) not in known]
    ordered = sorted([*kept, *made], key=key)
    atomic_write(MEANS, "".join(json.dumps(row) + "\n" for row in ordered))


if __name__ == "__main__":
    main()
