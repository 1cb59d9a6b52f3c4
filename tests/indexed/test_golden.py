"""MSA in our decoder layer against MiniMax-M3 in transformers: logits, and gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from xsake import indexed
from xsake.attention.layer_call import LayerCall
from xsake.masks import Causal
from xsake.model import DecoderConfig
from xsake.model.config import IndexerConfig, Rope
from xsake.model.indexed_layer import IndexedAttention
from xsake.model.layers import Norm, cos_sin_tables, rotate

GOLDEN = Path(__file__).parent / "golden"
LAYERS, WIDTH, HEAD_DIM = 2, 16, 8
BLOCKS = {
    "group_2": indexed.Config(size=8, count=3),
    "group_4": indexed.Config(size=4, count=2, local=2),
    "group_1": indexed.Config(size=16, count=2),
}
# Their name of each parameter of our layer.
NAMES = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj",
    "query_norm.weight": "q_norm", "key_norm.weight": "k_norm",
    "indexer.query": "indexer.q_proj", "indexer.key": "indexer.k_proj",
    "indexer.query_norm.weight": "indexer.q_norm", "indexer.key_norm.weight": "indexer.k_norm",
}  # fmt: skip


def config_of(name: str, weights: dict) -> DecoderConfig:
    key, query = (weights[f"w.model.layers.0.self_attn.{x}_proj.weight"] for x in "kq")
    return DecoderConfig.tiny(
        vocab_size=32, width=WIDTH, layers=LAYERS, q_heads=len(query) // HEAD_DIM,
        kv_heads=len(key) // HEAD_DIM, head_dim=HEAD_DIM, has_qk_norm=True, norm_offset=1.0,
        norm_epsilon=1e-6, indexer=IndexerConfig(blocks=BLOCKS[name], dim=HEAD_DIM),
    )  # fmt: skip


def attention_weights(layer, arrays: dict, number: int, prefix: str) -> dict:
    """The arrays of a layer by our names, in our shapes."""
    shapes = {".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(layer))}
    assert shapes.keys() == NAMES.keys()
    found = {}
    for name, theirs in NAMES.items():
        x = arrays.get(f"{prefix}.model.layers.{number}.self_attn.{theirs}.weight")
        if x is not None:
            found[name] = x.T.reshape(shapes[name])  # theirs is [out, in]
    return found


def filled(layer, weights: dict):
    graph, state = nnx.split(layer)
    fill = lambda path, variable: variable.replace(jnp.asarray(weights[".".join(map(str, path))]))
    return nnx.merge(graph, nnx.map_state(fill, state))


def norm(config: DecoderConfig, weight, x):
    layer = Norm(config, len(weight), "embed", jnp.float32)
    layer.weight[...] = jnp.asarray(weight)
    return layer(x)


def mlp(arrays: dict, number: int, x):
    """MiniMax's own, which our decoder does not have."""
    get = lambda name: arrays[f"w.model.layers.{number}.mlp.{name}_proj.weight"].T
    gate, up = jnp.split(x @ get("gate_up"), 2, axis=-1)
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate) @ get("down")


def logits(config: DecoderConfig, arrays: dict, layers: list):
    tokens = arrays["tokens"]
    tables = cos_sin_tables((Rope(),), HEAD_DIM, jnp.arange(tokens.shape[1])[None])[0]
    turn = lambda x: rotate(x, tables)

    def attend(q, k, v, native):
        layer, index = native
        call = LayerCall(0, Causal(), config.scale)
        return layer.make_call(index, turn)(turn(q), turn(k), v, call), None

    x = jnp.asarray(arrays["w.model.embed_tokens.weight"])[tokens]
    for number, layer in enumerate(layers):
        name = f"w.model.layers.{number}"
        own = norm(config, arrays[f"{name}.input_layernorm.weight"], x)
        x = x + layer(own, attend)[0]
        own = norm(config, arrays[f"{name}.post_attention_layernorm.weight"], x)
        x = x + mlp(arrays, number, own)
    x = norm(config, arrays["w.model.norm.weight"], x)
    return x @ arrays["w.lm_head.weight"].T


@pytest.mark.parametrize("name", BLOCKS)
def test_logits_and_gradients_are_those_of_transformers(name):
    arrays = load_file(GOLDEN / f"{name}.safetensors")
    config = config_of(name, arrays)
    layers = [IndexedAttention(config, nnx.Rngs(0), jnp.float32) for _ in range(LAYERS)]
    weights = [attention_weights(x, arrays, n, "w") for n, x in enumerate(layers)]

    def loss(weights):
        made = [filled(layer, own) for layer, own in zip(layers, weights, strict=True)]
        result = logits(config, arrays, made)
        return (result * arrays["weight"]).sum(), result

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    largest = np.abs(arrays["logits"]).max()
    np.testing.assert_allclose(found, arrays["logits"], atol=2e-5 * largest)
    for number, own in enumerate(gradients):
        expected = attention_weights(layers[number], arrays, number, "g")
        assert {x for x in NAMES if x.startswith("indexer")} == own.keys() - expected.keys()
        for key, right in expected.items():
            np.testing.assert_allclose(own[key], right, atol=2e-5 * np.abs(right).max())
        assert not any(np.asarray(own[x]).any() for x in own if x.startswith("indexer"))
