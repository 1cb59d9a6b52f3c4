"""A plan as attention: what it chooses is what it computes, at any length, without recompiling."""

import jax
import numpy as np
import pytest
from flax import nnx

import xsake
from tests.hads.sample import model as identity
from tests.lanes import slow
from xsake import hads
from xsake.hads.error_bounds import audit
from xsake.masks import Causal
from xsake.model import Decoder, DecoderConfig, LayerCall
from xsake.model.observer import Observer

CONFIG = DecoderConfig.tiny(layers=2)
BLOCK = 16


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, 160), 0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def profile(model, tokens):
    readings = [hads.CalibrationDocument(str(i), np.asarray(row)) for i, row in enumerate(tokens)]
    settings = hads.CalibrationSettings(block=BLOCK, selectors=(hads.make_selector("sampled"),))
    return hads.calibrate(Observer(model), identity(2, 6, 2), readings, settings)


def planned(profile, policy="kl", budget=0.5, **options):
    selector = hads.make_selector("sampled")
    plan = hads.make_plan(profile, hads.make_policy(policy), budget, selector)
    return hads.PlanAttention(plan, **options)


@pytest.mark.parametrize("policy", ["static", "original", slow("kl")])
def test_a_layer_computes_the_blocks_that_were_chosen(profile, policy):
    attend = planned(profile, policy)
    keys = jax.random.split(jax.random.key(2), 3)
    heads = (CONFIG.q_heads, CONFIG.kv_heads, CONFIG.kv_heads)
    q, k, v = (
        jax.random.normal(key, (2, 150, count, CONFIG.head_dim))
        for key, count in zip(keys, heads, strict=True)
    )
    call = LayerCall(layer=1, mask=Causal(), scale=CONFIG.scale)
    chosen = np.asarray(attend.chosen(q, k, call))
    pairs = chosen.repeat(BLOCK, 2).repeat(BLOCK, 3)[:, :, :150, :150] & np.tri(150, dtype=bool)
    wide = lambda x: np.asarray(x).repeat(CONFIG.q_heads // CONFIG.kv_heads, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, wide(k)) * CONFIG.scale
    scores = np.where(pairs, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhqk,bkhd->bqhd", weights, wide(v))
    found = np.asarray(attend(q, k, v, call))
    assert np.isfinite(found).all() and np.abs(found - expected).max() < 2e-5
    total = attend.plan.totals(10)[1].sum()
    assert chosen.sum((1, 2, 3)).tolist() == [total, total]


@pytest.mark.slow  # test_error_bounds has it without a model
def test_a_bounded_plan_drops_no_more_than_it_promises(model, tokens, profile):
    selector = hads.make_selector("sampled")
    policy = hads.make_policy("bounded", eps=0.3)
    attend = hads.PlanAttention(hads.make_plan(profile, policy, 0.5, selector))
    worst = lambda q, k, v, call: audit(
        q, k, attend.chosen(q, k, call), block=BLOCK, scale=call.scale
    ).mass.max()
    dropped = np.asarray(model.observe(tokens, worst))
    assert np.isfinite(dropped).all() and 0 < dropped.max() <= 0.3 + 1e-5
    assert np.isfinite(np.asarray(model.hidden(tokens, attend=attend))).all()


@pytest.mark.slow  # quicker: a part of the budget
def test_a_whole_budget_is_dense_attention(model, tokens, profile):
    dense = model(tokens)
    found = model(tokens, attend=planned(profile, "uniform", 1.0))
    assert np.abs(np.asarray(dense - found)).max() < 1e-4


@pytest.mark.slow  # quicker: training/test_attention.py
def test_new_inputs_compile_nothing(model, tokens, profile):
    graph, weights = nnx.split(model)
    attend = planned(profile)
    run = jax.jit(lambda weights, x: nnx.merge(graph, weights).hidden(x, attend=attend))
    run(weights, tokens)
    run(weights, (tokens + 1) % CONFIG.vocab_size)
    assert run._cache_size() == 1


@pytest.mark.slow  # test_topk has it without a model
def test_rows_of_their_own_count_do_not_see_later_tokens(model, tokens, profile):
    attend = planned(profile, scope=hads.BudgetScope.ROW)
    other = tokens.at[:, 5 * BLOCK :].set(0)
    before = lambda x: np.asarray(model.hidden(x, attend=attend))[:, : 5 * BLOCK]
    assert np.abs(before(tokens) - before(other)).max() < 1e-5


@pytest.mark.slow  # one more model to compile
def test_decoding_after_a_planned_prefill_is_dense(model, tokens, profile):
    attend = planned(profile)
    _, cache = model.prefill(tokens, np.array([160, 160]), capacity=168, attend=attend)
    hidden, _ = model.extend(tokens[:, :1], cache, attend=attend)
    dense, _ = model.extend(tokens[:, :1], cache)
    assert (np.asarray(hidden) == np.asarray(dense)).all()


@pytest.mark.slow  # quicker: training/test_attention.py
def test_gradients_flow_through_planned_attention(model, tokens, profile):
    attend = planned(profile)
    loss = lambda model: model.hidden(tokens, attend=attend).sum()
    gradients = jax.tree.leaves(nnx.grad(loss)(model))
    assert all(np.isfinite(np.asarray(x)).all() for x in gradients)


def test_a_plan_of_another_model_is_refused(profile):
    call = LayerCall(layer=0, mask=Causal(), scale=CONFIG.scale)
    other = np.zeros((1, 64, 2 * CONFIG.q_heads, CONFIG.head_dim), np.float32)
    with pytest.raises(xsake.errors.ArgumentError, match="XSK-102.plan-attention-model"):
        planned(profile)(other, other, other, call)
