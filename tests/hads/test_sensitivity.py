"""Effects: what skipped blocks do to predictions, against float64 and against the truth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake import hads
from xsake.errors import ArgumentError
from xsake.hads.selectors import Pooled, Sampled, ScoringContext
from xsake.hads.sensitivity import head_effects, make_effect_hook
from xsake.masks import Causal, Window
from xsake.model import Decoder, DecoderConfig
from xsake.model.observer import Observer

FORCED = hads.ForcedBlocks()


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_effects(q, k, v, grad, order, seen, scale, softcap, block):
    """The definition in float64: every level's blocks kept, attention computed anew."""
    tokens, heads, n = q.shape[0], q.shape[1], order.shape[-1]
    found = np.zeros((heads, n + 1))
    for head in range(heads):
        own = head * k.shape[1] // heads
        scores = q[:, head] @ k[:, own].T * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        dense = softmax(np.where(seen, scores, -np.inf)) @ v[:, own]
        for level in range(n + 1):
            for i in range(tokens):
                row = i // block
                count = max(level, int(FORCED.counts(n)[row]))
                kept = np.isin(np.arange(tokens) // block, order[head, row, :count]) & seen[i]
                sparse = softmax(np.where(kept, scores[i], -np.inf)) @ v[:, own]
                found[head, level] += np.dot(grad[i, head], sparse - dense[i]) ** 2
    return found / (2 * tokens)


@pytest.mark.parametrize(
    ("tokens", "mask", "softcap"),
    [(48, Causal(), None), (43, Causal(), 2.0), (43, Window(20, 0), None)],
)
def test_effects_are_what_every_choice_would_change(tokens, mask, softcap, monkeypatch):
    monkeypatch.setattr("xsake.hads.sensitivity.QUERY_CHUNK", 16)
    block, heads, dim = 8, 4, 6
    n = -(-tokens // block)
    random = np.random.default_rng(0)
    q, grad = random.normal(size=(2, tokens, heads, dim)).astype(np.float32)
    k, v = random.normal(size=(2, tokens, 2, dim)).astype(np.float32)
    order = np.argsort(
        np.where(FORCED.grid(n), -2, np.where(np.tri(n), -random.random((heads, n, n)), 1)), axis=-1
    )
    at = np.arange(tokens, dtype=np.int32)
    seen = np.asarray(mask.allows(at[:, None], at[None]))
    found = head_effects(
        *(jnp.asarray(x)[None] for x in (q, k, v, grad, order)),
        ScoringContext(block, 0.7, mask, softcap), FORCED,
    )  # fmt: skip
    wide = (x.astype(np.float64) for x in (q, k, v, grad))
    expected = plain_effects(*wide, order, seen, 0.7, softcap, block)
    np.testing.assert_allclose(found[0], expected, rtol=2e-4, atol=2e-6)
    assert np.abs(expected[:, -1]).max() < 1e-12 < expected[:, 3].min()


LAYERS, HEADS, DIM, VOCABULARY, BLOCK = 1, 2, 8, 16, 8
MODEL = hads.CalibratedModel(
    name="toy", digest="0", layers=LAYERS, q_heads=HEADS, kv_heads=1, head_dim=DIM
)


def toy(params, tokens, attention):
    x = params["embedding"][tokens]
    q = x[:, :, None, :] * np.array([1, 3], np.float32)[None, None, :, None]
    seen = attention(q, x[:, :, None], x[:, :, None])
    return (x + 0.3 * seen.sum(2)) @ params["head"]


@pytest.fixture(scope="module")
def params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, DIM)),
        "head": jax.random.normal(keys[1], (DIM, VOCABULARY)) * 0.3,
    }


