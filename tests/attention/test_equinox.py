"""The equinox module beside equinox's own, whose parameters it takes over."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.attention.adapters.equinox import MultiheadAttention, Sizes
from xsake.errors import ShapeError
from xsake.masks import Causal

X = jnp.asarray(np.random.default_rng(0).normal(size=(20, 16)), jnp.float32)
TRIL = jnp.tril(jnp.ones((20, 20), bool))


def test_it_equals_equinox_with_a_rule_or_with_booleans():
    theirs = eqx.nn.MultiheadAttention(2, 16, use_output_bias=True, key=jax.random.key(0))
    ours = MultiheadAttention(2, 16, key=jax.random.key(1))
    names = ("query_proj", "key_proj", "value_proj", "output_proj")
    parts = lambda layer: tuple(getattr(layer, name) for name in names)
    ours = eqx.tree_at(parts, ours, parts(theirs))
    expected = theirs(X, X, X, TRIL, key=jax.random.key(2))
    for mask in (Causal(), TRIL, jnp.broadcast_to(TRIL, (2, 20, 20))):
        got = ours(X, X, X, mask, key=jax.random.key(2), inference=True)
        np.testing.assert_allclose(got, expected, atol=2e-6)
    jitted = eqx.filter_jit(lambda layer, mask: layer(X, X, X, mask))
    np.testing.assert_allclose(jitted(ours, TRIL), expected, atol=2e-6)  # a traced mask


@pytest.mark.slow  # the test above in more sizes
def test_grouped_heads_own_sizes_and_gradients():
    sizes = Sizes(query=16, key=6, value=10, output=4, qk=8, vo=5)
    layer = MultiheadAttention(4, sizes, num_kv_heads=2, use_bias=True, key=jax.random.key(0))
    assert layer.key_proj.weight.shape == (16, 6) and layer.value_proj.weight.shape == (10, 10)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(layer):
        out = jax.vmap(layer, in_axes=(0, None, None))(X[None, :7], X[:, :6], X[:, :10])
        return (out**2).sum()

    for leaf in jax.tree.leaves(gradients(layer)):
        assert np.isfinite(leaf).all()


def test_heads_can_be_processed_before_attention():
    layer = MultiheadAttention(2, 16, key=jax.random.key(0))
    seen = []
    layer(X, X, X, process_heads=lambda *heads: seen.extend(heads) or heads)
    assert [x.shape for x in seen] == [(20, 2, 8)] * 3


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShapeError, match="XSK-101.equinox-heads"):
        MultiheadAttention(4, 16, num_kv_heads=3, key=jax.random.key(0))
