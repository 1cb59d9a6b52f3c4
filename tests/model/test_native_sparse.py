"""A decoder with native sparse attention: training path, caches, and one token at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake.errors import ArgumentError, UnsupportedError
from xsake.masks import Causal, Window
from xsake.model import Decoder, DecoderConfig, MaskedAttention, NativeSparseSizes
from xsake.model.generate import GenerationOptions, generate

SIZES = NativeSparseSizes(length=8, stride=4, size=8, count=4, window=12)


def made(**changes):
    config = DecoderConfig.tiny(layers=2, native_sparse=SIZES, **changes)
    model = Decoder(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    attention = model.layers.attention
    for summary in (attention.key_summary, attention.value_summary):  # not only the mean
        for weight in (summary.places, summary.down):
            weight[...] = jnp.asarray(rng.normal(size=weight[...].shape) * 0.2, jnp.float32)
    return model


@pytest.fixture(scope="module")
def model():
    return made()


TOKENS = np.random.default_rng(0).integers(0, 96, (2, 40)).astype(np.int32)


def test_reading_at_once_equals_reading_token_by_token(model):
    whole = model.hidden(TOKENS)
    lengths = np.asarray([21, 3], np.int32)
    prompt = np.where(np.arange(21)[None] < lengths[:, None], TOKENS[:, :21], 0)
    hidden, cache = jax.jit(lambda x, n: model.prefill(x, n, capacity=40))(prompt, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(hidden[row, :length], whole[row, :length], rtol=1e-4, atol=1e-4)
    extend = jax.jit(model.extend)
    for step in range(18):
        token = TOKENS[np.arange(2), lengths + step][:, None]
        hidden, cache = extend(token, cache)
        right = whole[np.arange(2), lengths + step]
        np.testing.assert_allclose(hidden[:, 0], right, rtol=1e-4, atol=1e-4)
    assert cache.lengths.tolist() == [39, 21] and cache.capacity == 40


@pytest.mark.slow  # the first test goes the same way one token at a time
def test_several_tokens_at_once_are_as_one_after_the_other(model):
    _, cache = model.prefill(TOKENS[:, :10], np.asarray([10, 10]), capacity=40)
    hidden, longer = model.extend(TOKENS[:, 10:16], cache)
    np.testing.assert_allclose(hidden, model.hidden(TOKENS[:, :16])[:, 10:], rtol=1e-4, atol=1e-4)
    assert longer.lengths.tolist() == [16, 16]


@pytest.mark.slow  # quicker: reading at once equals reading token by token
def test_later_tokens_change_no_earlier_bit(model):
    other = TOKENS.copy()
    other[:, 25:] = 7
    before, after = model.hidden(TOKENS), model.hidden(other)
    np.testing.assert_array_equal(before[:, :25], after[:, :25])


@pytest.mark.slow  # quicker: reading at once equals reading token by token
def test_every_parameter_learns(model):
    graph, weights = nnx.split(model)

    def loss(weights):
        logits = nnx.merge(graph, weights)(TOKENS)
        picked = jax.nn.log_softmax(logits[:, :-1])[0, np.arange(39), TOKENS[0, 1:]]
        return -picked.mean()

    gradients = jax.jit(jax.grad(loss))(weights)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.isfinite(gradient).all() and (gradient != 0).any(), path


@pytest.mark.slow  # reading token by token is tested above; this is the loop around it
def test_it_generates(model):
    options = GenerationOptions(max_new_tokens=5, temperature=0)
    rows = generate(model, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [4]], options).rows
    text = [4]
    for token in rows[1].tokens:
        assert token == int(model(np.asarray([text]))[0, -1].argmax())
        text.append(token)


@pytest.mark.slow  # one more model to compile
def test_learned_positions_and_norms_work_too():
    small = made(kinds=({},), has_learned_positions=True, has_qk_norm=True)
    assert jnp.isfinite(small.hidden(TOKENS)).all()


def test_what_it_cannot_do_is_refused(model):
    with pytest.raises(ArgumentError, match="XSK-102.native-sparse-attention-replaced"):
        model.hidden(TOKENS, attend=MaskedAttention(Causal() & Window(left=3, right=0)))
    with pytest.raises(UnsupportedError, match="XSK-401.native-sparse-position"):
        model.hidden(TOKENS, segment_ids=jnp.zeros((2, 40), jnp.int32))
    with pytest.raises(ValueError, match="does not support windows"):
        DecoderConfig.tiny(native_sparse=SIZES, attention_softcap=3.0)
    for sizes, match in (
        ({"length": 10, "stride": 4}, "stride must divide"),
        ({"window": 2**25}, "window"),
        ({"width": 1}, "width"),
    ):
        with pytest.raises(ValueError, match=match):
            DecoderConfig.tiny(native_sparse=sizes)
    assert DecoderConfig.tiny(native_sparse=dataclasses.asdict(SIZES)).native_sparse == SIZES
