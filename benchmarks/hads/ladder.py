"""The ladder: every rule and every policy at equal exact counts of blocks, on a real model.

python -m benchmarks.hads.ladder --context 4096 --block 64     # after benchmarks.hads.capture
python -m benchmarks.hads.ladder --context 8192 --block 32 --tests 8

Inputs of every layer are those of the dense model: the error of attention alone. Rows go to
results/hads/ladder_<context>_<block>.jsonl, one per (rule, budget), means over the test documents;
an interrupted run resumes at its last document.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.baselines import RULES, LayerSample, RuleScope, SelectionRule
from benchmarks.baselines.rule import Uncalibrated, row_ranks, take_pool
from benchmarks.hads.capture import CACHE, SCALE, Replay, captured
from benchmarks.hads.corpus import Document, documents
from benchmarks.hads.losses import Ballot, Loss, Masses
from benchmarks.peers.models import directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.cli.calibrate import COPIED_DOCUMENTS, EFFECT_DOCUMENTS
from xsake.hads import SparsityPlan, make_plan, make_policy
from xsake.hads.budget import (
    ForcedBlocks,
    apportion,
    row_counts,
    visible_blocks,
)
from xsake.hads.budget import total_blocks as blocks_for
from xsake.hads.calibrate import CalibrationDocument, CalibrationSettings, MassCache, calibrate
from xsake.hads.profile import CalibratedModel, Profile
from xsake.hads.selectors import Antidiagonal, Cumulant, Pooled, Sampled, Selector
from xsake.hads.sparse_attention import PlanAttention
from xsake.hads.topk import BudgetScope as Spread
from xsake.hads.topk import choose
from xsake.masks import Causal
from xsake.model import LayerCall
from xsake.model.tokenizer import Tokenizer

RESULTS = Path(__file__).resolve().parents[1] / "results"
BUDGETS = (0.05, 0.075, 0.092, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
FORCED = ForcedBlocks()
SELECTORS = (Sampled(), Cumulant(), Antidiagonal(), Pooled())


@dataclasses.dataclass(frozen=True)
class Entry:
    """Something that chooses blocks, under the name of its rows.

    With `spread=None` all blocks of the model compete, as they do for published rules of that
    scope; no list of blocks has a fixed size then, so it is a yardstick and not a way to run.
    """

    name: str
    policy: str
    selector: str | None = None
    spread: Spread | None = Spread.ROW


# Ours; every other name of the ladder is a rule of `benchmarks.baselines`.
ENTRIES = (
    Entry("hads", "kl", "sampled", Spread.LAYER),
    Entry("hads, by effect", "effect", "sampled", Spread.ROW),
    Entry("hads, whole model", "kl", "sampled", None),
    Entry("hads, per head", "kl", "sampled", Spread.HEAD),
    Entry("hads, per row", "kl", "sampled", Spread.ROW),
    Entry("uniform, sampled", "uniform", "sampled", Spread.ROW),
    Entry("entropy_budget, sampled", "entropy_budget", "sampled", Spread.ROW),
    Entry("mass, sampled", "mass", "sampled", Spread.LAYER),
    Entry("kl, cumulant", "kl", "cumulant", Spread.LAYER),
    Entry("kl, antidiagonal", "kl", "antidiagonal", Spread.LAYER),
    Entry("kl, pooled", "kl", "pooled", Spread.LAYER),
    Entry("static", "static"),
    Entry("original", "original"),
)


class Ladder:
    """One context and one block size.

    Args:
        context: tokens of every document.
        block: tokens of a block.
        corpus: all documents.
        rules: names of the published rules that are compared.
        entries: ours; only their selectors are calibrated.
        budgets: shares of the blocks; those that do not buy what is always on are left out.
        selectors: one of each name.
        effects: number of documents for effects on predictions.
        copies: number of those that end with a copy of their beginning.
    """

    def __init__(
        self,
        context: int,
        block: int,
        corpus: list[Document],
        rules: Iterable[str] = RULES,
        entries: tuple[Entry, ...] = ENTRIES,
        budgets: Iterable[float] = BUDGETS,
        selectors: tuple[Selector, ...] = SELECTORS,
        effects: int = EFFECT_DOCUMENTS,
        copies: int = COPIED_DOCUMENTS,
    ):
        self.context, self.block, self.n = context, block, context // block
        self.calibration = [x for x in corpus if x.split == "calibration"]
        self.rules = {name: RULES[name]() for name in rules}
        self.entries, self.effects, self.copies = entries, effects, copies
        named = {entry.selector or "sampled" for entry in entries}
        self.selectors = tuple(x for x in selectors if x.name in named)
        least = FORCED.total(self.n) / visible_blocks(self.n)
        self.budgets = [budget for budget in budgets if budget > least]

    def prepare(self) -> None:
        """Calibrate our policies and the rules that learn."""
        self.profile = self._profiled()
        learners = [rule for rule in self.rules.values() if not isinstance(rule, Uncalibrated)]
        for document in self.calibration if learners else ():
            begin = time.monotonic()
            self._watch(document)
            print(f"rules watched {document.name}: {time.monotonic() - begin:.0f} s", flush=True)
        for rule in self.rules.values():
            rule.finish()
        self.plans = {
            (entry.name, budget): self._plan(entry, budget)
            for entry in self.entries
            for budget in self.budgets
        }
        spreads = {entry.name: entry.spread for entry in self.entries}
        self.planned = {
            key: PlanAttention(plan, scope=spreads[key[0]] or Spread.LAYER)
            for key, plan in self.plans.items()
        }
        self._masses = {s.name: self._masses_of(s.name) for s in self.selectors}

    def _masses_of(self, selector: str):
        """What a selector of ours estimates, compiled; the same at every budget."""
        name = next(entry.name for entry in self.entries if entry.selector == selector)
        planned = self.planned[name, self.budgets[-1]]
        look = lambda layer: LayerCall(layer=layer, mask=Causal(), scale=SCALE)
        return jax.jit(lambda q, k, layer: planned.masses(q, k, look(layer)))

    def _profiled(self) -> Profile:
        readings = [CalibrationDocument(d.name, d.tokens[: self.context]) for d in self.calibration]
        q, k = captured(self.calibration[0])
        model = CalibratedModel(
            name="smollm2-135m-instruct", digest="captured", layers=len(q),
            q_heads=q.shape[2], kv_heads=k.shape[2], head_dim=k.shape[3],
        )  # fmt: skip
        asks = any(entry.policy == "effect" for entry in self.entries)
        settings = CalibrationSettings(self.block, FORCED, self.selectors)
        if asks:
            settings = dataclasses.replace(
                settings, effect_documents=self.effects, copied_documents=self.copies
            )
        return calibrate(
            Replay(self.calibration, self.context), model, readings, settings,
            cache=MassCache(CACHE / "masses"),
            on_progress=lambda p: print(f"calibrated {p.done} of {p.total}", flush=True),
        )  # fmt: skip

    def _scenes(self, document: Document, masses: Masses):
        q, k = captured(document)
        heads = q.shape[2]
        for layer in range(len(q)):
            own = slice(layer * heads, (layer + 1) * heads)
            yield LayerSample(
                np.asarray(q[layer, : self.context]), np.asarray(k[layer, : self.context]),
                SCALE, self.block, layer, 0, masses.by_row[own], masses.entropy[own],
            )  # fmt: skip

    def _watch(self, document: Document) -> None:
        masses = Masses(*captured(document), tokens=self.context, block=self.block)
        for scene in self._scenes(document, masses):
            for rule in self.rules.values():
                rule.observe(scene)

    def _plan(self, entry: Entry, budget: float) -> SparsityPlan:
        made = next(x for x in self.selectors if x.name == (entry.selector or "sampled"))
        return make_plan(self.profile, make_policy(entry.policy), budget, made)

    def cost(self, name: str) -> float:
        """Flops of choosing as a share of dense attention's."""
        if name in self.rules:
            return self.rules[name].cost(self.context, self.block, 64)
        plan = self.plans[name, self.budgets[-1]]
        return plan.selector.cost

    def losses(self, document: Document) -> dict[str, dict[float, Loss]]:
        """What every rule and policy loses on a document, at every budget."""
        masses = Masses(*captured(document), tokens=self.context, block=self.block)
        ballot, names = Ballot(len(masses.by_row), self.n), []
        rankings = {name: [] for name in self.rules}
        chosen: dict[tuple[str, float], list] = {key: [] for key in self.plans}
        estimates: dict[str, list] = {selector.name: [] for selector in self.selectors}
        for scene in self._scenes(document, masses):
            for name, rule in self.rules.items():
                rankings[name].append(rule.rank(scene).priority)
            for name, estimate in self._estimates(scene).items():
                estimates[name].append(estimate)
            for key, layer in self._chosen(scene, estimates):
                chosen[key].append(layer)
        for key, whole in self._chosen_anywhere(estimates):
            chosen[key] = [whole]
        for key, layers in chosen.items():
            ballot.add(np.concatenate(layers))
            names.append(key)
        for name, layers in rankings.items():
            priority = np.concatenate(layers)
            taken = self._taken(self.rules[name], priority)
            for budget, choice in zip(self.budgets, taken, strict=True):
                ballot.add(choice)
                names.append((name, budget))
            rankings[name] = []
        found: dict[str, dict[float, Loss]] = {}
        for (name, budget), loss in zip(names, ballot.weigh(masses), strict=True):
            found.setdefault(name, {})[budget] = loss
        return found

    def _estimates(self, scene: LayerSample) -> dict[str, jax.Array]:
        """What our selectors think of one layer's blocks; the same at every budget."""
        q, k = jnp.asarray(scene.q)[None], jnp.asarray(scene.k)[None]
        return {name: masses(q, k, scene.layer) for name, masses in self._masses.items()}

    def _chosen(self, scene: LayerSample, estimates: dict[str, list]):
        """What our plans choose in one layer, by the code that the model runs."""
        call = LayerCall(layer=scene.layer, mask=Causal(), scale=SCALE)
        q, k = jnp.asarray(scene.q)[None], jnp.asarray(scene.k)[None]
        for entry in self.entries:
            keys = [(entry.name, budget) for budget in self.budgets]
            if entry.selector is None:
                found = [self.planned[key].chosen(q, k, call)[0] for key in keys]
            elif entry.spread is not None:
                counts = np.stack([self.planned[key].counts(self.n)[scene.layer] for key in keys])
                found = _choices(estimates[entry.selector][-1], counts, entry.spread)
            else:
                continue
            yield from zip(keys, np.asarray(found), strict=True)

    def _chosen_anywhere(self, estimates: dict[str, list]):
        """What is chosen where all layers share one budget: they count as heads of one layer."""
        for entry in self.entries:
            if entry.spread is None and entry.selector is not None:
                keys = [(entry.name, budget) for budget in self.budgets]
                masses = jnp.concatenate(estimates[entry.selector], axis=1)
                counts = np.stack([self.planned[key].counts(self.n) for key in keys])
                counts = counts.reshape(len(keys), -1, self.n)
                yield from zip(
                    keys, np.asarray(_choices(masses, counts, Spread.LAYER)), strict=True
                )

    def _taken(self, rule: SelectionRule, priority: np.ndarray) -> Iterator[np.ndarray]:
        """For each budget exactly as many blocks as it buys, in the rule's order."""
        heads, n = len(priority), self.n
        none = ForcedBlocks(0, 0)  # a ranking forces its own blocks
        totals = [blocks_for(budget, heads=heads, n=n, forced=FORCED) for budget in self.budgets]
        if rule.scope is RuleScope.MODEL:
            yield from (take_pool(priority, total, none) for total in totals)
            return
        weights = np.ones(heads)
        if rule.scope is RuleScope.HEADS:
            layers = heads // self.profile.model.q_heads
            weights = np.concatenate([rule.shares(layer) for layer in range(layers)])
        least, most = np.full(heads, FORCED.total(n)), np.full(heads, visible_blocks(n))
        places = row_ranks(priority, none)
        for total in totals:
            of_heads = apportion(weights, total, least, most)
            yield places < row_counts(of_heads, n, FORCED)[..., None]


