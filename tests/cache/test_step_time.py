"""A decoding step costs what it reads: the size of the pool changes nothing."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.cache import ForcedPages, Int8Keys, Labels, PagedKV, Quest
from xsake.model.cache import KVCache

LAYERS, HEADS, DIM, STEPS = 4, 2, 64, 4
LABELS = Labels(np.tile(np.arange(32), (LAYERS, HEADS, 1)))


@functools.partial(jax.jit, donate_argnums=0)
def decode(cache, q):
    """Some steps over all layers, as a decoder makes them."""

    def layer(carry, number):
        cache, q = carry
        k = q[:, :, :HEADS]
        cache, at = cache.append(number, q, k, k)
        if at.selector is None:
            return (cache, at.attend(q)), None
        counts = jnp.full((1, HEADS), 4)
        options = {"scale": 0.125, "slots": 8, "forced": ForcedPages()}
        pages = at.selector.retrieve_topk(q[:, 0], at.summaries, at, counts, **options)
        return (cache, at.attend(q, pages=pages)), None

    def step(carry, _):
        (cache, q), _ = jax.lax.scan(layer, carry, jnp.arange(LAYERS))
        return (cache.advance(1), q), None

    return jax.lax.scan(step, (cache, q), length=STEPS)[0]


def seconds_of_steps(selector, num_pages: int) -> float:
    """Shortest time of several runs; the sequence has 8 pages in any case."""
    pages = PagedKV.create(
        layers=LAYERS, num_pages=num_pages, page_size=16, kv_heads=HEADS, head_dim=DIM,
        dtype=jnp.float32,
    )  # fmt: skip
    cache = KVCache(pages, jnp.arange(8)[None], jnp.full(1, 100, jnp.int32))
    cache = cache.with_selector(selector)
    q = jnp.ones((1, 1, 2 * HEADS, DIM))
    times = []
    for _ in range(6):  # the first one compiles
        start = time.perf_counter()
        cache, _ = jax.block_until_ready(decode(cache, q))
        times.append(time.perf_counter() - start)
        cache = KVCache(
            cache.pages, cache.page_table, jnp.full(1, 100, jnp.int32), cache.summaries, selector
        )
    return min(times)


@pytest.mark.parametrize(
    "selector", [None, LABELS, Quest(), Int8Keys()], ids=lambda x: type(x).__name__
)
def test_a_step_does_not_copy_the_pool(selector):
    small, large = (seconds_of_steps(selector, pages) for pages in (8, 4096))
    assert large < 8 * small, f"{large * 1e3:.1f} ms, {small * 1e3:.1f} ms with few pages"
