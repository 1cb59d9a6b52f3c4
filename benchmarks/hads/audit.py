"""Attention that decoding of SmolLM2 drops, certified and true, by page selector and budgets.

python -m benchmarks.hads.audit                  # 8 test documents of 4096 tokens, 20% of pages
python -m benchmarks.hads.audit --positions 0 --settings int8  # all tokens
python -m benchmarks.hads.audit --split calibration --settings limit  # choice of the largest share

A query is one token and one query head. Tokens are evenly spaced. Settings that have a row are not
measured again.
"""

import argparse
import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.experiments.common import RESULTS
from benchmarks.hads.corpus import COUNTS, Document, documents
from benchmarks.hads.decoding import PLAN, Uniform
from benchmarks.peers.models import directory
from xsake._io import atomic_write, cache_folder
from xsake._provenance import checkout_root, environment, source_digest
from xsake.cache import Int8Keys, Oracle, Quest
from xsake.evaluation import page_audit
from xsake.hads import CalibrationDocument, MassCache, PlanDecoding, SparsityPlan
from xsake.model.huggingface import load
from xsake.model.observer import Observer
from xsake.model.tokenizer import Tokenizer

ROWS = RESULTS / "hads" / "audit.jsonl"
SELECTORS = {"labels": None, "int8": Int8Keys(), "quest": Quest(), "oracle": Oracle()}


class Setting(NamedTuple):
    """Selection of pages."""

    selector: str
    budgets: str  # plan or uniform
    budget: float
    limit: float | None = None
    max_share: float = 1.0

    def make(self, plan: SparsityPlan) -> PlanDecoding:
        """Return the attention function of decoding steps."""
        kind = PlanDecoding if self.budgets == "plan" else Uniform
        selector = SELECTORS[self.selector]
        return kind(plan, self.budget, selector, eps=self.limit, max_share=self.max_share)


SETTINGS = {
    "int8": Setting("int8", "plan", 0.2),
    "limit_50": Setting("int8", "plan", 0.1, 0.1, 0.5),
    "labels": Setting("labels", "plan", 0.2),
    "oracle": Setting("oracle", "plan", 0.2),
    "uniform_int8": Setting("int8", "uniform", 0.2),
    "limit": Setting("int8", "plan", 0.1, 0.1),
    "uniform_oracle": Setting("oracle", "uniform", 0.2),
    "quest": Setting("quest", "plan", 0.2),
    "limit_40": Setting("int8", "plan", 0.1, 0.1, 0.4),
    "limit_45": Setting("int8", "plan", 0.1, 0.1, 0.45),
}


class Measurement:
    """Masses of documents by setting; those of an earlier run are read from the user's cache."""

    def __init__(self, model: Any, plan: SparsityPlan, context: int, positions: int | None):
        self.positions = page_audit.choose_positions(context, positions)
        self._context, self._scale, self._plan = context, model.config.scale, plan
        self._observe, self._hook = Observer(model), page_audit.make_query_hook(positions)
        self._cache = MassCache(cache_folder("audits"))
        self._source = source_digest(*page_audit.SOURCES)

    def __call__(
        self, document: Document, names: list[str]
    ) -> dict[str, page_audit.MeasuredMasses]:
        """Return the masses of a document by name of setting."""
        tokens, inputs, parts = document.tokens[: self._context], None, {}
        for name in names:
            digest = CalibrationDocument(document.name, tokens).sha256
            sizes = self._context, len(self.positions), SETTINGS[name]
            key = repr((digest, self._plan.calibration.profile, sizes, self._source))
            if key not in self._cache:
                if inputs is None:
                    inputs = self._observe(jnp.asarray(tokens)[None], self._hook)
                selection = SETTINGS[name].make(self._plan)
                part = page_audit.measure_document(inputs, selection, self.positions, self._scale)
                self._cache[key] = part._asdict()
            parts[name] = page_audit.MeasuredMasses(**self._cache[key])
        return parts


def rows() -> list[dict]:
    """Return the committed rows; none if the experiment was not run."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def make_row(
    measured: page_audit.MeasuredMasses, positions: np.ndarray, context: int, eps: float
) -> dict[str, Any]:
    """Return the results of documents."""
    row = page_audit.summarize(measured, positions, eps).model_dump()
    spans = page_audit.summarize_spans(measured, positions, context, eps)
    row["by_position"] = [
        {"start": x.start, "end": x.end, "pages": x.pages, "certified_within": x.certified.within,
         "true_within": x.true.within} for x in spans
    ]  # fmt: skip
    for name in ("certified", "true"):
        within = (getattr(measured, name) <= eps).mean((1, 2, 3))
        row[f"{name}_within_by_document"] = [round(float(x), 4) for x in within]
    return row


def main() -> None:
    """Measure the settings without a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--split", choices=[*COUNTS], default="test")
    parser.add_argument("--positions", type=int, default=32, help="of a document; 0: all")
    parser.add_argument("--eps", type=float, default=0.1)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    asked = parser.parse_args()
    common = {"context": asked.context, "documents": asked.documents, "split": asked.split,
              "positions": asked.positions or asked.context, "eps": asked.eps}  # fmt: skip
    keys = {name: SETTINGS[name]._asdict() | common for name in asked.settings.split(",")}
    done = [{key: row.get(key) for key in (*Setting._fields, *common)} for row in rows()]
    missing = {name: key for name, key in keys.items() if key not in done}
    if not missing:
        return
    folder, plan = directory(), SparsityPlan.load(RESULTS / "hads" / f"{PLAN}.json")
    chosen = [x for x in documents(Tokenizer.load(folder)) if x.split == asked.split]
    chosen = chosen[: asked.documents]
    measure = Measurement(load(folder).model, plan, asked.context, asked.positions or None)
    positions, parts = measure.positions, {name: [] for name in missing}
    for number, document in enumerate(chosen):
        for name, part in measure(document, list(missing)).items():
            parts[name].append(part)
            result = page_audit.summarize(
                page_audit.MeasuredMasses(*(x[None] for x in part)), positions, asked.eps
            )
            within = f"certified {result.certified.within:.1%}, true {result.true.within:.1%}"
            print(f"{number + 1} of {len(chosen)}, {document.name}, {name}: {result.pages:.1%} of "
                  f"pages, {within}, {result.violations} violations", flush=True)  # fmt: skip
    found = []
    for name, key in missing.items():
        measured = page_audit.MeasuredMasses(*(np.stack(x) for x in zip(*parts[name], strict=True)))
        row = key | make_row(measured, positions, asked.context, asked.eps)
        row |= {"plan": PLAN, "page_size": page_audit.PAGE_SIZE}
        row |= {"names": [x.name for x in chosen]}
        found.append(row | environment(checkout_root()).fields("utc", "commit", "versions"))
    atomic_write(ROWS, "".join(json.dumps(x) + "\n" for x in [*rows(), *found]))


if __name__ == "__main__":
    main()
