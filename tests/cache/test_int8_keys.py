"""Int8 keys: bounds on pages and on dropped mass hold for any keys, and are close to the truth."""

import functools

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.cache import ForcedPages, Int8Keys, PagedKV
from xsake.cache.pages import LayerPages

HEADS, GROUP, DIM, SIZE, SLOTS = 2, 3, 16, 4, 9
LENGTHS = np.array([33, 14])
SCALE = 0.3
SELECTOR = Int8Keys()
FINITE = st.floats(-(2.0**120), 2.0**120, width=32)
EXTREME = st.sampled_from([0.0, 1e-45, -1e-38, 1e-30, 1.0, -1.0, 127.5, 1e10, -1e30, 2.0**120])


@functools.partial(jax.jit, static_argnames="dtype")
def certify(q, k, pages, eps, dtype="float32"):
    """Bounds of pages and of listed pages, pages within eps, and the keys of the cache."""
    cache = PagedKV.create(
        layers=2, num_pages=25, page_size=SIZE, kv_heads=HEADS, head_dim=DIM, dtype=dtype
    )
    table = jnp.asarray(np.random.default_rng(1).permutation(25)[: 2 * SLOTS].reshape(2, SLOTS))
    cache = cache.append(1, table, np.zeros(2, int), k, k, LENGTHS)
    at = LayerPages(cache, 1, table, jnp.asarray(LENGTHS))
    summaries = SELECTOR.construct(SELECTOR.initialize(cache), at)
    bounds = SELECTOR.bounds(SELECTOR.group_heads(q, at, SCALE), summaries, at)
    dropped = SELECTOR.certify(q, summaries, at, pages, scale=SCALE)
    within = SELECTOR.retrieve_within(
        q, summaries, at, jnp.ones((2, HEADS), int), eps, scale=SCALE, forced=ForcedPages(1, 4)
    )
    proved = SELECTOR.certify(q, summaries, at, within, scale=SCALE)
    return bounds, dropped, within, proved, at.gather()[0]


def exact_log_sums(q, k):
    """Log-sum-exp of every page in float64, [B, Hk, G, N]; -inf: no page."""
    q, k = np.float64(q).reshape(2, HEADS, GROUP, DIM), np.float64(k)
    s = np.float64(np.float32(SCALE)) * np.einsum("bkgd,btkd->bkgt", q, k)
    s = np.where(np.arange(SLOTS * SIZE) < LENGTHS[:, None, None, None], s, -np.inf)
    return np.logaddexp.reduce(s.reshape(*s.shape[:3], SLOTS, SIZE), axis=-1)


def exact_mass(log_sums, pages):
    """Share of attention in pages that are not listed, [B, Hq]."""
    is_read = (np.asarray(pages)[..., None] == np.arange(SLOTS)).any(2)[:, :, None]
    p = np.exp(log_sums - log_sums.max(-1, keepdims=True))
    return (np.where(is_read, 0, p).sum(-1) / p.sum(-1)).reshape(2, -1)


def check(q, k, pages, eps, dtype="float32"):
    """Compare every bound with float64; return (bounds, dropped mass, its bound, exact sums)."""
    bounds, dropped, within, proved, keys = certify(q, k, pages, eps, dtype)
    exact = exact_log_sums(q, keys)
    assert (np.float64(bounds.lower) <= exact).all() and (exact <= np.float64(bounds.upper)).all()
    true = exact_mass(exact, pages)
    assert (true <= np.float64(dropped)).all()
    assert (np.asarray(proved) <= eps).all()
    assert (exact_mass(exact, within) <= np.float64(proved)).all()
    return bounds, true, np.asarray(dropped), exact


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


LISTS = arrays.arrays(np.int32, (2, HEADS, 5), elements=st.integers(-1, SLOTS - 1))
EPS = st.floats(2.0**-13, 1, width=32)


@hypothesis.given(
    seed=st.integers(0, 2**32), spread=st.floats(-20, 20), size=st.floats(-15, 6),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]), pages=LISTS, eps=EPS,
)  # fmt: skip
def test_bounds_hold_for_keys_of_any_size(seed, spread, size, dtype, pages, eps):
    """Components differ by up to 2^spread, keys are of about 2^size."""
    rng = np.random.default_rng(seed)
    factor = np.exp2(spread * rng.uniform(size=DIM) + size)
    k = (draw(rng, 2, SLOTS * SIZE, HEADS, DIM) * factor).astype(np.float32)
    q = (draw(rng, 2, HEADS * GROUP, DIM) / rng.permutation(factor)).astype(np.float32)
    check(q, k, pages, eps, dtype)


