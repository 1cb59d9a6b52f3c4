"""Proved bounds on dropped mass on a real model: are they ever broken, and are they worth anything?

python -m benchmarks.hads.bounds                   # after benchmarks.hads.capture
python -m benchmarks.hads.bounds --documents 1

Blocks are chosen row by row from sampled masses at one budget; inputs are those of the dense model.
Queries that drop nothing are not counted. results/hads/bounds.json is written after each document.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hads.capture import SCALE, captured
from benchmarks.hads.corpus import documents
from benchmarks.peers.models import directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.hads.budget import ForcedBlocks, row_counts, total_blocks, visible_blocks
from xsake.hads.error_bounds import (
    BlockBounds,
    BoundKind,
    BoundScope,
    audit,
    audited_choice,
    bounded_choice,
    dropped_bound,
    key_reach,
    rounding,
)
from xsake.hads.selectors import Sampled, ScoringContext
from xsake.hads.topk import BudgetScope, choose
from xsake.kernels.statistics import block_statistics
from xsake.model.tokenizer import Tokenizer

RESULTS = Path(__file__).resolve().parents[1] / "results"
LAYERS = (0, 5, 10, 15, 20, 25, 29)
CONTEXT, BLOCK, BUDGET, EPS = 4096, 64, 0.3, 0.1
RUNS = (64, 16, 8)
EVERY = 16
FORCED = ForcedBlocks()
SELECTOR = Sampled(queries=2, dims=64)


@dataclasses.dataclass
class Tally:
    """What is known of one layer of one document, or of many together."""

    true: list[np.ndarray] = dataclasses.field(default_factory=list)  # of queries that drop
    bounds: dict[tuple[int, str], list[np.ndarray]] = dataclasses.field(default_factory=dict)
    excess: dict[tuple[int, str], list[np.ndarray]] = dataclasses.field(default_factory=dict)
    blocks: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # of those visible
    worst: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # true dropped mass

    def add(self, other: "Tally") -> None:
        """Count another's queries too."""
        self.true += other.true
        for name in ("bounds", "excess", "blocks", "worst"):
            for key, values in getattr(other, name).items():
                getattr(self, name).setdefault(key, []).extend(values)

    def summary(self) -> dict:
        """As numbers."""
        true, rows = np.concatenate(self.true), []
        for (run, kind), values in self.bounds.items():
            bound, excess = np.concatenate(values), np.concatenate(self.excess[run, kind])
            ratio = bound / np.maximum(true, np.finfo(np.float32).tiny)
            rows.append({
                "run": run, "kind": kind, "queries": len(true),
                "violations": int((true > bound).sum()),
                "bound_median": _digits(np.median(bound)),
                "bound_p10": _digits(np.quantile(bound, 0.1)),
                "ratio_median": _digits(np.median(ratio)),
                "ratio_p90": _digits(np.quantile(ratio, 0.9)),
                "proved_within_eps": _digits((bound <= EPS).mean()),
                "vacuous": _digits((bound > 0.99).mean()),
                "blocks": len(excess), "block_violations": int((excess < 0).sum()),
                "nats_above_block_median": _digits(np.median(excess)),
                "nats_above_block_p10": _digits(np.quantile(excess, 0.1)),
            })  # fmt: skip
        choices = [
            {"rule": rule, "blocks": _digits(np.mean(self.blocks[rule])),
             "worst_mass": _digits(np.max(self.worst[rule]))}
            for rule in self.blocks
        ]  # fmt: skip
        return {
            "queries": len(true),
            "true_median": _digits(np.median(true)),
            "true_within_eps": _digits((true <= EPS).mean()),
            "bounds": rows,
            "choices": choices,
        }


