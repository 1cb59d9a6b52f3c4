"""Estimates of block masses from queries and keys; no array of all token pairs ever exists."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from xsake.hads.rules import cost
from xsake.hads.rules.rule import Scene
from xsake.hads.selectors import Antidiagonal, Look, Pooled, Selector

# Several rules read the same estimate of the same scene, one right after the other.
_remembered = functools.lru_cache(maxsize=8)
ROWS_AT_ONCE = 16  # query blocks whose scores exist at the same time


@dataclasses.dataclass(frozen=True)
class Proxy:
    """An estimate of every block's mass, and what making it costs.

    Args:
        mass: from a scene to masses whose rows sum to one; hidden blocks have none.
        cost: see `cost.py`.
    """

    mass: Callable[[Scene], Float[np.ndarray, "Hq Nq Nk"]]
    cost: cost.Cost


@_remembered
def pooled_mass(scene: Scene) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Softmax over blocks of (mean query of the row) . (mean key of the block)."""
    return _selected(Pooled(), scene)


@_remembered
def bound_mass(scene: Scene) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Softmax over blocks of a bound on each token's scores, averaged over the row's tokens.

    The bound is `sum_d max(q_d min_d, q_d max_d)` with the least and greatest keys of a block.
    """
    return np.asarray(_bounded(scene.q, scene.k, scene.scale, block=scene.block))


@_remembered
def antidiagonal_mass(scene: Scene, stride: int) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Softmax over cells of the mean score on their antidiagonals, summed over the cells of blocks.

    A cell is `stride` x `stride` tokens; its antidiagonal meets each of its queries and keys once.
    """
    return _selected(Antidiagonal(stride), scene)


def _selected(selector: Selector, scene: Scene) -> Float[np.ndarray, "Hq Nq Nk"]:
    """What a selector of ours makes of a scene."""
    q, k = jnp.asarray(scene.q)[None], jnp.asarray(scene.k)[None]
    return np.asarray(_masses(selector, Look(scene.block, scene.scale), q, k))[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _masses(selector: Selector, look: Look, q: Array, k: Array) -> Array:
    return selector.masses(q, k, look)


def gate_scores(scene: Scene) -> Float[np.ndarray, "Hq Nq B Nk"]:
    """(Each query) . (mean key of each block), for every token of a row."""
    return np.asarray(_gates(scene.q, scene.k, scene.scale, block=scene.block))


@_remembered
def last_attention(scene: Scene, count: int) -> Float[np.ndarray, "Hq S Tk"]:
    """Exact attention of the last `count` queries, or of all if there are fewer."""
    seen = min(count, len(scene.q))
    return np.asarray(_last(scene.q[-seen:], scene.k, scene.scale))


def self_similarity(x: Float[Array | np.ndarray, "T H D"], block: int) -> np.ndarray:
    """Mean cosine over all pairs of vectors of each block, `[H, N]`.

    Example:
        >>> alike, opposite = np.ones((4, 1, 2)), np.array([1.0, -1, 1, -1])[:, None, None]
        >>> self_similarity(np.concatenate([alike, alike * opposite]), 4).round(3)
        array([[1., 0.]])
    """
    x = np.asarray(x)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    units = x / np.maximum(norms, np.finfo(x.dtype).tiny)
    sums = units.reshape(-1, block, *x.shape[1:]).sum(axis=1)
    return np.square(sums).sum(axis=-1).T / block**2


POOLED = Proxy(pooled_mass, cost.of_pooled)
BOUNDS = Proxy(bound_mass, cost.of_bounds)


def antidiagonals(stride: int) -> Proxy:
    """The proxy of `antidiagonal_mass`."""
    mass = functools.partial(antidiagonal_mass, stride=stride)
    return Proxy(mass, cost.of_antidiagonals(stride))


@functools.partial(jax.jit, static_argnames="block")
def _bounded(q: Array, k: Array, scale: Array, *, block: int) -> Array:
    keys = _blocks(k, block)
    ends = jnp.concatenate([keys.max(axis=1), keys.min(axis=1)], axis=-1)

    def mass(row, queries):
        signed = jnp.concatenate([jnp.maximum(queries, 0), jnp.minimum(queries, 0)], axis=-1)
        logits = scale * jnp.einsum("qhgd,mhd->hgqm", signed, ends)
        seen = jnp.arange(len(ends)) <= row
        return jax.nn.softmax(logits, axis=-1, where=seen[None, None, None]).mean(axis=2)

    return _by_rows(mass, _grouped(q, k), block)


@functools.partial(jax.jit, static_argnames="block")
def _gates(q: Array, k: Array, scale: Array, *, block: int) -> Array:
    means = _blocks(k, block).mean(axis=1)
    scores = scale * jnp.einsum("nqhgd,mhd->hgnqm", _blocks(_grouped(q, k), block), means)
    return scores.reshape(-1, *scores.shape[2:])


@jax.jit
def _last(q: Array, k: Array, scale: Array) -> Array:
    logits = scale * jnp.einsum("qhgd,khd->hgqk", _grouped(q, k), k)
    position = len(k) - len(q) + jnp.arange(len(q))
    seen = jnp.arange(len(k))[None, :] <= position[:, None]
    attention = jax.nn.softmax(logits, axis=-1, where=seen[None, None])
    return attention.reshape(-1, *attention.shape[2:])


def _blocks(x: Array, size: int) -> Array:
    """[T, ...] as [T / size, size, ...]."""
    return x.reshape(-1, size, *x.shape[1:])


def _grouped(q: Array, k: Array) -> Array:
    """[T, Hq, D] as [T, Hk, G, D]: the query heads beside the kv head that they share."""
    return q.reshape(len(q), k.shape[1], -1, q.shape[-1])


def _by_rows(mass: Callable, queries: Array, size: int) -> Array:
    """`mass(row, its queries) -> [Hk, G, Nk]` of all rows, as [Hq, Nq, Nk]."""
    rows = _blocks(queries, size)
    call = lambda row: mass(*row)
    found = jax.lax.map(call, (jnp.arange(len(rows)), rows), batch_size=ROWS_AT_ONCE)
    return jnp.moveaxis(found, 0, 2).reshape(-1, len(rows), found.shape[-1])
