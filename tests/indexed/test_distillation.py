"""The loss of an indexer against its definition, its gradients, its memory, and that it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.indexed.test_api import CONFIG, arrays
from xsake import indexed


def definition(q, k, index_q, index_k, seen, *, groups, has_relu=False, weights=None):
    """KL of every query and list over the pairs `seen` [B, Hg, T, T]; plain autodiff."""
    q, k = jax.lax.stop_gradient((q, k))
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    per_list = q.shape[2] // groups
    each = jnp.repeat(seen, per_list, axis=1)
    p = jax.nn.softmax(jnp.where(each, s, -jnp.inf), axis=-1)
    p = p.reshape(p.shape[0], groups, per_list, *p.shape[2:]).mean(2)
    index_k = jnp.broadcast_to(index_k, (*index_k.shape[:2], index_q.shape[2], index_q.shape[3]))
    r = jnp.einsum("bqhd,bkhd->bhqk", index_q, index_k)
    r = jnp.maximum(r, 0) if has_relu else r
    r = r if weights is None else r * jnp.moveaxis(weights, 2, 1)[..., None]
    r = r.reshape(r.shape[0], groups, -1, *r.shape[2:]).sum(2) / np.sqrt(index_q.shape[-1])
    log_r = jax.nn.log_softmax(jnp.where(seen, r, -jnp.inf), axis=-1)
    loss = jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - jnp.where(seen, log_r, 0)), 0)
    return jnp.moveaxis(loss.sum(-1), 1, 2)


def visible(batch, groups, tokens, blocks=None, size=8):
    key = np.arange(tokens)
    seen = np.broadcast_to(key <= key[:, None], (batch, groups, tokens, tokens))
    if blocks is None:
        return seen
    chosen = (np.asarray(blocks)[:, :, :groups, None] == (key // size)[:, None]).any(-1)
    return seen & np.moveaxis(chosen, 2, 1)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_losses_and_gradients_are_those_of_the_definition(monkeypatch, is_sparse, is_shared):
    from xsake.indexed import distillation

    monkeypatch.setattr(distillation, "LOGITS", 3000)  # several chunks
    with jax.enable_x64(True):
        q, k, v, index_q, index_k = arrays(
            batch=2, index_heads=5 if is_shared else None, dtype=np.float64
        )
        config = indexed.Config(8, 3, has_relu=is_shared, is_shared=is_shared)
        weights = None
        if is_shared:
            weights = jnp.asarray(np.random.default_rng(3).random((2, 45, 5)))
        blocks = None
        if is_sparse:
            *_, blocks = indexed.attention(
                q, k, v, index_q, index_k, index_weights=weights, config=config,
                return_blocks=True, implementation="xla",
            )  # fmt: skip
        groups = 1 if is_shared else 2
        seen = visible(2, groups, 45, blocks)
        own = lambda q, k, *index: indexed.distillation_loss(
            q, k, *index, index_weights=weights, blocks=blocks, config=config
        )
        right = lambda *x: definition(*x, seen, groups=groups, has_relu=is_shared, weights=weights)
        x = q, k, index_q, index_k
        np.testing.assert_allclose(jax.jit(own)(*x), right(*x), atol=1e-12)
        mix = np.random.default_rng(4).random((2, 45, groups))
        found, wanted = (
            jax.jit(jax.grad(lambda *x, f=f: (f(*x) * mix).sum(), (0, 1, 2, 3)))(*x)
            for f in (own, right)
        )
        assert not any(np.asarray(x).any() for x in found[:2])
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-11)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_memory_is_linear_in_the_number_of_tokens(is_sparse):
    config = indexed.Config(64, 4)

    def bytes_of(tokens):
        shape = lambda heads, dim: jax.ShapeDtypeStruct((1, tokens, heads, dim), jnp.float32)
        blocks = jax.ShapeDtypeStruct((1, tokens, 2, 4), jnp.int32) if is_sparse else None

        def loss(index_q, index_k, q, k, blocks):
            return indexed.distillation_loss(
                q, k, index_q, index_k, blocks=blocks, config=config
            ).sum()

        x = shape(2, 16), shape(1, 16), shape(4, 16), shape(2, 16), blocks
        run = jax.jit(jax.grad(loss, (0, 1))).lower(*x).compile()
        return run.memory_analysis().temp_size_in_bytes

    assert bytes_of(16384) < 4.5 * bytes_of(4096)


def test_an_indexer_learns_what_attention_selects():
    """Lists by a trained indexer keep more attention than those of a random one."""
    q, k, v, index_q, index_k = arrays(tokens=120, q_heads=2, kv_heads=2)
    weights = {"q": jnp.zeros((8, 4)), "k": jnp.zeros((2, 8, 4))}
    rng = np.random.default_rng(5)
    weights = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32), weights
    )

    def index(weights):
        return q @ weights["q"], jnp.einsum("bthd,hde->bte", k, weights["k"])[:, :, None]

    @jax.jit
    def step(weights):
        loss = lambda w: indexed.distillation_loss(q, k, *index(w), config=CONFIG).mean()
        value, gradient = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda x, g: x - 0.5 * g, weights, gradient)

    first, _ = step(weights)
    for _ in range(150):
        last, weights = step(weights)
    assert last < 0.8 * first