def measured(q: np.ndarray, k: np.ndarray) -> Tally:
    """One layer `q [T, Hq, D]`, `k [T, Hk, D]`."""
    q, k = jnp.asarray(q)[None], jnp.asarray(k)[None]
    heads, n = q.shape[2], q.shape[1] // BLOCK
    total = total_blocks(BUDGET, heads=1, n=n, forced=FORCED)
    counts = np.tile(row_counts(total, n, FORCED), (heads, 1))
    masses = SELECTOR.masses(q, k, ScoringContext(BLOCK, SCALE))
    chosen = choose(masses, counts, forced=FORCED, scope=BudgetScope.ROW)
    settings = {"block": BLOCK, "scale": SCALE}
    audited = audit(q, k, chosen, **settings)
    drops = np.asarray(audited.odds > -jnp.inf)
    found = Tally([np.asarray(audited.mass)[drops]])
    for run in RUNS:
        for kind in BoundKind:
            bound = dropped_bound(q, k, chosen, run=run, kind=kind, **settings)
            found.bounds[run, kind.value] = [np.asarray(bound)[drops]]
            found.excess[run, kind.value] = [_excess(q, k, run, kind)]
    given, rules = (q, k, chosen, EPS), {"given": chosen}
    for run in RUNS:
        rules[f"bounded, run {run}"] = bounded_choice(*given, run=run, **settings)
    for promise in BoundScope:
        rules[f"audited, {promise}"] = audited_choice(*given, scope=promise, **settings)
    for name, grid in rules.items():
        found.blocks[name] = [float(grid.sum()) / (heads * visible_blocks(n))]
        found.worst[name] = [float(audit(q, k, grid, **settings).worst_mass)]
    return found


def _excess(q, k, run: int, kind: BoundKind) -> np.ndarray:
    """Log of each block's bound less that of its weight, rounding allowed; one query in `EVERY`.

    A share saturates at 1, and a bound of 1 proves nothing and cannot be broken; this can.
    """
    tokens, n = k.shape[1], k.shape[1] // BLOCK
    position = np.arange(EVERY - 1, tokens, EVERY, dtype=np.int32)
    asked = q[:, position]
    exact = block_statistics(asked, k, block_kv=BLOCK, scale=SCALE, q_positions=position).block_lse
    upper = BlockBounds.of(k, run).upper(SCALE * asked, kind)
    upper = jax.nn.logsumexp(upper.reshape(*upper.shape[:3], n, -1), axis=-1) + np.log(run)
    slack = rounding(SCALE * asked, key_reach(k), block=BLOCK, tokens=tokens)
    whole = np.arange(n) < (position // BLOCK)[:, None]  # blocks that the query sees all of
    return np.asarray(upper - exact + slack[..., None])[0].swapaxes(1, 2)[whole].ravel()


def _digits(value) -> float:
    return float(f"{float(value):.5g}")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=4, help="maximum number of test documents")
    asked = parser.parse_args()
    tests = [x for x in documents(Tokenizer.load(directory())) if x.split == "test"]
    folder = RESULTS / "hads"
    folder.mkdir(exist_ok=True)
    whole, by_layer = Tally(), {layer: Tally() for layer in LAYERS}
    for number, document in enumerate(tests[: asked.documents], start=1):
        begin, (q, k) = time.monotonic(), captured(document)
        for layer in LAYERS:
            found = measured(q[layer, :CONTEXT], k[layer, :CONTEXT])
            whole.add(found)
            by_layer[layer].add(found)
        seconds = time.monotonic() - begin
        print(f"{number} of {asked.documents}: {document.name}: {seconds:.0f} s", flush=True)
        report = {
            "context": CONTEXT, "block": BLOCK, "budget": BUDGET, "eps": EPS,
            "selector": repr(SELECTOR), "layers": LAYERS,
            "documents": [f"{d.kind}: {d.name}" for d in tests[:number]],
            "all": whole.summary(),
            "by_layer": {str(layer): tally.summary() for layer, tally in by_layer.items()},
            "environment": dataclasses.asdict(environment(checkout_root())),
        }  # fmt: skip
        atomic_write(folder / "bounds.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
