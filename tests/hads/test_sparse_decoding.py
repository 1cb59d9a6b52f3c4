"""A plan in decoding: every page is dense attention, fewer pages are those that it may read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.hads.sample import POOLED
from tests.hads.sample import model as identity
from tests.hads.sample import profile as made_up_profile
from xsake import hads
from xsake.attention.layer_call import LayerCall
from xsake.cache import ForcedPages, Int8Keys, Oracle, Quest
from xsake.errors import ArgumentError, UnsupportedError
from xsake.hads.sparse_decoding import count_pages, rescale_shares
from xsake.masks import Causal, Window
from xsake.model import Decoder, DecoderConfig
from xsake.model.generate import GenerationOptions, generate

CONFIG = DecoderConfig.tiny(layers=2, context=512)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 200))


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def plan():
    """Made up, with the sizes of the model."""
    return make_plan(hads.make_policy("kl"))


def make_plan(policy):
    profile = made_up_profile(heads=6, n=16)
    components = np.stack([np.random.default_rng(i).permutation(CONFIG.head_dim) for i in range(4)])
    profile = profile.model_copy(
        update={
            "model": identity(2, CONFIG.q_heads, CONFIG.kv_heads, CONFIG.head_dim),
            "components": components.reshape(2, 2, -1),
        }
    )
    return hads.SparsityPlan.of(profile, policy, 0.4, selector=POOLED)


def decode(model, attend, steps=20):
    """Logits of teacher-forced steps."""
    lengths = np.array([200 - steps, 150 - steps])
    _, cache = model.prefill(TOKENS[:, : 200 - steps], lengths, capacity=224)
    cache = cache.with_selector(getattr(attend, "page_selector", None))
    graph, weights = nnx.split(model)

    @jax.jit
    def run(weights, cache, tokens):
        def step(cache, token):
            hidden, cache = nnx.merge(graph, weights).extend(token[:, None], cache, **options)
            return cache, nnx.merge(graph, weights).logits(hidden[:, 0])

        options = {} if attend is None else {"attend": attend}
        return jax.lax.scan(step, cache, tokens)[1]

    tokens = [[TOKENS[0, 180 + i], TOKENS[1, 130 + i]] for i in range(steps)]
    return np.asarray(run(weights, cache, jnp.asarray(tokens)))


def test_a_budget_of_every_page_is_dense_decoding(model, plan):
    dense = decode(model, None)
    for selector in (None, Quest()):
        attend = hads.PlanDecoding(plan, 1.0, selector)
        np.testing.assert_allclose(decode(model, attend), dense, atol=2e-5)


def test_the_loss_of_the_best_pages_falls_with_the_budget(model, plan):
    dense = jax.nn.log_softmax(decode(model, None))

    def loss(budget):
        attend = hads.PlanDecoding(plan, budget, Oracle(), ForcedPages(num_sinks=1, num_local=16))
        sparse = jax.nn.log_softmax(decode(model, attend))
        return float((np.exp(dense) * (dense - sparse)).sum(-1).mean())

    assert loss(0.95) < loss(0.7) < loss(0.4)


def test_lists_are_as_long_as_the_shares_say(model, plan):
    attend = hads.PlanDecoding(plan, 0.5, Quest(), ForcedPages(1, 16))
    np.testing.assert_allclose(attend.shares.mean(), 0.5, atol=1e-6)
    _, cache = model.prefill(TOKENS, np.array([200, 150]), capacity=224)
    cache = cache.with_selector(attend.page_selector)
    at = cache.layer_pages(1)
    counts = np.asarray(count_pages(at, jnp.float32(attend.shares[1])))
    expected = np.ceil(np.array([13, 10])[:, None] * attend.shares[1].astype(np.float32))
    np.testing.assert_array_equal(counts, expected)
    q = jax.random.normal(jax.random.key(0), (2, CONFIG.q_heads, CONFIG.head_dim))
    pages = attend.page_selector.retrieve_topk(
        q, at.summaries, at, jnp.asarray(counts), scale=CONFIG.scale,
        slots=attend._slots(14, 16), forced=attend.forced,
    )  # fmt: skip
    np.testing.assert_array_equal((np.asarray(pages) >= 0).sum(-1), np.maximum(counts, 3))


def test_a_bounded_plan_reads_pages_until_its_limit_is_certified(model):
    """Of layer 1, against masses in float64; a loose limit is the budget, none is every page."""
    forced, (_, cache) = (
        ForcedPages(1, 16),
        model.prefill(TOKENS, np.array([200, 150]), capacity=224),
    )
    q = 4 * jax.random.normal(jax.random.key(0), (2, CONFIG.q_heads, CONFIG.head_dim))
    counts = {}
    for eps in (1e-6, 0.2, 1.0):
        attend = hads.PlanDecoding(
            make_plan(hads.make_policy("bounded", eps=eps)), 0.1, None, forced
        )
        at = cache.with_selector(attend.page_selector).layer_pages(1)
        call = LayerCall(1, Causal(), CONFIG.scale, None, pages=at)
        pages = np.asarray(attend.retrieve(q, call))
        k = np.repeat(np.float64(at.gather()[0]), CONFIG.q_heads // CONFIG.kv_heads, axis=2)
        s = CONFIG.scale * np.einsum("bhd,bthd->bht", np.float64(q), k)
        s = np.exp(np.where(np.arange(224) < np.array([200, 150])[:, None, None], s, -np.inf))
        is_read = (pages[..., None] == np.arange(14)).any(2).repeat(3, 1)
        mass = s.reshape(2, -1, 14, 16).sum(-1)
        dropped = np.where(is_read, 0, mass).sum(-1) / mass.sum(-1)
        assert (dropped <= eps).all()
        counts[eps] = (pages >= 0).sum(-1)
    np.testing.assert_array_equal(counts[1e-6], [[13, 13], [10, 10]])
    assert (counts[0.2] >= counts[1.0]).all() and counts[1.0].sum() < counts[0.2].sum() < 46
    np.testing.assert_array_equal(
        counts[1.0], np.maximum(count_pages(at, jnp.float32(attend.shares[1])), 3)
    )


def test_heads_that_need_many_pages_for_a_limit_keep_their_budget(model, plan):
    forced, q = ForcedPages(1, 16), jax.random.normal(jax.random.key(0), (2, 6, CONFIG.head_dim))
    _, cache = model.prefill(TOKENS, np.array([200, 150]), capacity=224)

    def count(budget, **options):
        attend = hads.PlanDecoding(plan, budget, forced=forced, **options)
        at = cache.with_selector(attend.page_selector).layer_pages(1)
        call = LayerCall(1, Causal(), CONFIG.scale, None, pages=at)
        return (np.asarray(attend.retrieve(4 * q, call)) >= 0).sum(-1)

    budget, needed = count(0.1, selector=Int8Keys()), count(0.1, eps=0.2)
    assert (needed > budget).any()
    for share in (0.3, 0.6, 0.8):
        limit = np.ceil(np.array([[13], [10]]) * share)
        expected = np.where(needed <= limit, needed, budget)
        np.testing.assert_array_equal(count(0.1, eps=0.2, max_share=share), expected)


def test_a_bounded_plan_decodes_close_to_dense(model):
    dense = decode(model, None)
    exact = hads.PlanDecoding(make_plan(hads.make_policy("bounded", eps=1e-6)), 0.1)
    np.testing.assert_allclose(decode(model, exact), dense, atol=1e-4)
    with pytest.raises(ArgumentError) as refusal:
        hads.PlanDecoding(exact.plan, 0.5, Quest())
    assert refusal.value.slug == "bounded-decoding-selector"
    q = jnp.zeros((2, 1, CONFIG.q_heads, CONFIG.head_dim))
    _, cache = model.prefill(TOKENS, np.array([200, 150]), capacity=224)
    at = cache.with_selector(exact.page_selector).layer_pages(0)
    for call in (
        LayerCall(0, Window(8, 0), 1.0, None, pages=at),
        LayerCall(0, Causal(), 1.0, 30.0, pages=at),
    ):
        with pytest.raises(UnsupportedError) as refusal:
            exact(q, None, None, call)
        assert refusal.value.slug == "certified-attention"


def test_text_is_generated_by_a_plan(model, plan):
    options = GenerationOptions(max_new_tokens=6, temperature=0)
    prompts = [TOKENS[0], TOKENS[1, :70]]
    dense = generate(model, prompts, options)
    sparse = generate(model, prompts, options, decode_attend=hads.PlanDecoding(plan, 1.0))
    assert [row.tokens for row in sparse.rows] == [row.tokens for row in dense.rows]


def test_shares_keep_their_order_and_none_exceeds_1():
    shares = rescale_shares(np.random.default_rng(0).uniform(0.01, 1, (4, 3)), 0.9)
    assert shares.max() <= 1 and abs(shares.mean() - 0.9) < 1e-6


def test_what_cannot_be_decoded_is_refused(model, plan):
    for budget, max_share in ((0.0, 1.0), (1.5, 1.0), (0.5, 0.0)):
        with pytest.raises(ArgumentError) as refusal:
            hads.PlanDecoding(plan, budget, max_share=max_share)
        assert refusal.value.slug == "page-budget"
    static = hads.SparsityPlan.of(made_up_profile(heads=6, n=16), hads.make_policy("static"), 0.4)
    with pytest.raises(ArgumentError) as refusal:
        hads.PlanDecoding(static, 0.5)
    assert refusal.value.slug == "plan-without-components"
    _, cache = model.prefill(TOKENS, np.array([200, 150]), capacity=224)
    with pytest.raises(ArgumentError) as refusal:
        model.extend(TOKENS[:, :1], cache, attend=hads.PlanDecoding(plan, 0.5))
    assert refusal.value.slug == "cache-selector"
