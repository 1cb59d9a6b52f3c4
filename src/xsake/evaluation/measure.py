"""Measurements of an evaluation: those that are not cached are computed, cheapest first."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xsake._progress import Progress, ProgressFn
from xsake.evaluation.record import CachedResult, ResultCache
from xsake.model import Decoder


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Something to compute.

    Args:
        key: digest of all that the result depends on.
        label: for progress events.
        cost: multiplications, up to a factor.
        compute: returns fields of `CachedResult`.
        describe: makes the detail of a progress event.
    """

    key: str
    label: str
    cost: int
    compute: Callable[[], dict[str, Any]]
    describe: Callable[[CachedResult], str]


def measure(
    items: Sequence[Measurement], cache: ResultCache, on_progress: ProgressFn
) -> list[CachedResult]:
    """Return the results of all items; new ones are added to the cache.

    The cheapest are computed first, for an early estimate of the remaining time.
    """
    costs = [0 if cache.find(item.key) else item.cost for item in items]
    start, spent, remaining = time.monotonic(), 0, sum(costs)
    results: dict[int, CachedResult] = {}
    for index in sorted(range(len(items)), key=costs.__getitem__):
        item = items[index]
        entry = cache.find(item.key)
        is_new = entry is None
        if entry is None:
            begin = time.monotonic()
            fields = item.compute()
            entry = CachedResult(key=item.key, seconds=time.monotonic() - begin, **fields)
            cache.add(entry)
            spent, remaining = spent + costs[index], remaining - costs[index]
        results[index] = entry
        elapsed = time.monotonic() - start
        to_go = elapsed / spent * remaining if spent else None
        event = Progress(len(results), len(items), item.label, is_new, elapsed, to_go)
        on_progress(dataclasses.replace(event, detail=item.describe(entry)))
    return [results[index] for index in range(len(items))]


def forward_cost(model: Decoder, tokens: int, generated: int = 0) -> int:
    """Estimate the multiplications of a forward pass: parameters and attention pairs.

    Args:
        model: the decoder.
        tokens: of the sequence.
        generated: tokens that are decoded one by one after it.
    """
    config = model.config
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    width = config.layers * config.q_heads * config.head_dim
    return (tokens + generated) * (parameters + width * tokens)


def digest_key(parts: dict[str, Any]) -> str:
    """Return the key of a result from all that it depends on, as JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
