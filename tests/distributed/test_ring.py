"""The merge that rings are made of: exact, in any order, with empty parts, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from xsake.kernels.online_softmax import add_sinks, merge

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(3 * RNG.standard_normal((2, 3, 4, 10), np.float32))
VALUES = jnp.asarray(RNG.standard_normal((2, 3, 4, 10, 5), np.float32))


def soft(logits, values):
    weights = jax.nn.softmax(logits, axis=-1)
    return (weights[..., None] * values).sum(-2), jax.nn.logsumexp(logits, axis=-1)


def test_two_parts_make_the_whole_with_gradients():
    def by_parts(logits, values):
        parts = soft(logits[..., :3], values[..., :3, :]), soft(logits[..., 3:], values[..., 3:, :])
        return merge(*parts[0], *parts[1])

    def loss(function, *arrays):
        out, lse = function(*arrays)
        return (out**2).sum() + jnp.sin(lse).sum()

    def results(function):
        run = jax.grad(lambda *x: loss(function, *x), argnums=(0, 1))
        return jax.jit(lambda *x: (function(*x), run(*x)))(LOGITS, VALUES)

    leaves = (jax.tree.leaves(results(function)) for function in (by_parts, soft))
    for one, other in zip(*leaves, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_part_that_saw_nothing_changes_nothing_and_two_make_nothing():
    out, lse = soft(LOGITS, VALUES)
    nothing = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for parts in ((out, lse, *nothing), (*nothing, out, lse)):
        found = merge(*parts)
        np.testing.assert_allclose(found[0], out, rtol=1e-6)
        np.testing.assert_allclose(found[1], lse, rtol=1e-6)
    empty, empty_lse = merge(*nothing, *nothing)
    assert (empty == 0).all() and (empty_lse == -jnp.inf).all()
    slopes = jax.grad(lambda x: merge(x, *nothing[1:], *nothing)[0].sum())(nothing[0])
    assert (slopes == 0).all()


def test_sinks_take_weight_and_give_no_value():
    sinks = jax.random.normal(jax.random.key(2), (4, 2))
    out, lse = add_sinks(*soft(LOGITS, VALUES), sinks)
    wide = jnp.broadcast_to(sinks[None, None], (2, 3, 4, 2))
    logits = jnp.concatenate([LOGITS, wide], axis=-1)
    values = jnp.concatenate([VALUES, jnp.zeros((2, 3, 4, 2, 5))], axis=-2)
    expected = soft(logits, values)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-6)


def test_what_is_not_a_number_stays_in_its_row():
    out, lse = soft(LOGITS, VALUES)
    bad = out.at[0, 0, 0].set(jnp.nan), lse.at[0, 0, 0].set(jnp.nan)
    found, found_lse = merge(*bad, out, lse)
    assert np.isnan(found[0, 0, 0]).all() and np.isnan(found_lse[0, 0, 0])
    assert np.isfinite(found).sum() == found.size - found.shape[-1]
