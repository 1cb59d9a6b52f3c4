"""Page selectors: estimates of masses, which pages are listed, and incremental updates."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.cache import ForcedPages, Int8Keys, Labels, Oracle, PagedKV, Quest
from xsake.cache.pages import LayerPages
from xsake.cache.selectors import PageMasses
from xsake.errors import ArgumentError

LAYERS, HEADS, GROUP, DIM, SIZE, SLOTS = 2, 2, 3, 16, 4, 9
LENGTHS = np.array([33, 14])
COMPONENTS = np.stack([np.arange(DIM)] * LAYERS * HEADS).reshape(LAYERS, HEADS, DIM)
SELECTORS = [Quest(), Labels(COMPONENTS), Labels(COMPONENTS[..., :8]), Oracle(), Int8Keys()]


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(params=["float32", "int8"])
def at(request):
    """Layer 1 of two sequences."""
    pages = PagedKV.create(
        layers=LAYERS, num_pages=25, page_size=SIZE, kv_heads=HEADS, head_dim=DIM,
        dtype=request.param,
    )  # fmt: skip
    table = np.random.default_rng(1).permutation(25)[: 2 * SLOTS].reshape(2, SLOTS)
    k = 2 * draw(0, 2, SLOTS * SIZE, HEADS, DIM)
    pages = pages.append(1, table, np.zeros(2, int), k, k, LENGTHS)
    return LayerPages(pages, 1, jnp.asarray(table), jnp.asarray(LENGTHS))


def true_masses(q, at):
    """Masses of pages in float64, summed over the heads of a group."""
    k, _ = at.gather()
    s = np.einsum("bkgd,btkd->bkgt", q, k).astype(np.float64)
    s = np.where(np.arange(s.shape[-1]) < LENGTHS[:, None, None, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p.reshape(*p.shape[:3], SLOTS, SIZE).sum((2, 4))


def test_the_oracle_knows_the_masses(at):
    q, oracle = draw(5, 2, HEADS, GROUP, DIM), Oracle()
    masses = oracle.masses(q, oracle.construct(oracle.initialize(at.pages), at), at)
    np.testing.assert_allclose(masses, true_masses(q, at), atol=1e-5)


@pytest.mark.parametrize(
    ("selector", "least"), [(Quest(), 0.5), (SELECTORS[1], 0.97), (Int8Keys(), 0.9999)]
)
def test_estimates_are_close_to_the_masses(at, selector, least):
    q = draw(5, 2, HEADS, GROUP, DIM) / 4
    masses = selector.masses(q, selector.construct(selector.initialize(at.pages), at), at)
    np.testing.assert_allclose(masses.sum(-1), GROUP, rtol=1e-5)
    assert np.corrcoef(np.ravel(masses), true_masses(q, at).ravel())[0, 1] > least


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda x: type(x).__name__)
def test_summaries_of_appended_tokens_are_those_of_all_at_once(selector):
    create = lambda: PagedKV.create(
        layers=LAYERS, num_pages=25, page_size=SIZE, kv_heads=HEADS, head_dim=DIM,
        dtype="float32",
    )  # fmt: skip
    table, k = jnp.arange(2 * SLOTS).reshape(2, SLOTS), draw(0, 2, 33, HEADS, DIM)
    pages, summaries, length = create(), selector.initialize(create()), 0
    for tokens in (10, 1, 1, 7, 1, 13):
        new = k[:, length : length + tokens]
        pages = pages.append(1, table, jnp.full(2, length), new, new)
        length += tokens
        at = LayerPages(pages, 1, table, jnp.full(2, length))
        summaries = selector.update(summaries, at, tokens)
    whole = selector.construct(selector.initialize(pages), at)
    for x, y in zip(jax.tree.leaves(summaries), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda x: type(x).__name__)
def test_lists_hold_the_forced_pages_and_the_largest_others(at, selector):
    summaries = selector.construct(selector.initialize(at.pages), at)
    q, counts = draw(5, 2, HEADS * GROUP, DIM), jnp.array([[5, 4], [9, 1]])
    forced = ForcedPages(num_sinks=1, num_local=4)
    run = jax.jit(
        lambda q, counts: selector.retrieve_topk(
            q, summaries, at, counts, scale=0.25, slots=6, forced=forced
        )
    )
    pages = np.asarray(run(q, counts))
    masses = selector.masses(q.reshape(2, HEADS, GROUP, DIM) * 0.25, summaries, at)
    always = ({0, 7, 8}, {0, 2, 3})
    for b, h in np.ndindex(2, HEADS):
        chosen = [int(page) for page in pages[b, h] if page >= 0]
        others = sorted(
            set(range(-(-LENGTHS[b] // SIZE))) - always[b], key=lambda n: -masses[b, h, n]
        )
        room = min(int(counts[b, h]), 6, 3 + len(others)) - 3
        assert chosen == sorted(always[b] | set(others[: max(0, room)]))
        assert (pages[b, h][len(chosen) :] == -1).all()


@hypothesis.given(st.data())
def test_lists_are_the_first_pages_by_mass(data):
    masses = st.sampled_from([-1.0, 0.0, 1e-30, 0.25, 0.5, 1.0, np.inf])
    mass = np.array(data.draw(st.lists(masses, min_size=1, max_size=12)), np.float32)
    count = data.draw(st.integers(0, len(mass) + 1))
    masses = PageMasses(jnp.asarray(mass)[None, None])
    count = max(count, (mass == np.inf).sum())
    expected = sorted(n for n in np.argsort(-mass, stable=True)[:count] if mass[n] >= 0)
    np.testing.assert_array_equal(masses.order()[0, 0], np.argsort(-mass, stable=True))
    found = np.asarray(masses.list_pages(jnp.array([[count]]), len(mass)))[0, 0]
    assert found.tolist() == expected + [-1] * (len(mass) - len(expected))


def test_bytes_of_summaries_are_counted():
    pages = PagedKV.create(
        layers=2, num_pages=10, page_size=16, kv_heads=3, head_dim=64, dtype="bfloat16"
    )
    page = 16 * pages.bytes_per_token
    assert Quest().bytes_per_page(pages) / page == 1 / 16
    components = np.zeros((2, 3, 32), int)
    assert Labels(components).bytes_per_page(pages) / page == (16 * 16 + 64) / (16 * 256)
    assert Oracle().bytes_per_page(pages) / page == 1  # keys in float32


def test_an_odd_number_of_components_is_refused():
    with pytest.raises(ArgumentError) as refusal:
        Labels(COMPONENTS[..., :5])
    assert refusal.value.slug == "label-components"
