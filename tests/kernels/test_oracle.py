"""The truth itself: the NumPy oracle against finite differences, autodiff and jax.nn (N1)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.testing import dense, naive, oracle

B, TQ, TK, HQ, HK, D, DV = 2, 9, 11, 4, 2, 6, 5


def problem(*, bias_shape=(1, HQ, TQ, TK), sinks_shape=(HQ, 2), softcap=2.0, seed=0):
    rng = np.random.default_rng(seed)
    allowed = rng.random((B, HQ, TQ, TK)) < 0.6
    allowed[:, 1, :, 2] = True  # heads of one group differ
    allowed[0, :, 3] = False  # an empty row
    allowed[:, :, :, 7] = False  # an empty column
    x = oracle.DenseInputs(
        q=rng.standard_normal((B, TQ, HQ, D)),
        k=rng.standard_normal((B, TK, HK, D)),
        v=rng.standard_normal((B, TK, HK, DV)),
        allowed=allowed,
        bias=None if bias_shape is None else rng.standard_normal(bias_shape),
        sinks=None if sinks_shape is None else rng.standard_normal(sinks_shape),
        softcap=softcap,
    )
    return x, rng.standard_normal((B, TQ, HQ, DV)), rng.standard_normal((B, TQ, HQ))


def scalar(x, d_out, d_lse):
    truth = oracle.attend(x)
    seen = np.isfinite(truth.lse)
    return (truth.out * d_out).sum() + (truth.lse[seen] * d_lse[seen]).sum()


@pytest.mark.parametrize(
    ("softcap", "sinks_shape", "bias_shape"),
    [
        (None, None, None),
        (2.0, None, (1, 1, TQ, TK)),
        (None, (HQ,), (B, HQ, TQ, TK)),
        (2.0, (HQ,), (B, 1, 1, TK)),
        (None, (HQ, 2), (1, 1, TQ, TK)),
        (2.0, (HQ, 2), (B, HQ, TQ, TK)),
    ],
)
def test_oracle_gradients_agree_with_finite_differences(softcap, sinks_shape, bias_shape):
    x, d_out, d_lse = problem(bias_shape=bias_shape, sinks_shape=sinks_shape, softcap=softcap)
    truth = oracle.attend(x, d_out, d_lse)
    rng, step = np.random.default_rng(1), 1e-6
    for name in ("q", "k", "v", "bias", "sinks"):
        operand, gradient = getattr(x, name), getattr(truth, f"d_{name}")
        if operand is None:
            assert gradient is None
            continue
        direction = rng.standard_normal(operand.shape)
        up, down = (
            scalar(
                dataclasses.replace(x, **{name: operand + sign * step * direction}), d_out, d_lse
            )
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            (gradient * direction).sum(), (up - down) / (2 * step), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("sinks_shape", [None, (HQ, 2)])
def test_oracle_equals_autodiff_of_the_dense_formula(sinks_shape):
    x, d_out, d_lse = problem(sinks_shape=sinks_shape)
    truth = oracle.attend(x, d_out, d_lse)
    with jax.enable_x64(True):
        given = {
            n: jnp.asarray(getattr(x, n))
            for n in ("q", "k", "v", "bias", "sinks")
            if getattr(x, n) is not None
        }
        attend = lambda given: dense.attend(
            **given, allowed=jnp.asarray(x.allowed), softcap=x.softcap
        )
        (out, lse), pull = jax.vjp(attend, given)
        (gradients,) = pull((jnp.asarray(d_out), jnp.asarray(d_lse)))
    np.testing.assert_allclose(out, truth.out, atol=1e-13)
    np.testing.assert_allclose(lse, truth.lse, atol=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, getattr(truth, f"d_{name}"), atol=1e-12)


@pytest.mark.parametrize("sinks_shape", [None, (HQ,), (HQ, 2)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_oracle_and_the_comparator_in_float64_are_the_same_function(sinks_shape, softcap):
    x, d_out, d_lse = problem(sinks_shape=sinks_shape, softcap=softcap)
    truth = oracle.attend(x, d_out, d_lse)
    for plain in naive.run_three_orders(x, d_out, d_lse, "float64"):
        for field in dataclasses.fields(truth):
            if getattr(truth, field.name) is not None:
                np.testing.assert_allclose(
                    getattr(plain, field.name), getattr(truth, field.name), atol=1e-12
                )


def test_oracle_agrees_with_jax_nn_where_every_row_sees_something():
    x, d_out, _ = problem(bias_shape=(B, HQ, TQ, TK), sinks_shape=None, softcap=None)
    allowed = x.allowed | np.eye(TQ, TK, dtype=bool)
    d_out = np.concatenate([d_out, d_out[..., : D - DV]], axis=-1)  # jax.nn wants Dv == D
    x = dataclasses.replace(
        x, v=np.concatenate([x.v, x.v[..., : D - DV]], axis=-1), allowed=allowed
    )
    truth = oracle.attend(x, d_out, np.zeros((B, TQ, HQ)))
    with jax.enable_x64(True):
        operands = [jnp.asarray(a) for a in (x.q, x.k, x.v, x.bias)]
        attend = lambda q, k, v, bias: jax.nn.dot_product_attention(
            q, k, v, bias, mask=jnp.asarray(allowed)
        )
        out, pull = jax.vjp(attend, *operands)
        gradients = pull(jnp.asarray(d_out))
    np.testing.assert_allclose(out, truth.out, atol=2e-6)  # its softmax is float32
    for name, gradient in zip(("q", "k", "v", "bias"), gradients, strict=True):
        np.testing.assert_allclose(
            gradient, getattr(truth, f"d_{name}"), atol=2e-6
        )  # its softmax is float32


def test_oracle_probabilities_and_sinks_share_one_unit_of_mass():
    x, _, _ = problem(sinks_shape=(HQ,), bias_shape=None, softcap=None)
    p, lse = oracle.probabilities(x), oracle.attend(x).lse
    sink_mass = np.exp(x.sinks[None, None, :] - lse).transpose(0, 2, 1)
    np.testing.assert_allclose(p.sum(-1) + sink_mass, 1.0, atol=1e-14)
    assert not p[~x.allowed].any()


def test_oracle_empty_row_is_zero_with_zero_gradients():
    x, d_out, d_lse = problem(sinks_shape=None)
    truth = oracle.attend(x, d_out, d_lse)
    assert not truth.out[0, 3].any() and np.all(truth.lse[0, 3] == -np.inf)
    assert not truth.d_q[0, 3].any() and not truth.d_bias[:, :, 3, 7].any()
    assert not truth.d_k[:, 7].any() and not truth.d_v[:, 7].any()
    for value in (truth.d_q, truth.d_k, truth.d_v, truth.d_bias):
        assert np.isfinite(value).all()


def test_oracle_row_with_minus_infinite_bias_everywhere_is_empty():
    x, d_out, d_lse = problem(softcap=None, sinks_shape=None, bias_shape=(1, 1, TQ, TK))
    x.bias[0, 0, 4] = -np.inf
    truth = oracle.attend(x, d_out, d_lse)
    assert not truth.out[:, 4].any() and np.all(truth.lse[:, 4] == -np.inf)
    assert not truth.d_q[:, 4].any() and np.isfinite(truth.d_bias).all()


def test_oracle_never_reads_an_excluded_key():
    x, d_out, d_lse = problem()
    clean = oracle.attend(x, d_out, d_lse)
    x.k[:, 7], x.v[:, 7] = np.nan, np.inf
    dirty = oracle.attend(x, d_out, d_lse)
    for field in dataclasses.fields(clean):
        np.testing.assert_array_equal(getattr(clean, field.name), getattr(dirty, field.name))
