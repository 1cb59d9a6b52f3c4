"""Small scenes for rules, and an exact spending of budgets that shares no code with the product."""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks.baselines import RULES, LayerSample, RuleScope
from benchmarks.baselines.rule import causal_grid

TOKENS, BLOCK, HEADS, KV_HEADS, DIM = 256, 16, 4, 2, 16
BLOCKS = TOKENS // BLOCK
SCALE = DIM**-0.5
LAYERS = (0, 1)


def attention_of(q, k):
    """Dense causal attention, [Hq, T, T] in float64."""
    keys = np.repeat(np.asarray(k, np.float64), q.shape[1] // k.shape[1], axis=1)
    logits = SCALE * np.einsum("qhd,khd->hqk", np.asarray(q, np.float64), keys)
    weights = np.exp(np.where(np.tri(len(q), dtype=bool), logits, -np.inf))
    return weights / weights.sum(axis=-1, keepdims=True)


def scene_of(q, k, *, layer=0, seed=0):
    attention = attention_of(q, k)
    heads, tokens, _ = attention.shape
    cut = attention.reshape(heads, tokens // BLOCK, BLOCK, -1, BLOCK)
    logs = np.log(np.where(attention > 0, attention, 1))
    return LayerSample(
        q=jnp.asarray(q, jnp.float32),
        k=jnp.asarray(k, jnp.float32),
        scale=SCALE,
        block=BLOCK,
        layer=layer,
        seed=seed,
        masses=cut.sum(axis=-1).mean(axis=2).astype(np.float32),
        entropy=-(attention * logs).sum(axis=-1).mean(axis=-1).astype(np.float32),
    )


def random_scene(seed, *, layer=0):
    """Heads of different sharpness, and a first token that they all like."""
    random = np.random.default_rng([seed, layer])
    q = random.normal(size=(TOKENS, HEADS, DIM)) * np.linspace(0.5, 4, HEADS)[:, None]
    k = random.normal(size=(TOKENS, KV_HEADS, DIM)).cumsum(axis=0) / 6
    q[..., 0], k[0, :, 0] = 2, 8
    return scene_of(q, k, layer=layer, seed=seed)


def quiet():
    """Queries and keys that attend to nothing in particular, for tests to plant something in."""
    random = np.random.default_rng(0)
    sizes = (TOKENS, HEADS, DIM), (TOKENS, KV_HEADS, DIM)
    return tuple(0.01 * random.normal(size=size) for size in sizes)


WATCHED = [random_scene(seed, layer=layer) for seed in (1, 2) for layer in LAYERS]
NEW = [random_scene(3, layer=layer) for layer in LAYERS]


@functools.cache
def calibrated(name):
    """A rule that has watched; ranking does not change it."""
    rule = RULES[name]()
    for sample in WATCHED:
        rule.observe(sample)
    rule.finish()
    return rule


def taken(rule, rankings, share):
    """Exactly `share` of the visible blocks of some layers, by the rule's own scope."""
    priority = np.stack([ranking.priority for ranking in rankings])
    layers, heads, blocks, _ = priority.shape
    total = round(share * layers * heads * causal_grid(blocks).sum())
    if rule.scope is RuleScope.MODEL:
        return _best(priority.reshape(1, -1), [total]).reshape(priority.shape)
    shares = np.ones(layers * heads)
    if rule.scope is RuleScope.HEADS:
        shares = np.concatenate([rule.shares(layer) for layer in range(layers)])
    # Every head gets its forced blocks; what is left is shared out.
    least = int(np.isposinf(priority[0, 0]).sum())
    spare = np.rint(np.cumsum(shares) / shares.sum() * (total - least * shares.size))
    counts = least + np.diff(spare, prepend=0).astype(int)
    heads_rows = zip(priority.reshape(-1, blocks, blocks), counts, strict=True)
    kept = [_best(rows, _row_counts(count, np.isposinf(rows))) for rows, count in heads_rows]
    return np.stack(kept).reshape(priority.shape)


def _best(rows, counts):
    place = np.argsort(np.argsort(-rows, axis=-1, kind="stable"), axis=-1)
    return place < np.asarray(counts)[:, None]


def _row_counts(total, forced):
    """As equal as rows allow, the forced blocks of each inside; the last rows get the rest."""
    least, most = forced.sum(axis=-1), np.arange(1, len(forced) + 1)
    levels = [np.clip(level, least, most) for level in range(len(forced) + 1)]
    level = max(i for i, counts in enumerate(levels) if counts.sum() <= total)
    counts = levels[level].copy()
    growing = np.flatnonzero(levels[min(level + 1, len(forced))] > counts)
    counts[growing[len(growing) - (total - counts.sum()) :]] += 1
    return counts


def mean_loss(scenes, kept):
    """Mean of -log(kept mass) over rows, heads and layers."""
    masses = np.stack([np.asarray(sample.masses, np.float64) for sample in scenes])
    return -np.log((masses * kept).sum(axis=-1)).mean()
