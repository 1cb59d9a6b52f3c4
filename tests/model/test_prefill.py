"""Prefill in chunks: the same bits for every cut, the blocks of a whole prompt, no look ahead."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.hads.sample import model as identity
from tests.hads.sample import profile as made_up_profile
from xsake import hads
from xsake.attention.layer_call import LayerCall
from xsake.cache import LayerPages
from xsake.errors import ArgumentError, UnsupportedError
from xsake.hads.selectors import SELECTORS, make_selector
from xsake.masks import Causal, Sinks, Window
from xsake.model import Decoder, DecoderConfig, DenseAttention, MaskedAttention
from xsake.model.prefill import CompiledPrograms, Prefill

CONFIG = DecoderConfig.tiny(layers=2, context=512)
LENGTH, CAPACITY, TILE, BLOCK = 301, 320, 64, 16
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, LENGTH)
PROGRAMS = CompiledPrograms()


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def make_plan(selector: str) -> hads.SparsityPlan:
    """Made up, with the sizes of the model."""
    rng = np.random.default_rng(1)
    profile = made_up_profile(heads=CONFIG.q_heads, n=20, weights=3)
    components = np.argsort(rng.random((2, CONFIG.kv_heads, CONFIG.head_dim)), axis=-1)
    profile = profile.model_copy(
        update={
            "model": identity(2, CONFIG.q_heads, CONFIG.kv_heads, CONFIG.head_dim),
            "block": BLOCK, "context": BLOCK * 20, "components": components,
            "curves": {selector: profile.curves["pooled"]},
            "selector_weights": {selector: rng.uniform(0.1, 1, (2, CONFIG.q_heads, 3))},
        }
    )  # fmt: skip
    spec = make_selector(selector).spec(LENGTH, BLOCK, CONFIG.head_dim)
    return hads.SparsityPlan.of(profile, hads.make_policy("kl"), 0.5, selector=spec)


@functools.cache  # programs are compiled for each instance
def by_row(selector: str) -> hads.PlanAttention:
    return hads.PlanAttention(make_plan(selector), hads.BudgetScope.ROW)


def read(model, tokens, cuts, attend):
    """Logits after the last token, and the cache, of a prompt cut at some positions."""
    cache = model.empty_cache(1, capacity=CAPACITY)
    prefill = Prefill(model, cache, len(tokens), attend=attend, tile=TILE, programs=PROGRAMS)
    for chunk in np.split(tokens, cuts):
        prefill.add(chunk)
    logits, cache = prefill.finish()
    return np.asarray(logits), np.asarray(cache.pages.k), np.asarray(cache.pages.v)


@functools.partial(nnx.jit, static_argnames="attend")
def read_at_once(model, attend):
    hidden, cache = model.prefill(
        TOKENS[None], np.array([LENGTH]), capacity=CAPACITY, attend=attend
    )
    return model.logits(hidden[0, -1]), cache.pages.k


def test_a_dense_prompt_in_chunks_is_a_whole_prompt(model):
    mask = MaskedAttention(Causal() & (Window(left=90, right=0) | Sinks(2)))
    for attend in (DenseAttention(), mask):
        found = read(model, TOKENS, [100, 101], attend)[:2]
        for one, other in zip(found, read_at_once(model, attend), strict=True):
            np.testing.assert_allclose(one, other, atol=3e-5)


@pytest.mark.parametrize("attend", [DenseAttention(), by_row("sampled")], ids=["dense", "plan"])
def test_results_do_not_depend_on_the_chunks(model, attend):
    rng = np.random.default_rng(2)
    whole = read(model, TOKENS, [], attend)
    for _ in range(200):
        count = rng.integers(0, LENGTH)
        cuts = np.sort(rng.choice(np.arange(1, LENGTH), min(count, rng.integers(1, 40)), False))
        for one, other in zip(read(model, TOKENS, cuts, attend), whole, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("tokens", [LENGTH, 96, 20])
def test_a_chunk_has_the_blocks_of_the_whole_prompt(selector, tokens):
    attend, rng = by_row(selector), np.random.default_rng(3)
    draw = lambda heads: jnp.asarray(rng.standard_normal((2, tokens, heads, CONFIG.head_dim)) * 2)
    q, k = draw(CONFIG.q_heads).astype(jnp.float32), draw(CONFIG.kv_heads).astype(jnp.float32)
    call = LayerCall(1, Causal(), CONFIG.scale)
    expected = np.asarray(jax.jit(lambda q, k: attend.chosen(q, k, call))(q, k))
    padded = jnp.pad(k, ((0, 0), (0, CAPACITY - tokens), (0, 0), (0, 0)), constant_values=7.0)

    @jax.jit
    def choose(state, chunk, first, count):
        positions = jnp.broadcast_to(first + jnp.arange(TILE)[None], (2, TILE))
        prefill = state.get_layer(1, jnp.full(2, first + count))
        at = LayerPages(None, 1, None, None, prefill=prefill)
        here = dataclasses.replace(call, q_positions=positions, pages=at)
        return attend.chosen_in_chunk(chunk, padded, here), state.store_queries(1, chunk)

    state = attend.init_prefill([tokens] * 2, CAPACITY, jnp.float32)
    for first in range(0, tokens, TILE):
        chunk = q[:, first : first + TILE]
        count = chunk.shape[1]
        chunk = jnp.pad(chunk, ((0, 0), (0, TILE - count), (0, 0), (0, 0)), constant_values=-3.0)
        chosen, state = choose(state, chunk, first, count)
        rows = slice(first // BLOCK, -(-(first + count) // BLOCK))
        found = np.asarray(chosen)[:, :, : rows.stop - rows.start, : expected.shape[-1]]
        np.testing.assert_array_equal(found, expected[:, :, rows])


def test_a_plan_in_chunks_is_the_plan_of_the_whole_prompt(model):
    attend = by_row("sampled")
    found = read(model, TOKENS, [77], attend)[:2]
    for one, other in zip(found, read_at_once(model, attend), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)
    dense, _, _ = read(model, TOKENS, [77], DenseAttention())
    assert np.abs(found[0] - dense).max() > 1e-3


@pytest.mark.parametrize("position", [40, 130, 300])
def test_no_block_depends_on_later_tokens(model, position):
    """Keys of the blocks before a changed token keep their bits in every layer."""
    changed = TOKENS.copy()
    changed[position] += 1
    before, after = (read(model, x, [], by_row("sampled")) for x in (TOKENS, changed))
    page = position // BLOCK
    for one, other in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(one[:, :page], other[:, :page])
        assert (one[:, page] != other[:, page]).any()


def test_prompts_of_different_lengths_share_a_chunk(model):
    """Both rows of a batch, in chunks, have the results of their own prompts."""
    attend, lengths = by_row("sampled"), [150, 70]
    cache = model.empty_cache(2, capacity=CAPACITY)
    state = attend.init_prefill(lengths, CAPACITY, jnp.float32)
    cache = dataclasses.replace(cache, prefill=state)
    last = {}
    extend = jax.jit(
        lambda tokens, cache, count: model.extend(tokens, cache, attend=attend, count=count)
    )
    for first in range(0, 150, TILE):
        count = np.clip(np.array(lengths) - first, 0, TILE)
        tokens = np.stack([np.pad(TOKENS[first : first + n], (0, TILE - n)) for n in count])
        hidden, cache = extend(tokens, cache, count)
        last |= {row: hidden[row, n - 1] for row, n in enumerate(count) if n}
    for row, tokens in enumerate(lengths):
        expected, _, _ = read(model, TOKENS[:tokens], [], attend)
        np.testing.assert_allclose(model.logits(last[row]), expected, atol=3e-5)


def test_what_cannot_be_processed_in_chunks_is_refused(model):
    make = lambda tokens=LENGTH, **options: Prefill(
        model, model.empty_cache(1, capacity=CAPACITY), tokens, **options
    )
    whole = hads.PlanAttention(make_plan("sampled"))
    for slug, kind, call in (
        ("prefill-attend", ArgumentError, lambda: make(attend=whole)),
        ("prefill-tile", ArgumentError, lambda: make(attend=by_row("pooled"), tile=40)),
        ("prefill-too-long", ArgumentError, lambda: make(5).add(TOKENS[:6])),
        ("prefill-incomplete", ArgumentError, lambda: make(5).finish()),
        ("plan-chunks", UnsupportedError, lambda: whole.init_prefill([5], 64, jnp.float32)),
    ):
        with pytest.raises(kind) as refusal:
            call()
        assert refusal.value.slug == slug
