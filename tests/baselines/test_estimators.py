"""Estimates of block masses against plain loops over tokens, and what they cost."""

import numpy as np
import pytest

from benchmarks.baselines import RULES, estimators
from benchmarks.baselines.vertical_slash import stripes
from tests.baselines.samples import BLOCK, BLOCKS, DIM, NEW, SCALE, TOKENS, attention_of
from xsake.errors import ArgumentError

HEAD, ROW = 3, 9
SCENE = NEW[0]
Q, K = np.asarray(SCENE.q)[:, HEAD], np.asarray(SCENE.k)[:, HEAD // 2]
TOKENS_OF_ROW = slice(ROW * BLOCK, (ROW + 1) * BLOCK)
SEEN = K[: (ROW + 1) * BLOCK].reshape(-1, BLOCK, DIM)


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "proxy", [estimators.POOLED, estimators.BOUNDS, estimators.antidiagonals(8)]
)
def test_masses_of_visible_blocks_sum_to_one(proxy):
    mass = proxy.mass(SCENE)
    assert np.isfinite(mass).all() and not mass[:, ~np.tri(BLOCKS, dtype=bool)].any()
    np.testing.assert_allclose(mass.sum(axis=-1), 1, rtol=1e-5)


def test_pooled_masses_are_softmaxes_of_mean_against_mean():
    expected = softmax(SCALE * SEEN.mean(axis=1) @ Q[TOKENS_OF_ROW].mean(axis=0))
    found = estimators.pooled_mass(SCENE)[HEAD, ROW, : ROW + 1]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_bounds_lie_above_every_score_of_their_block():
    queries, low, high = Q[TOKENS_OF_ROW, None], SEEN.min(axis=1), SEEN.max(axis=1)
    bounds = np.maximum(queries * low, queries * high).sum(axis=-1)
    assert (bounds >= np.einsum("qod,nkd->qnk", queries, SEEN).max(axis=-1) - 1e-4).all()
    found = estimators.bound_mass(SCENE)[HEAD, ROW, : ROW + 1]
    np.testing.assert_allclose(found, softmax(SCALE * bounds).mean(axis=0), rtol=1e-4)


@pytest.mark.parametrize("stride", [4, 16])
def test_antidiagonals_meet_every_query_and_key_of_a_cell_once(stride):
    cells = TOKENS // stride
    logits = np.full((cells, cells), -np.inf)
    for row, column in zip(*np.tril_indices(cells), strict=True):
        queries = Q[row * stride : (row + 1) * stride]
        keys = K[column * stride : (column + 1) * stride]
        pairs = [queries[stride - 1 - step] @ keys[step] for step in range(stride)]
        logits[row, column] = SCALE * np.mean(pairs)
    by_cell = softmax(logits).reshape(BLOCKS, BLOCK // stride, BLOCKS, BLOCK // stride)
    found = estimators.antidiagonal_mass(SCENE, stride)[HEAD]
    np.testing.assert_allclose(found, by_cell.sum(axis=-1).mean(axis=1), rtol=1e-3, atol=1e-6)


def test_a_stride_must_fill_blocks():
    with pytest.raises(ArgumentError, match="XSK-102.stride-block"):
        estimators.antidiagonal_mass(SCENE, 32)


def test_gates_are_queries_against_mean_keys():
    found = estimators.gate_scores(SCENE)[HEAD, ROW, :, : ROW + 1]
    expected = SCALE * Q[TOKENS_OF_ROW] @ SEEN.mean(axis=1).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_last_queries_are_attended_exactly():
    found = estimators.last_attention(SCENE, 64)
    np.testing.assert_allclose(found, attention_of(SCENE.q, SCENE.k)[:, -64:], atol=1e-5)
    assert estimators.last_attention(SCENE, 10 * TOKENS).shape[1] == TOKENS


def test_stripes_are_the_shares_of_block_columns_and_block_diagonals():
    """A diagonal of tokens meets two of blocks, by where in its block a query stands."""
    attention = attention_of(SCENE.q, SCENE.k)[:, -BLOCK:]
    columns, slashes = stripes(attention.astype(np.float32), BLOCK)
    blocks = attention.reshape(len(attention), BLOCK, BLOCKS, BLOCK).sum(axis=-1).mean(axis=1)
    np.testing.assert_allclose(columns, blocks, rtol=1e-4, atol=1e-7)
    expected = np.zeros_like(slashes)
    for query, key in np.ndindex(BLOCK, TOKENS):
        back = TOKENS - BLOCK + query - key
        if back >= 0:
            for place in range(BLOCK):
                step = min(-((place - back) // BLOCK), BLOCKS - 1)
                expected[:, step] += attention[:, query, key] / BLOCK**2
    np.testing.assert_allclose(slashes, expected, rtol=1e-3, atol=1e-6)


def counted(flops, tokens):
    return flops / sum(4 * DIM for query in range(tokens) for _ in range(query + 1))


def test_costs_are_products_counted_one_by_one():
    blocks = [(i, j) for i in range(BLOCKS) for j in range(i + 1)]
    sizes = TOKENS, BLOCK, DIM
    assert estimators.zero_cost(*sizes) == 0
    pooled = counted(sum(2 * DIM for _ in blocks), TOKENS)
    np.testing.assert_allclose(estimators.pooled_cost(*sizes), pooled)
    np.testing.assert_allclose(estimators.gate_cost(*sizes), BLOCK * pooled)
    np.testing.assert_allclose(estimators.bound_cost(*sizes), 2 * BLOCK * pooled)
    cells = sum(row + 1 for row in range(TOKENS // 8))
    np.testing.assert_allclose(
        estimators.antidiagonal_cost(8)(*sizes), counted(cells * 16 * DIM, TOKENS)
    )
    pairs = sum(query + 1 for query in range(TOKENS - 64, TOKENS))
    np.testing.assert_allclose(
        estimators.last_queries_cost(64)(*sizes), counted(2 * DIM * pairs, TOKENS)
    )
    np.testing.assert_allclose(estimators.last_queries_cost(999)(*sizes), 0.5)


@pytest.mark.parametrize(
    ("name", "percent"),
    {
        "a_shape": 0,
        "pooled_top_k": 0.05,
        "xattention_8": 6.25,
        "xattention_16_top_p": 3.13,
        "quest": 3.14,
        "moba": 1.57,
        "vertical_slash": 0.78,
        "flexprefill": 1.6,
        "oracle_model": 0,
    }.items(),
)
def test_rules_cost_what_the_literature_says(name, percent):
    np.testing.assert_allclose(100 * RULES[name]().cost(8192, 32, 64), percent, atol=0.011)
