"""Calibrate a model of the measurements on its calibration documents and save plans.

python -m benchmarks.hads.plans --context 8192 --block 64 --work 30%,35%
python -m benchmarks.hads.plans --model qwen2.5-coder-0.5b-instruct --work 20%,30%

A share of work counts computed blocks and their selection. Measurements are cached, so an
interrupted run resumes. Plans go to results/hads/<prefix>_<context>_<block>_<work>.json, minutes
and memory to results/hads/calibration.jsonl.
"""

import argparse
import json
import resource
import time
from pathlib import Path

from benchmarks.experiments.common import RESULTS
from benchmarks.hads.corpus import Document, code_documents, documents
from benchmarks.peers.models import MODELS, SMOLLM2, directory
from xsake._io import atomic_write, cache_folder
from xsake._provenance import checkout_root, environment
from xsake.cli.calibrate import COPIED_DOCUMENTS, EFFECT_DOCUMENTS
from xsake.cli.load import load_eval_model, parse_density
from xsake.evaluation import EvalModel
from xsake.hads import (
    CalibratedModel,
    CalibrationDocument,
    CalibrationSettings,
    MassCache,
    Profile,
    calibrate,
    make_plan,
    make_policy,
)
from xsake.hads.selectors import Sampled
from xsake.model.observer import Observer

PREFIXES = {SMOLLM2: "plan", "qwen2.5-coder-0.5b-instruct": "coder_0.5b"}
PREFIXES |= {"qwen2.5-coder-1.5b-instruct": "coder_1.5b"}
ROWS = RESULTS / "hads" / "calibration.jsonl"


def corpus_of(name: str, model: EvalModel) -> list[Document]:
    """Return the documents of a model: source code for code models."""
    return documents(model.tokenizer) if name == SMOLLM2 else code_documents(model.tokenizer)


def plan_file(name: str, context: int, block: int, work: str) -> Path:
    """Return the path of a plan."""
    share = work.removesuffix("%")
    return RESULTS / "hads" / f"{PREFIXES[name]}_{context}_{block}_{share}.json"


def measure(given: argparse.Namespace, model: EvalModel) -> Profile:
    """Return the profile of the calibration documents; cached measurements are reused."""
    chosen = [x for x in corpus_of(given.model, model) if x.split == "calibration"]
    config = model.model.config
    identity = CalibratedModel(
        name=model.identity.name, digest=model.identity.digest, layers=config.layers,
        q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    settings = CalibrationSettings(
        given.block,
        effect_documents=given.effects,
        copied_documents=min(COPIED_DOCUMENTS, given.effects),
    )
    return calibrate(
        Observer(model.model),
        identity,
        [CalibrationDocument(x.name, x.tokens[: given.context]) for x in chosen[: given.documents]],
        settings,
        cache=MassCache(cache_folder("masses")),
        on_progress=lambda x: print(f"{x.done} of {x.total}: {x.label}", flush=True),
    )


def main() -> None:
    """Calibrate, and write the plans and a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default=SMOLLM2)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block")
    parser.add_argument("--work", default="30%", help="shares of dense attention, with commas")
    parser.add_argument("--documents", type=int, default=12, help="number of documents")
    parser.add_argument("--effects", type=int, default=EFFECT_DOCUMENTS, help="with gradients")
    given = parser.parse_args()
    begin = time.monotonic()
    model = load_eval_model(directory(given.model), "float32")
    profile = measure(given, model)
    selector, policy = Sampled(), make_policy("effect")
    cost = selector.spec(profile.context, profile.block, profile.model.head_dim).cost
    for work in given.work.split(","):
        plan = make_plan(profile, policy, round(parse_density(work) - cost, 6), selector)
        plan.save(plan_file(given.model, given.context, given.block, work))
        print(plan, flush=True)
    here = environment(checkout_root())
    row = {
        "model": given.model, "context": given.context, "block": given.block,
        "documents": len(profile.documents), "effect_documents": given.effects,
        "profile": profile.digest, "minutes": round((time.monotonic() - begin) / 60, 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **here.fields("utc", "commit", "versions"),
    }  # fmt: skip
    known = ROWS.read_text() if ROWS.exists() else ""
    atomic_write(ROWS, known + json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
