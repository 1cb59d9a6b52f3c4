"""Gradients in float64 against finite differences and autodiff of the dense formula (N4)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import xsake
from tests.kernels.compiled import compiled
from tests.kernels.implementations import each_in_float64
from tests.lanes import slow
from xsake.masks import Causal, PerHead, Window
from xsake.testing import dense, oracle
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import bind, call, with_gradients

SMALL = ConformanceCase(
    "small", PerHead([Causal(), Causal() & Window(left=3, right=0)]), block=(4, 8), q_tokens=13,
    kv_tokens=13, q_heads=2, kv_heads=1, head_dim=4, value_dim=3, dtype="float64", softcap=2.0,
    sinks=2, bias=(False, True),
)  # fmt: skip
WIDE = ConformanceCase(
    "wide", Causal() & Window(left=40, right=0), block=(32, 32), q_tokens=75, kv_tokens=75,
    q_heads=2, kv_heads=1, head_dim=64, value_dim=48, dtype="float64", sinks=0, softcap=5.0,
)  # fmt: skip


@pytest.fixture
def double_precision():
    with jax.enable_x64(True):
        yield


@each_in_float64
def test_check_grads_in_float64(implementation, double_precision):
    attend = jax.jit(bind(xsake.attention, SMALL, implementation))
    operands = {name: jnp.asarray(value) for name, value in SMALL.inputs().operands.items()}
    assert all(value.dtype == jnp.float64 for value in attend(operands, {}))
    jax.test_util.check_grads(
        lambda given: attend(given, {}), (operands,), order=1, modes=("rev",), atol=1e-7, rtol=1e-7
    )


@each_in_float64
def test_directional_differences_at_head_dim_64(implementation, double_precision):
    inputs, run = WIDE.inputs(), compiled(WIDE, implementation)
    got = call(run, inputs)

    def loss(operands):
        results = call(run, inputs.replace(**operands))
        return float((results["out"] * inputs.d_out).sum() + (results["lse"] * inputs.d_lse).sum())

    rng, step = np.random.default_rng(1), 1e-6
    for name, operand in inputs.operands.items():
        for _ in range(3):
            direction = rng.standard_normal(operand.shape)
            up, down = (loss({name: operand + sign * step * direction}) for sign in (1, -1))
            slope = float((got[f"d_{name}"] * direction).sum())
            assert slope == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-7), name


@each_in_float64
@pytest.mark.parametrize("case", [WIDE, slow(SMALL)], ids=lambda case: case.name)
def test_custom_gradients_equal_autodiff_of_the_dense_formula(
    case, implementation, double_precision
):
    inputs = case.inputs()
    got = call(compiled(case, implementation), inputs)
    formula = functools.partial(
        dense.attend, allowed=jnp.asarray(case.allowed), softcap=case.softcap
    )
    run = jax.jit(with_gradients(lambda operands, integers: formula(**operands)))
    for name, value in call(run, inputs).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-10, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("softcap", [None, 2000.0])
def test_second_derivatives_of_the_reference_ignore_hidden_pairs(softcap, double_precision):
    """A hidden logit whose power would overflow does not exist, in second derivatives too."""
    rng = np.random.default_rng(0)
    q, k, v, way = (jnp.asarray(rng.standard_normal((1, 6, 1, 4))) for _ in range(4))
    k = k.at[0, 5, 0].set(3000 * q[0, 0, 0])
    allowed = jnp.asarray(np.tril(np.ones((1, 1, 6, 6), bool)))
    attend = lambda *given: xsake.attention(
        *given, mask=Causal(), softcap=softcap, implementation="reference"
    )

    def formula(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        s = jnp.where(allowed, s, 0)
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        p = jax.nn.softmax(jnp.where(allowed, s, -1e300), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    def second(attend):
        loss = lambda *given: (attend(*given) ** 2).sum()
        along = lambda *given: sum((x * way).sum() for x in jax.grad(loss, (0, 1, 2))(*given))
        return jax.jit(jax.grad(along, (0, 1, 2)))(q, k, v)

    for ours, theirs in zip(second(attend), second(formula), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sinks", [[-np.inf, 0.0], [[-np.inf, -np.inf], [-np.inf, 0.5]]])
def test_a_sink_of_minus_infinity_is_none(sinks, double_precision):
    case = ConformanceCase("off", Causal(), q_tokens=7, kv_tokens=7, dtype="float64", sinks=0)
    inputs = case.inputs()
    given = {**inputs.operands, "sinks": np.asarray(sinks)}
    attend = functools.partial(xsake.attention, mask=Causal(), return_lse=True)
    run = jax.jit(with_gradients(lambda operands, _: attend(**operands)))
    found = call(run, dataclasses.replace(inputs, operands=given))
    truth = oracle.attend(
        dataclasses.replace(case.operands(inputs), sinks=np.maximum(sinks, -1e300)),
        inputs.d_out,
        inputs.d_lse,
    )
    for name in found:
        np.testing.assert_allclose(found[name], getattr(truth, name), rtol=1e-9, atol=1e-10)
    assert (found["d_sinks"][np.isinf(sinks)] == 0).all()
