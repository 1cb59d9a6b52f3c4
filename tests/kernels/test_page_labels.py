"""Scores of pages by labels: every backend against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from xsake.errors import ShapeError, UnsupportedError
from xsake.kernels.page_labels import OP, label_scores

BACKENDS = [name for name, reason in OP.implementations().items() if reason is None]


def make_inputs(rng, batch=2, heads=2, group=3, components=32, size=16, pages=12, slots=5):
    """Random labels of a pool; sequences share no page, and table slots may be empty."""
    numbers = rng.permutation(pages)[: batch * slots].reshape(batch, slots)
    lengths = rng.integers(1, size * slots + 1, batch)
    first = np.arange(slots) * size
    return {
        "q": jnp.asarray(rng.standard_normal((batch, heads, group, components)), jnp.float32),
        "codes": jnp.asarray(rng.integers(0, 256, (pages, heads, components // 2, size)), "uint8"),
        "factor": jnp.asarray(rng.uniform(0.01, 0.3, (pages, heads, components)), jnp.bfloat16),
        "page_table": jnp.asarray(np.where(first < lengths[:, None], numbers, -1)),
        "lengths": jnp.asarray(lengths),
    }


def find_scores(q, codes, factor, page_table, lengths):
    """Return the same in float64, key by key."""
    q, codes, factor = np.float64(q), np.asarray(codes), np.asarray(factor).astype(np.float64)
    scores = np.full((*q.shape[:3], page_table.shape[1]), -np.inf)
    size = codes.shape[3]
    for (b, n), page in np.ndenumerate(page_table):
        count = min(size, lengths[b] - n * size)
        if page < 0 or count <= 0:
            continue
        numbers = np.empty((codes.shape[1], 2 * codes.shape[2], size))
        numbers[:, ::2], numbers[:, 1::2] = (codes[page] & 15) - 8.0, (codes[page] >> 4) - 8.0
        keys = (numbers * factor[page, :, :, None])[:, :, :count]
        scores[b, ..., n] = np.logaddexp.reduce(np.einsum("hgr,hrt->hgt", q[b], keys), axis=-1)
    return scores


SIZES = [
    {},
    {"group": 1, "size": 32, "components": 2},
    {"group": 8, "components": 64, "size": 5},
    {"group": 6, "size": 24, "components": 10},
    {"batch": 1, "slots": 150, "pages": 200, "group": 4},
    {"heads": 1, "components": 256, "size": 256, "slots": 2},
]


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scores_are_those_of_float64(implementation, sizes):
    inputs = make_inputs(np.random.default_rng(0), **sizes)
    expected = find_scores(**{name: np.asarray(x) for name, x in inputs.items()})
    found = label_scores(**inputs, implementation=implementation)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_pages_that_are_not_listed_are_not_read(implementation):
    inputs = make_inputs(np.random.default_rng(1))
    is_listed = np.isin(np.arange(12), inputs["page_table"])
    expected = label_scores(**inputs, implementation=implementation)
    factor = jnp.where(is_listed[:, None, None], inputs["factor"], jnp.nan)
    found = label_scores(**inputs | {"factor": factor}, implementation=implementation)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name, shape", [("factor", (12, 2, 30)), ("lengths", (3,))])
def test_arrays_that_do_not_fit_are_refused(name, shape):
    inputs = make_inputs(np.random.default_rng(2))
    with pytest.raises(ShapeError, match="do not fit together"):
        label_scores(**inputs | {name: jnp.ones(shape, inputs[name].dtype)})


@pytest.mark.skipif("native_cpu" not in BACKENDS, reason="needs xsake-cpu")
def test_native_kernels_refuse_large_pages():
    inputs = make_inputs(np.random.default_rng(3), size=300, slots=1)
    with pytest.raises(UnsupportedError, match="pages of 256 tokens"):
        label_scores(**inputs, implementation="native_cpu")
