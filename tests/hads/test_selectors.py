"""Selectors estimate block masses: rows sum to one, causality holds, planted blocks are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.hads.selectors import (
    SELECTORS,
    Antidiagonal,
    Cumulant,
    Pooled,
    Sampled,
    ScoringContext,
    correct_masses,
)
from xsake.kernels.statistics import block_statistics

BLOCK, SCALE = 16, 0.25
LOOK = ScoringContext(BLOCK, SCALE)


def inputs(tokens=128, q_heads=4, kv_heads=2, dim=16, batch=2, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    q = 2 * jax.random.normal(keys[0], (batch, tokens, q_heads, dim))
    return q, jax.random.normal(keys[1], (batch, tokens, kv_heads, dim))


def true_masses(q, k):
    found = block_statistics(q, k, block_kv=BLOCK, scale=SCALE).mass()
    batch, tokens, heads, columns = found.shape
    return jnp.moveaxis(found.reshape(batch, -1, BLOCK, heads, columns).mean(2), 1, 2)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("tokens", [128, 121])
def test_rows_sum_to_one_and_hidden_blocks_weigh_nothing(name, tokens):
    q, k = inputs(tokens)
    masses = np.asarray(SELECTORS[name]().masses(q, k, LOOK))
    assert masses.shape == (2, 4, 8, 8) and np.isfinite(masses).all()
    assert np.allclose(masses.sum(-1), 1, atol=1e-5)
    assert not np.triu(masses, 1).any()


def test_asking_every_query_gives_the_truth():
    q, k = inputs()
    found = Sampled(queries=BLOCK, dims=16).masses(q, k, LOOK)
    assert np.allclose(found, true_masses(q, k), atol=1e-6)


def test_moments_of_single_keys_give_the_truth():
    # A run of one key has no variance; only the diagonal block differs: runs know no causality.
    q, k = inputs()
    found = np.asarray(Cumulant(run=1, stride=1).masses(q, k, LOOK))
    below = np.tri(8, k=-1, dtype=bool)
    true = np.asarray(true_masses(q, k))
    ratio = lambda x: x[..., 7, :6] / x[..., 7, :6].sum(-1, keepdims=True)
    assert below.any() and np.allclose(ratio(found), ratio(true), atol=0.05)


@pytest.mark.parametrize("selector", [Sampled(2, 16), Cumulant(), Antidiagonal(), Pooled()])
def test_a_block_that_everybody_looks_at_is_found(selector):
    q, k = inputs(seed=1)
    direction = jnp.ones((16,)) / 4
    q, k = q.at[:, 96:].add(6 * direction), k.at[:, 32:48].add(3 * direction)
    masses = np.asarray(selector.masses(q, k, LOOK))
    assert (masses[:, :, 7].argmax(-1) == 2).all()


def test_reading_some_components_reads_those_only():
    q, k = inputs()
    dims = np.array([[3, 1, 8, 0], [5, 6, 7, 2]])
    noise = jax.random.normal(jax.random.key(9), k.shape)
    unread = np.stack([~np.isin(np.arange(16), row) for row in dims])
    found = Sampled(2, 4).masses(q, k, LOOK, dims)
    assert (found == Sampled(2, 4).masses(q, jnp.where(unread, noise, k), LOOK, dims)).all()


def test_segments_hide_each_other_from_sampled_queries():
    q, k = inputs()
    ids = jnp.broadcast_to((jnp.arange(128) >= 64).astype(jnp.int32), (2, 128))
    masses = np.asarray(Sampled(4, 16).masses(q, k, LOOK._replace(segment_ids=ids)))
    assert not masses[:, :, 4:, :4].any()


def test_corrections_mix_a_row_with_the_one_before_and_the_even_share():
    masses = jnp.asarray(np.tri(4) / np.arange(1, 5)[:, None])[None, None]
    found = correct_masses(masses, np.array([[0.5, 0.25, 1.0]]))[0, 0]
    assert np.allclose(found[3], 0.5 / 4 + 1 / 4 + np.array([0.25 / 3] * 3 + [0]))


@pytest.mark.parametrize(
    ("selector", "expected"),
    [(Sampled(2, 32), 1 / 128), (Cumulant(16, 4), 1 / 64), (Antidiagonal(8), 1 / 16)],
)
def test_costs_are_shares_of_dense_flops(selector, expected):
    assert selector.cost(4096, 64, 64) == pytest.approx(expected)
    assert Pooled().cost(4096, 64, 64) == pytest.approx(1 / 8192)
