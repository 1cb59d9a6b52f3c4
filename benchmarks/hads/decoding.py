"""Loss of sparse decoding by the pages it reads: next-token KL and perplexity of SmolLM2.

python -m benchmarks.hads.decoding                  # text: 4096 tokens, 512 steps, 8 documents
python -m benchmarks.hads.decoding --task copy      # a passage of another text, repeated
python -m benchmarks.hads.decoding --task fact      # a sentence that is asked for at the end
python -m benchmarks.hads.decoding --documents 2 --selectors labels  # to see that it works

The prompt is read densely; then every step decodes the next token, by a selector and budgets. KV
share: pages read plus summaries, in bytes of 16-bit keys and values. Settings that have a row are
not measured again.
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.experiments.common import RESULTS
from benchmarks.hads.corpus import Document, documents
from benchmarks.peers.models import directory
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
    ("labels", "plan"): (0.1, 0.15, 0.175, 0.2, 0.3),
    ("quest", "plan"): (0.2, 0.3),
    ("window", "uniform"): (0.2, 0.4),
    ("quest", "uniform"): (0.2, 0.4),
    ("labels", "uniform"): (0.2,),
    ("oracle", "plan"): (0.1, 0.2),
}
STEPS = {"text": 512, "copy": 128, "fact": 32}
DEPTHS = (0.05, 0.25, 0.45, 0.65, 0.15, 0.35, 0.55, 0.75)  # of a passage or fact, in its document
PEOPLE = ("Marta Olsen", "Pavel Novak", "Ines Duarte", "Tom Hadley", "Ruth Kessler", "Omar Said",
          "Clara Voss", "Henry Ames")  # fmt: skip
THINGS = ("violin", "telescope", "lantern", "compass", "anchor", "saddle", "teapot", "ladder")
PLACES = ("Lisbon", "Bergen", "Cairo", "Dublin", "Havana", "Kyoto", "Malta", "Quito")


class Recent(PageSelector):
    """The most recent pages: with the forced first page, a window and sinks."""

    def summarize(self, keys, exists, layer):
        """See `PageSelector`."""
        return ()

    def estimate(self, q, summaries, at):
        """See `PageSelector`."""
        pages = at.page_table.shape[1]
        rank = 1e-3 * jnp.arange(pages, dtype=jnp.float32)[None, None, None]
        return jnp.broadcast_to(rank, (*q.shape[:3], pages))


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


class Texts(NamedTuple):
    """Texts of a task and the tokens whose loss counts."""

    tokens: np.ndarray  # [documents, context]
    is_counted: np.ndarray  # [documents, steps]: of the last tokens


def make_texts(
    task: str, texts: Sequence[Document], tokenizer: Tokenizer, context: int, steps: int
) -> Texts:
    """Return the texts of a task, all of `context` tokens."""
    is_counted = np.ones((len(texts), steps), bool)
    if task == "text":
        return Texts(np.stack([x.tokens[:context] for x in texts]), is_counted)
    rows = []
    for number, document in enumerate(texts):
        if task == "copy":  # the end of another text
            inserted = ended = texts[number - 1].tokens[-steps:]
            is_counted[number, 0] = False
        else:
            who, what, where = (x[number % len(x)] for x in (PEOPLE, THINGS, PLACES))
            start, answer = f"\n\nThe {what} of {who} was found in the old harbour of", f" {where}"
            inserted = np.array(tokenizer.encode(f"{start}{answer}.\n\n"))
            ended = np.array(tokenizer.encode(start + answer))
            length = len(ended) - len(tokenizer.encode(start))
            is_counted[number, : steps - length] = False
        at = int(DEPTHS[number % len(DEPTHS)] * context)
        body = np.concatenate([document.tokens[:at], inserted, document.tokens[at:]])
        rows.append(np.concatenate([body[: context - len(ended)], ended]))
    return Texts(np.stack(rows).astype(np.int32), is_counted)


class Decoding:
    """Teacher-forced steps after a dense prefill of several documents at once."""

    def __init__(self, model: Any, texts: Texts):
        self.graph, self.weights = nnx.split(model)
        tokens, self.is_counted = texts.tokens, texts.is_counted.T
        prompt = tokens.shape[1] - len(self.is_counted) - 1
        self.steps = jnp.asarray(tokens[:, prompt:-1].T)
        self.targets = tokens[:, prompt + 1 :].T
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

    def loss(self) -> np.ndarray:
        """Return the dense loss of each document."""
        return _by_document(-_of_targets(self.dense, self.targets), self.is_counted)

    def measure(self, attend: PlanDecoding) -> dict[str, Any]:
        """KL and loss of the text by document."""
        kls, gaps = [], []
        for chunk, log_probs in enumerate(self._log_probs(attend)):
            at = slice(chunk * CHUNK, chunk * CHUNK + len(log_probs))
            dense = self.dense[at]
            kls.append((np.exp(dense) * (dense - log_probs)).sum(-1))
            gaps.append(_of_targets(dense - log_probs, self.targets[at]))
        row = {}
        for name, each in (("kl", kls), ("nll_gap", gaps)):
            values = _by_document(np.concatenate(each), self.is_counted)
            row[name] = round(float(values.mean()), 6)
            row[f"{name}_by_document"] = [round(float(x), 6) for x in values]
        return row

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


def _of_targets(x: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, targets[..., None], axis=-1)[..., 0]


def _by_document(x: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    return np.where(is_counted, x, 0).sum(0) / is_counted.sum(0)


def rows(path: Path = ROWS) -> list[dict]:
    """Return the committed rows; none if the experiment was not run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Measure the settings without a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(STEPS), default="text")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--selectors", default=None, help="such as labels,quest; None: all")
    asked = parser.parse_args()
    folder = directory()
    tokenizer, steps = Tokenizer.load(folder), STEPS[asked.task]
    chosen = [x for x in documents(tokenizer) if x.split == "test"][: asked.documents]
    plan = SparsityPlan.load(RESULTS / "hads" / f"{PLAN}.json")
    settings = {"task": asked.task, "context": asked.context, "documents": asked.documents}
    known = [{k: row[k] for k in ("selector", "budgets", "budget", *settings)} for row in rows()]
    run = None
    for (selector, budgets), each in BUDGETS.items():
        for budget in each:
            setting = {"selector": selector, "budgets": budgets, "budget": budget, **settings}
            if setting in known or (asked.selectors and selector not in asked.selectors):
                continue
            if run is None:
                texts = make_texts(asked.task, chosen, tokenizer, asked.context, steps)
                run = Decoding(load(folder).model, texts)
            begin = time.monotonic()
            attend = make_attention(plan, selector, budgets, budget)
            row = setting | {"steps": steps} | run.kv_share(attend) | run.measure(attend)
            row |= {"dense_loss_by_document": [round(float(x), 6) for x in run.loss()]}
            row |= {"plan": PLAN, "page_size": run.cache.pages.page_size}
            row |= {
                "names": [x.name for x in chosen],
                "seconds": round(time.monotonic() - begin, 1),
            }
            row |= environment(checkout_root()).fields("utc", "commit", "versions")
            atomic_write(ROWS, "".join(json.dumps(x) + "\n" for x in [*rows(), row]))
            print(f"{selector}, {budgets}, {budget:.1%}: KV {row['kv_share']:.1%}, "
                  f"KL {row['kl']:.5f}, loss {row['nll_gap']:+.4f} over {run.loss().mean():.3f}, "
                  f"{row['seconds']} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
