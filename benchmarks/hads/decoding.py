"""Loss of sparse decoding by the pages it reads: next-token KL and perplexity of SmolLM2.

python -m benchmarks.hads.decoding                   # 4096 tokens, 512 steps, 8 test documents
python -m benchmarks.hads.decoding --steps 16 --documents 2  # to see that it works

The prompt is read densely; then every step decodes the next token of the document, by a selector
and budgets. KV share: pages read plus summaries, in bytes of 16-bit keys and values. Settings that
have a row are not measured again.
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.experiments.common import RESULTS
from benchmarks.hads.corpus import documents
from benchmarks.peers.smollm2 import directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.cache import ForcedPages, Oracle, PageSelector, Quest
from xsake.hads import PlanDecoding, SparsityPlan
from xsake.model.cache import KVCache
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

ROWS = RESULTS / "hads" / "decoding.jsonl"
PLAN = "plan_4096_32"
CHUNK = 32  # steps between two lines of progress
BUDGETS = {
    ("labels", "plan"): (0.1, 0.15, 0.2, 0.25, 0.3),
    ("quest", "plan"): (0.15, 0.2, 0.3, 0.4),
    ("oracle", "plan"): (0.1, 0.15, 0.2),
    ("labels", "uniform"): (0.2, 0.3),
    ("quest", "uniform"): (0.2, 0.3, 0.45),
    ("window", "uniform"): (0.2, 0.4),
}


class Recent(PageSelector):
    """The most recent pages: with the forced first page, a window and sinks."""

    def summarize(self, keys, exists, layer):
        """See `PageSelector`."""
        return ()

    def estimate(self, q, summaries, exists, layer):
        """See `PageSelector`."""
        rank = 1e-3 * jnp.arange(exists.shape[1], dtype=jnp.float32)[None, None, None]
        return jnp.broadcast_to(rank, (*q.shape[:3], exists.shape[1]))


class Uniform(PlanDecoding):
    """One budget for all heads."""

    @functools.cached_property
    def shares(self):
        """See `PlanDecoding`."""
        return np.full((self.plan.model.layers, self.plan.model.kv_heads), self.budget)


def make_attention(plan: SparsityPlan, selector: str, budgets: str, budget: float) -> PlanDecoding:
    """Return the attention function of a setting."""
    selectors = {"labels": None, "quest": Quest(), "oracle": Oracle(), "window": Recent()}
    kind = PlanDecoding if budgets == "plan" else Uniform
    return kind(plan, budget, selectors[selector], ForcedPages())


class Decoding:
    """Teacher-forced steps after a dense prefill of several documents at once."""

    def __init__(self, model: Any, tokens: np.ndarray, steps: int):
        self.graph, self.weights = nnx.split(model)
        prompt = tokens.shape[1] - steps
        self.steps = jnp.asarray(tokens[:, prompt:-1].T)
        self.targets = jnp.asarray(tokens[:, prompt + 1 :].T)
        caches = []
        for row in tokens[:, :prompt]:  # one at a time: activations of all would not fit
            _, cache = self._prefill(self.weights, row[None], tokens.shape[1])
            caches.append(cache)
        self.cache = self._join(caches)
        self.dense = np.concatenate(list(self._log_probs(None)))

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def _prefill(self, weights, tokens, capacity: int):
        model = nnx.merge(self.graph, weights)
        return model.prefill(tokens, jnp.array([tokens.shape[1]]), capacity=capacity)

    def _join(self, caches: list[KVCache]) -> KVCache:
        pages = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *(x.pages for x in caches))
        count = caches[0].page_table.shape[1]
        table = jnp.arange(len(caches) * count, dtype=jnp.int32).reshape(len(caches), count)
        return KVCache(pages, table, jnp.concatenate([x.lengths for x in caches]))

    @functools.partial(jax.jit, static_argnums=(0, 4))
    def _run(self, weights, cache: KVCache, tokens, attend):
        model = nnx.merge(self.graph, weights)

        def step(cache, token):
            options = {} if attend is None else {"attend": attend}
            hidden, cache = model.extend(token[:, None], cache, **options)
            return cache, jax.nn.log_softmax(model.logits(hidden[:, 0]))

        return jax.lax.scan(step, cache, tokens)

    def _log_probs(self, attend: PlanDecoding | None) -> Iterator[np.ndarray]:
        """Yield log-probabilities [steps, documents, vocab] of some steps at a time."""
        cache = self.cache.with_selector(getattr(attend, "page_selector", None))
        for first in range(0, len(self.steps), CHUNK):
            tokens = self.steps[first : first + CHUNK]
            cache, log_probs = self._run(self.weights, cache, tokens, attend)
            yield np.asarray(log_probs)
            print(f"\r{first + len(tokens)} of {len(self.steps)} steps", end="", flush=True)
        print("\r", end="")

    def measure(self, attend: PlanDecoding) -> dict[str, Any]:
        """KL and loss of the text by document."""
        kls, gaps = [], []
        for chunk, log_probs in enumerate(self._log_probs(attend)):
            at = slice(chunk * CHUNK, chunk * CHUNK + len(log_probs))
            dense, targets = self.dense[at], np.asarray(self.targets[at])[..., None]
            kls.append((np.exp(dense) * (dense - log_probs)).sum(-1))
            gaps.append(np.take_along_axis(dense - log_probs, targets, axis=-1)[..., 0])
        kl, gap = np.concatenate(kls), np.concatenate(gaps)
        return {
            "kl": round(float(kl.mean()), 6),
            "kl_by_document": [round(float(x), 6) for x in kl.mean(0)],
            "nll_gap": round(float(gap.mean()), 6),
            "nll_gap_by_document": [round(float(x), 6) for x in gap.mean(0)],
        }

    def kv_share(self, attend: PlanDecoding) -> dict[str, float]:
        """Pages that are read by a step in the middle, and with summaries: shares of all KV."""
        size = self.cache.pages.page_size
        length = int(self.cache.lengths[0]) + len(self.steps) // 2
        pages = -(-length // size)
        forced = 1 + -(-(attend.forced.num_local + size - 1) // size)
        counts = np.maximum(np.ceil(attend.shares * pages), forced).clip(max=pages)
        read = float(counts.mean() / pages)
        selector, kv = attend.page_selector, self.cache.pages
        page = 4 * size * kv.k.shape[2] * kv.k.shape[4]  # bytes of 16-bit keys and values
        free = isinstance(selector, Oracle | Recent)
        summaries = 0.0 if free else selector.bytes_per_page(kv) / page
        return {"pages": round(read, 4), "kv_share": round(read + summaries, 4)}


def rows() -> list[dict]:
    """Return the committed rows; none if the experiment was not run."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> None:
    """Measure the settings without a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--selectors", default=None, help="such as labels,quest; None: all")
    asked = parser.parse_args()
    folder = directory()
    texts = [x for x in documents(Tokenizer.load(folder)) if x.split == "test"][: asked.documents]
    plan = SparsityPlan.load(RESULTS / "hads" / f"{PLAN}.json")
    settings = {"context": asked.context, "steps": asked.steps, "documents": asked.documents}
    known = [{k: row[k] for k in ("selector", "budgets", "budget", *settings)} for row in rows()]
    run = None
    for (selector, budgets), each in BUDGETS.items():
        for budget in each:
            setting = {"selector": selector, "budgets": budgets, "budget": budget, **settings}
            if setting in known or (asked.selectors and selector not in asked.selectors):
                continue
            if run is None:
                tokens = np.stack([x.tokens[: asked.context] for x in texts])
                run = Decoding(load(folder).model, tokens, asked.steps)
            begin = time.monotonic()
            attend = make_attention(plan, selector, budgets, budget)
            row = setting | run.kv_share(attend) | run.measure(attend)
            row |= {"plan": PLAN, "page_size": run.cache.pages.page_size}
            row |= {"names": [x.name for x in texts], "seconds": round(time.monotonic() - begin, 1)}
            row |= environment(checkout_root()).fields("utc", "commit", "versions")
            atomic_write(ROWS, "".join(json.dumps(x) + "\n" for x in [*rows(), row]))
            print(f"{selector}, {budgets}, {budget:.0%}: KV {row['kv_share']:.1%}, "
                  f"KL {row['kl']:.5f}, loss {row['nll_gap']:+.4f} nats, {row['seconds']} s",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
