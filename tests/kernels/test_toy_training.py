"""A toy language model trained dense and through a full layout: the same loss curve (N11)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.layout import BlockLayout
from xsake.masks import Causal

STEPS, TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY, BATCH = 200, 48, 32, 4, 2, 31, 8


def initial(seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(
        rng.standard_normal(shape).astype(np.float32) * shape[0] ** -0.5
    )
    layer = lambda: {
        "qkv": draw(WIDTH, 3 * WIDTH),
        "mix": draw(WIDTH, WIDTH),
        "up": draw(WIDTH, 64),
        "down": draw(64, WIDTH),
    }
    return {
        "embed": draw(VOCABULARY, WIDTH),
        "place": draw(TOKENS, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def loss_of(weights, tokens, attention):
    x = weights["embed"][tokens] + weights["place"][None]
    for layer in weights["layers"]:
        q, k, v = jnp.split(
            (norm(x) @ layer["qkv"]).reshape(BATCH, TOKENS, 3 * HEADS, -1), 3, axis=2
        )
        x = x + attention(q, k, v).reshape(BATCH, TOKENS, WIDTH) @ layer["mix"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    scores = jax.nn.log_softmax(norm(x) @ weights["embed"].T)[:, :-1]
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def curve(attention):
    @jax.jit
    def step(weights, momentum, tokens):
        loss, gradient = jax.value_and_grad(loss_of)(weights, tokens, attention)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda w, m: w - 0.02 * m, weights, momentum), momentum, loss

    weights, rng, losses = initial(0), np.random.default_rng(1), []
    momentum = jax.tree.map(jnp.zeros_like, weights)
    for _ in range(STEPS):
        start, stride = rng.integers(0, VOCABULARY, (BATCH, 1)), rng.integers(1, 3, (BATCH, 1))
        tokens = jnp.asarray((start + stride * np.arange(TOKENS)) % VOCABULARY)
        weights, momentum, loss = step(weights, momentum, tokens)
        losses.append(float(loss))
    return np.array(losses)


@pytest.mark.slow
def test_full_layout_reproduces_the_dense_loss_curve():
    layout = BlockLayout.from_mask(Causal(), q_tokens=TOKENS, block_q=16, block_kv=16)
    dense = curve(functools.partial(jax.nn.dot_product_attention, is_causal=True))
    sparse = curve(functools.partial(xsake.attention, layout=layout, implementation="xla"))
    assert dense[-1] < 0.8 * dense[0], "the toy must learn, or the comparison says nothing"
    np.testing.assert_allclose(sparse, dense, rtol=1e-5)