def test_an_effect_is_the_divergence_of_predictions(params):
    """One layer, so that no query's error reaches another: second order is all that is left out."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 64).astype(np.int32)
    n, draws = len(tokens) // BLOCK, 256
    weights = np.array([[[1.0, 0, 0]] * HEADS])
    hook = make_effect_hook(
        (Pooled(),), {"pooled": weights}, np.zeros((1, 1, DIM), int), BLOCK, FORCED
    )
    reader = hads.observer(toy, params)
    perturbation = {"pooled": jnp.zeros((LAYERS, draws, HEADS, n + 1))}
    batch = jnp.broadcast_to(tokens, (draws, len(tokens)))
    found = reader.grads(batch, np.arange(draws, dtype=np.int32), hook, perturbation)
    effect = np.asarray(found["pooled"][0]).mean(0)
    for head in range(HEADS):
        for level in (3, 4, 5):
            truth = divergence(params, tokens, head, level)
            assert 0.7 < effect[head, level] / truth < 1.4, (head, level, effect[head], truth)


def divergence(params, tokens, sparse_head: int, level: int) -> float:
    """KL(dense || sparse) of the toy's predictions if one head keeps so many blocks per row."""
    n = len(tokens) // BLOCK
    at = np.arange(len(tokens))

    def attention(q, k, v):
        scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * DIM**-0.5
        order = jnp.argsort(-priorities(q, k), axis=-1)
        taken = np.maximum(FORCED.counts(n), level)[:, None] > np.argsort(order, axis=-1)
        taken = np.asarray(taken)[0, sparse_head]
        keep = np.ones((HEADS, len(tokens), len(tokens)), bool)
        keep[sparse_head] = taken[at[:, None] // BLOCK, at[None] // BLOCK]
        keep &= at[:, None] >= at[None]
        weights = jax.nn.softmax(jnp.where(keep[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])

    def priorities(q, k):
        masses = np.asarray(Pooled().masses(q, k, ScoringContext(BLOCK, DIM**-0.5)))
        return np.where(FORCED.grid(n), 9.0, np.where(np.tri(n, dtype=bool), masses, -1.0))

    dense = jax.nn.log_softmax(toy(params, tokens[None], hads.AttentionRecorder(lambda *_: None)))
    sparse = jax.nn.log_softmax(toy(params, tokens[None], attention))
    return float((jnp.exp(dense) * (dense - sparse)).sum(-1).mean())


def test_a_backward_hook_leaves_the_model_as_it_is(params):
    """Gradients by the weights are the same with the hook and without it."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (1, 32)).astype(np.int32)
    weights = np.array([[[1.0, 0, 0]] * HEADS])
    hook = make_effect_hook(
        (Pooled(),), {"pooled": weights}, np.zeros((1, 1, DIM), int), BLOCK, FORCED
    )
    perturbation = {"pooled": jnp.zeros((LAYERS, 1, HEADS, 5))}
    recorder = functools.partial(hads.AttentionRecorder, lambda *_: None)
    hooks = {"backward_hook": hook, "perturbation": perturbation}
    loss = lambda p, **hooks: toy(p, tokens, recorder(**hooks)).sum()
    mine, other = jax.grad(loss)(params, **hooks), jax.grad(loss)(params)
    assert all((mine[name] == other[name]).all() for name in params)


@pytest.fixture(scope="module")
def readings():
    draw = np.random.default_rng(0).integers(0, 96, (4, 64))
    return [
        hads.CalibrationDocument(f"text {i}", row.astype(np.int32)) for i, row in enumerate(draw)
    ]


def calibrated(readings, *, devices=None, effects=2, batch_size=1, **keywords):
    model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
    config = model.config
    identity = hads.CalibratedModel(
        name="tiny", digest="0", layers=config.layers, q_heads=config.q_heads,
        kv_heads=config.kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    settings = hads.CalibrationSettings(
        block=8, selectors=(Sampled(2, 4),), effect_documents=effects, batch_size=batch_size
    )
    observer = Observer(model, devices=devices)
    return hads.calibrate(observer, identity, readings, settings, **keywords)


@pytest.mark.slow  # three calibrations, one of them on two devices
def test_calibration_measures_effects_whatever_the_order_and_the_devices(readings, tmp_path):
    seen = []
    profile = calibrated(readings, cache=hads.MassCache(tmp_path), on_progress=seen.append)
    assert [(x.done, x.total) for x in seen] == [(i, 6) for i in range(1, 7)]
    effect = profile.effects["sampled"]
    assert effect.shape == profile.curves["sampled"].shape and (effect[..., 3] > 0).all()
    assert calibrated(readings[::-1], cache=hads.MassCache(tmp_path)).digest == profile.digest
    wide = calibrated(readings, devices=jax.devices()[:2], batch_size=2)
    np.testing.assert_allclose(wide.effects["sampled"], effect, rtol=0.02, atol=1e-9)
    plan = hads.make_plan(profile, hads.make_policy("effect"), 0.6, Sampled(2, 4))
    assert plan.scope is hads.BudgetScope.ROW


def test_copies_are_for_effects_only_and_only_in_so_many_documents(params, readings):
    few = [hads.CalibrationDocument(x.name, x.tokens % VOCABULARY) for x in readings]
    reader, asked = hads.observer(toy, params), []

    class Spy:
        def __call__(self, tokens, watch):
            return reader(tokens, watch)

        def grads(self, tokens, seeds, hook, perturbation):
            asked.append(np.asarray(tokens[0]))
            return perturbation

    settings = hads.CalibrationSettings(
        block=8, selectors=(Pooled(),), effect_documents=3, copied_documents=2
    )
    profile = hads.calibrate(Spy(), MODEL, few, settings)
    assert {x.sha256 for x in profile.documents} == {x.sha256 for x in few}
    whole = [x.tokens for x in sorted(few, key=lambda x: x.sha256)][:3]
    for tokens, own in zip(asked[:2], whole[:2], strict=True):
        np.testing.assert_array_equal(tokens, np.concatenate([own[:56], own[:8]]))
    np.testing.assert_array_equal(asked[2], whole[2])


def test_models_that_cannot_tell_are_told_so(params, readings):
    settings = hads.CalibrationSettings(block=8, selectors=(Pooled(),), effect_documents=1)
    few = [hads.CalibrationDocument(x.name, x.tokens % VOCABULARY) for x in readings]
    silent = hads.observer(lambda *x: None if toy(*x) is not None else None, params)
    with pytest.raises(ArgumentError, match="XSK-102.effects-logits"):
        hads.calibrate(silent, MODEL, few, settings)
    reader = hads.observer(toy, params)
    with pytest.raises(ArgumentError, match="XSK-102.calibration-effects"):
        hads.calibrate(reader.__call__, MODEL, few, settings)
