"""A decoder with a block indexer: training path, cache, one token at a time, its own loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake import indexed
from xsake.errors import ArgumentError, UnsupportedError
from xsake.masks import Causal, Window
from xsake.model import Decoder, DecoderConfig, MaskedAttention
from xsake.model.config import IndexerConfig
from xsake.model.generate import GenerationOptions, generate
from xsake.model.prefill import Prefill

BLOCKS = indexed.Config(size=16, count=2)
INDEXERS = {
    "msa": IndexerConfig(blocks=BLOCKS, dim=4),
    "shared": IndexerConfig(blocks=indexed.Config(16, 3, 1, 1, is_shared=True), dim=8),
    "moba": IndexerConfig(blocks=indexed.Config(16, 2, pooling="mean"), dim=None),
}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 100)).astype(np.int32)
LENGTHS = np.asarray([81, 30], np.int32)


def made(name="msa", **changes) -> Decoder:
    config = DecoderConfig.tiny(layers=2, indexer=INDEXERS[name], **changes)
    return Decoder(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", INDEXERS)
def test_a_prompt_and_tokens_one_by_one_are_the_whole_text(name):
    model = made(name)
    whole = nnx.jit(lambda model: model.hidden(TOKENS))(model)
    dense = Decoder(DecoderConfig.tiny(layers=2), rngs=nnx.Rngs(0)).hidden(TOKENS)
    assert np.abs(whole - dense).max() > 1e-2
    prompt = np.where(np.arange(81)[None] < LENGTHS[:, None], TOKENS[:, :81], 0)
    hidden, cache = jax.jit(lambda x, n: model.prefill(x, n, capacity=100))(prompt, LENGTHS)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(hidden[row, :length], whole[row, :length], atol=1e-4)
    extend = jax.jit(model.extend)
    for step in range(19):
        token = TOKENS[np.arange(2), LENGTHS + step][:, None]
        hidden, cache = extend(token, cache)
        np.testing.assert_allclose(hidden[:, 0], whole[np.arange(2), LENGTHS + step], atol=1e-4)


def test_a_prompt_in_chunks_is_the_whole_text():
    model = made()
    prefill = Prefill(model, model.empty_cache(1, capacity=112), 100, tile=64)
    for chunk in np.split(TOKENS[0], [7, 50]):
        prefill.add(chunk)
    logits, cache = prefill.finish()
    np.testing.assert_allclose(logits, model(TOKENS[:1])[0, -1], atol=1e-4)
    assert cache.pages.index.shape == (2, 7, 1, 16, 4)


def test_it_generates_what_one_pass_prefers():
    model, options = made(), GenerationOptions(max_new_tokens=4, temperature=0)
    rows = generate(model, [TOKENS[0, :70].tolist(), [4]], options).rows
    for row, prompt in zip(rows, (TOKENS[0, :70], np.asarray([4])), strict=True):
        text = np.append(prompt, row.tokens)
        logits = model(text[None])[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(row.tokens)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_only_its_own_loss_trains_the_indexer(is_sparse):
    graph, weights = nnx.split(made())

    def language_loss(weights):
        return nnx.merge(graph, weights)(TOKENS).sum()

    def indexer_loss(weights):
        def watch(q, k, v, call):
            return call.native.distillation_loss(q, k, call, is_sparse=is_sparse).mean()

        return nnx.merge(graph, weights).observe(TOKENS, watch).sum()

    for loss, is_trained in ((language_loss, False), (indexer_loss, True)):
        value, gradients = jax.jit(jax.value_and_grad(loss))(weights)
        assert not is_trained or value > 1e-3
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients["layers"]["attention"]):
            is_index = "indexer" in jax.tree_util.keystr(path)
            assert jnp.isfinite(gradient).all()
            if is_index or not is_trained:
                assert bool((gradient != 0).any()) == (is_index == is_trained), path


def test_what_it_cannot_do_is_refused():
    model = made()
    with pytest.raises(ArgumentError, match=r"XSK-102.native-sparse-attention-replaced"):
        model.hidden(TOKENS, attend=MaskedAttention(Causal() & Window(left=3, right=0)))
    with pytest.raises(UnsupportedError, match=r"XSK-401.indexed-position"):
        model.hidden(TOKENS, segment_ids=jnp.zeros(TOKENS.shape, jnp.int32))
    with pytest.raises(ArgumentError, match="indexer-without-weights"):
        made("moba").observe(
            TOKENS, lambda q, k, v, call: call.native.distillation_loss(q, k, call)
        )
    with pytest.raises(ValueError, match="neither windows nor softcap"):
        DecoderConfig.tiny(indexer=INDEXERS["msa"], attention_softcap=3.0)
    with pytest.raises(ValueError, match="exclude each other"):
        DecoderConfig.tiny(indexer=INDEXERS["msa"], native_sparse={})
    with pytest.raises(ValueError, match="even"):
        IndexerConfig(dim=3)
    with pytest.raises(ValueError, match="own index"):
        IndexerConfig(blocks=indexed.Config(is_shared=True), dim=None)
    with pytest.raises(ArgumentError, match="indexed-pages"):
        small = Decoder(
            DecoderConfig.tiny(indexer=IndexerConfig(blocks=indexed.Config(8, 2))),
            rngs=nnx.Rngs(0),
        )
        small.extend(TOKENS[:, :1], small.empty_cache(2, capacity=32))