@hypothesis.given(
    keys=arrays.arrays(np.float32, (6, HEADS, DIM), elements=EXTREME | FINITE),
    q=arrays.arrays(np.float32, (2, HEADS * GROUP, DIM), elements=EXTREME | FINITE),
    which=arrays.arrays(np.int32, (2, SLOTS * SIZE), elements=st.integers(0, 5)),
    small=st.booleans(), pages=LISTS, eps=EPS,
)  # fmt: skip
def test_bounds_hold_for_adversarial_keys(keys, q, which, small, pages, eps):
    """Huge and tiny numbers, zeros, and duplicates: tokens are drawn from six keys."""
    with np.errstate(under="ignore"):
        q = q * np.float32(1e-38) if small else q
    check(q, keys[which], pages, eps)


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 0.1), ("bfloat16", 0.1), ("int8", 0.005)])
def test_bounds_are_not_vacuous(dtype, gap):
    q, k = 2 * draw(0, 2, HEADS * GROUP, DIM), draw(1, 2, SLOTS * SIZE, HEADS, DIM)
    pages = np.array([[[0, 2, 8]] * HEADS, [[0, 3, -1]] * HEADS], np.int32)
    bounds, true, dropped, exact = check(q, k, pages, 0.1, dtype)
    is_page = np.isfinite(exact)
    assert (np.asarray(bounds.upper)[is_page] - exact[is_page]).max() < gap
    assert (exact[is_page] - np.asarray(bounds.lower)[is_page]).max() < gap
    assert np.log(dropped / true).max() < 2 * gap and true.min() > 0.01


def test_tokens_of_equal_keys_share_the_mass():
    pages = np.array([[[0, 1]] * HEADS, [[0, 1]] * HEADS], np.int32)
    k = np.broadcast_to(draw(0, DIM), (2, SLOTS * SIZE, HEADS, DIM))
    _, true, dropped, _ = check(draw(1, 2, HEADS * GROUP, DIM), k, pages, 0.1)
    np.testing.assert_allclose(true[:, 0], [25 / 33, 6 / 14])
    np.testing.assert_allclose(dropped, true, atol=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_page_whose_keys_are_not_finite_is_read_or_proves_nothing(bad):
    q, k = draw(0, 2, HEADS * GROUP, DIM), draw(1, 2, SLOTS * SIZE, HEADS, DIM)
    k[0, 9, 1, 3] = bad  # page 2 of kv head 1
    pages = np.array([[[0, 1, 3]] * HEADS] * 2, np.int32)
    bounds, dropped, within, proved, _ = certify(q, k, pages, 0.2)
    assert (np.asarray(bounds.upper)[0, 1, :, 2] == np.inf).all()
    np.testing.assert_array_equal(np.asarray(dropped)[0] == 1, np.arange(2 * GROUP) >= GROUP)
    assert 2 in np.asarray(within)[0, 1] and (np.asarray(proved) <= 0.2).all()


def test_no_eps_reads_every_page_and_a_loose_one_the_fewest():
    q, k = draw(0, 2, HEADS * GROUP, DIM), draw(1, 2, SLOTS * SIZE, HEADS, DIM)
    pages = np.zeros((2, HEADS, 1), np.int32)
    counts = [(np.asarray(certify(q, k, pages, eps)[2]) >= 0).sum(-1) for eps in (0.0, 0.3, 1.0)]
    np.testing.assert_array_equal(counts[0], [[9, 9], [4, 4]])
    assert (counts[1] <= counts[0]).all() and (counts[2] <= counts[1]).all()
    assert counts[1].sum() < counts[0].sum()
    np.testing.assert_array_equal(counts[2], [[3, 3], [3, 3]])  # those forced


def test_pages_in_int8_need_no_summary():
    create = lambda dtype: PagedKV.create(
        layers=2, num_pages=10, page_size=16, kv_heads=3, head_dim=64, dtype=dtype
    )
    assert SELECTOR.bytes_per_page(create("int8")) == 0
    assert SELECTOR.bytes_per_page(create("bfloat16")) == 3 * (16 * 64 + 2 * 64)