@functools.partial(jax.jit, static_argnames="spread")
def _choices(masses, counts, spread: Spread):
    """`choose` at several budgets: `[budgets, Hq, Nq, Nk]`."""
    return jax.vmap(lambda own: choose(masses, own, forced=FORCED, scope=spread)[0])(counts)


def main() -> None:
    """Measure what is not known yet and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--tests", type=int, default=24, help="maximum number of test documents")
    parser.add_argument("--rules", help="names of published rules, with commas; default: all")
    parser.add_argument("--entries", help="names of ours, with semicolons; default: all")
    parser.add_argument("--budgets", help="shares of the blocks, with commas; default: ten of them")
    parser.add_argument("--sampled", help="queries and components of its selector, such as 2,24")
    asked = parser.parse_args()
    corpus = documents(Tokenizer.load(directory()))
    tests = [x for x in corpus if x.split == "test"][: asked.tests]
    rules = asked.rules.split(",") if asked.rules else RULES
    entries = [] if asked.entries is None else asked.entries.split(";")
    entries = tuple(x for x in ENTRIES if not entries or x.name in entries)
    budgets = [float(x) for x in asked.budgets.split(",")] if asked.budgets else BUDGETS
    selectors, suffix = SELECTORS, ""
    if asked.sampled:
        queries, dims = map(int, asked.sampled.split(","))
        selectors, suffix = (Sampled(queries, dims), *SELECTORS[1:]), f"_sampled_{queries}_{dims}"
    ladder = Ladder(asked.context, asked.block, corpus, rules, entries, budgets, selectors)
    ladder.prepare()
    folder = RESULTS / "hads"
    folder.mkdir(exist_ok=True)
    found = []
    for number, document in enumerate(tests, start=1):
        begin = time.monotonic()
        found.append(ladder.losses(document))
        name, budget = entries[0].name, ladder.budgets[-1]
        text = f"{name} at {budget:.0%} KL {found[-1][name][budget].kl:.4f}"
        taken = time.monotonic() - begin
        print(f"{number} of {len(tests)}: {document.name}: {text}, {taken:.0f} s", flush=True)
        path = folder / f"ladder_{asked.context}_{asked.block}{suffix}.jsonl"
        _write(ladder, tests[:number], found, path)


def _write(ladder: Ladder, tests, found, path: Path) -> None:
    """All rows, whole."""
    here = dataclasses.asdict(environment(checkout_root()))
    rows = []
    for name in found[0]:
        for budget in found[0][name]:
            losses = [one[name][budget] for one in found]
            mean = {
                field.name: round(float(np.mean([getattr(x, field.name) for x in losses])), 6)
                for field in dataclasses.fields(Loss)
            }
            rows.append({
                "context": ladder.context, "block": ladder.block, "rule": name,
                "budget": budget, "effective": round(budget + ladder.cost(name), 6),
                "documents": len(tests), **mean,
                "kl_by_document": [round(x.kl, 5) for x in losses],
            })  # fmt: skip
    head = {
        "documents": [f"{d.kind}: {d.name}" for d in tests],
        "calibration": [f"{d.kind}: {d.name}" for d in ladder.calibration],
        "environment": here,
    }
    text = "".join(json.dumps(row) + "\n" for row in [head, *rows])
    atomic_write(path, text)


if __name__ == "__main__":
    main()
