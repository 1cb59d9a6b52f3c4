"""Estimates of block masses, and their cost as a share of dense causal attention.

Costs are flops of matrix products; softmax, pooling and sorting are not counted. Dense attention
has `4 D` flops per visible pair: `2 D` for the score and `2 D` for the value.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.baselines.rule import LayerSample
from xsake.hads.selectors import Antidiagonal, Pooled, ScoringContext, Selector

Cost = Callable[[int, int, int], float]
"""From tokens, block and head dimension to a share of the dense flops."""


def _share(flops: float, tokens: int, head_dim: int) -> float:
    return flops / (4 * head_dim * (tokens * (tokens + 1) / 2))


def _triangle(side: int) -> float:
    return side * (side + 1) / 2


def zero_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return 0: the rule does not use queries."""
    return 0.0


def pooled_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return one product of `2 D` per visible block: about `1 / (2 block^2)`.

    Example:
        >>> f"{pooled_cost(8192, 32, 64):.5f}"
        '0.00049'
    """
    return _share(2 * head_dim * _triangle(tokens // block), tokens, head_dim)


def gate_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return one product of `2 D` per token and visible block: about `1 / (2 block)`."""
    return block * pooled_cost(tokens, block, head_dim)


def bound_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return two products of `2 D` per token and visible block: about `1 / block`."""
    return 2 * gate_cost(tokens, block, head_dim)


def antidiagonal_cost(stride: int) -> Cost:
    """Return one product of `2 stride D` per visible cell: about `1 / (2 stride)`.

    Example:
        >>> f"{antidiagonal_cost(8)(8192, 32, 64):.3f}"
        '0.063'
    """

    def cost(tokens: int, block: int, head_dim: int) -> float:
        flops = 2 * stride * head_dim * _triangle(tokens // stride)
        return _share(flops, tokens, head_dim)

    return cost


def last_queries_cost(count: int) -> Cost:
    """Return one product of `2 D` per pair of the last `count` queries: about `count / tokens`."""

    def cost(tokens: int, block: int, head_dim: int) -> float:
        queries = min(count, tokens)
        pairs = queries * tokens - _triangle(queries - 1)
        return _share(2 * head_dim * pairs, tokens, head_dim)

    return cost


# Several rules use the same estimate of the same sample in turn.
_cached = functools.lru_cache(maxsize=8)
ROW_BATCH_SIZE = 16  # query blocks per step


@dataclasses.dataclass(frozen=True)
class MassEstimator:
    """Estimator of block masses."""

    mass: Callable[[LayerSample], Float[np.ndarray, "Hq Nq Nk"]]
    cost: Cost


@_cached
def pooled_mass(sample: LayerSample) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Return the softmax over blocks of (mean query of the row) . (mean key of the block)."""
    return _run_selector(Pooled(), sample)


@_cached
def bound_mass(sample: LayerSample) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Return the softmax over blocks of a bound on scores, mean over the queries of a row.

    The bound is `sum_d max(q_d min_d, q_d max_d)` with the componentwise extremes of a block.
    """
    return np.asarray(_bound_masses(sample.q, sample.k, sample.scale, block=sample.block))


@_cached
def antidiagonal_mass(sample: LayerSample, stride: int) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Return the softmax over cells of `stride` x `stride` of antidiagonal means, by block."""
    return _run_selector(Antidiagonal(stride), sample)


def _run_selector(selector: Selector, sample: LayerSample) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Return the estimate of a selector."""
    q, k = jnp.asarray(sample.q)[None], jnp.asarray(sample.k)[None]
    return np.asarray(_masses(selector, ScoringContext(sample.block, sample.scale), q, k))[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _masses(selector: Selector, context: ScoringContext, q: Array, k: Array) -> Array:
    return selector.masses(q, k, context)


def gate_scores(sample: LayerSample) -> Float[np.ndarray, "Hq Nq B Nk"]:
    """Return (query) . (mean key of each block) for every query of a row."""
    return np.asarray(_gates(sample.q, sample.k, sample.scale, block=sample.block))


@_cached
def last_attention(sample: LayerSample, count: int) -> Float[np.ndarray, "Hq S Tk"]:
    """Return the exact attention of the last `count` queries, or of all if there are fewer."""
    queries = min(count, len(sample.q))
    return np.asarray(_last(sample.q[-queries:], sample.k, sample.scale))


def self_similarity(x: Float[Array | np.ndarray, "T H D"], block: int) -> np.ndarray:
    """Return the mean cosine over all pairs of vectors of each block, `[H, N]`.

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


POOLED = MassEstimator(pooled_mass, pooled_cost)
BOUNDS = MassEstimator(bound_mass, bound_cost)


def antidiagonals(stride: int) -> MassEstimator:
    """Return the estimator of `antidiagonal_mass`."""
    mass = functools.partial(antidiagonal_mass, stride=stride)
    return MassEstimator(mass, antidiagonal_cost(stride))


@functools.partial(jax.jit, static_argnames="block")
def _bound_masses(q: Array, k: Array, scale: Array, *, block: int) -> Array:
    keys = _blocks(k, block)
    ends = jnp.concatenate([keys.max(axis=1), keys.min(axis=1)], axis=-1)

    def mass(row, queries):
        signed = jnp.concatenate([jnp.maximum(queries, 0), jnp.minimum(queries, 0)], axis=-1)
        logits = scale * jnp.einsum("qhgd,mhd->hgqm", signed, ends)
        visible = jnp.arange(len(ends)) <= row
        return jax.nn.softmax(logits, axis=-1, where=visible[None, None, None]).mean(axis=2)

    return _map_rows(mass, _group_heads(q, k), block)


@functools.partial(jax.jit, static_argnames="block")
def _gates(q: Array, k: Array, scale: Array, *, block: int) -> Array:
    means = _blocks(k, block).mean(axis=1)
    scores = scale * jnp.einsum("nqhgd,mhd->hgnqm", _blocks(_group_heads(q, k), block), means)
    return scores.reshape(-1, *scores.shape[2:])


@jax.jit
def _last(q: Array, k: Array, scale: Array) -> Array:
    logits = scale * jnp.einsum("qhgd,khd->hgqk", _group_heads(q, k), k)
    position = len(k) - len(q) + jnp.arange(len(q))
    visible = jnp.arange(len(k))[None, :] <= position[:, None]
    attention = jax.nn.softmax(logits, axis=-1, where=visible[None, None])
    return attention.reshape(-1, *attention.shape[2:])


def _blocks(x: Array, size: int) -> Array:
    """Reshape [T, ...] to [T / size, size, ...]."""
    return x.reshape(-1, size, *x.shape[1:])


def _group_heads(q: Array, k: Array) -> Array:
    """Reshape [T, Hq, D] to [T, Hk, G, D]."""
    return q.reshape(len(q), k.shape[1], -1, q.shape[-1])


def _map_rows(mass: Callable, queries: Array, size: int) -> Array:
    """Map `mass(row, queries) -> [Hk, G, Nk]` over all rows; returns [Hq, Nq, Nk]."""
    rows = _blocks(queries, size)
    call = lambda row: mass(*row)
    masses = jax.lax.map(call, (jnp.arange(len(rows)), rows), batch_size=ROW_BATCH_SIZE)
    return jnp.moveaxis(masses, 0, 2).reshape(-1, len(rows), masses.shape[-1])
