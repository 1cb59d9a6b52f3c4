"""Intervals over documents: seeded, paired, and absent where they would mean nothing."""

import numpy as np

from xsake.evaluation.summary import estimate

RNG = np.random.default_rng(0)
TOKENS = np.full(20, 100.0)
DENSE = TOKENS * RNG.normal(3.0, 0.3, 20)


def perplexity(totals):
    return np.exp(totals[..., 1] / totals[..., 0])


def mean(totals):
    return totals[..., 1] / totals[..., 0]


def test_the_interval_holds_the_value_repeats_by_its_seed_and_is_as_wide_as_theory_says():
    sums = np.stack([TOKENS, DENSE], axis=1)
    found = estimate(perplexity, sums, seed=0)
    np.testing.assert_allclose(found.value, np.exp(DENSE.sum() / TOKENS.sum()))
    assert found.low < found.value < found.high
    assert found == estimate(perplexity, sums, seed=0) != estimate(perplexity, sums, seed=1)
    found = estimate(mean, sums, seed=0)
    expected = 2 * 1.96 * np.std(DENSE / TOKENS) / np.sqrt(20)
    np.testing.assert_allclose(found.high - found.low, expected, rtol=0.1)


def test_a_long_document_weighs_more_and_a_single_one_has_no_interval():
    sums = np.array([[900.0, 900.0 * 2], [100.0, 100.0 * 4]])
    assert estimate(mean, sums, seed=0).value == 2.2
    found = estimate(perplexity, np.array([[100.0, 300.0]]), seed=0)
    assert (found.value, found.low, found.high) == (np.exp(3.0), None, None)


def test_differences_are_paired():
    """The same loss on every document is certain, however different the documents are."""
    sums = np.stack([TOKENS, DENSE, DENSE + 0.25 * TOKENS], axis=1)
    found = estimate(lambda x: (x[..., 2] - x[..., 1]) / x[..., 0], sums, seed=0)
    np.testing.assert_allclose([found.value, found.low, found.high], 0.25, rtol=1e-9)
