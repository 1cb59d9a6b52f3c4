"""The tiles' own 2^x: accurate where softmax uses it, exact where the semantics need it to be."""

import jax
import jax.numpy as jnp
import numpy as np

from xsake.kernels.online_softmax import exp2

# As for users, however the tests are compiled: fused multiply-adds are a part of its accuracy.
AS_FOR_USERS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
run = jax.jit(exp2, compiler_options=AS_FOR_USERS)


def test_relative_error_is_below_one_and_a_half_rounding_steps():
    x = np.linspace(-126, 0, 1_000_001, dtype=np.float32)
    true = np.exp2(x.astype(np.float64))
    assert np.abs(np.asarray(run(x), np.float64) / true - 1).max() <= 1.5 * 2**-24


def test_whole_exponents_are_exact():
    x = np.arange(-126, 128, dtype=np.float32)
    assert np.array_equal(np.asarray(run(x)), np.ldexp(np.float32(1), x.astype(int)))


def test_far_below_it_is_exactly_zero_and_nan_stays():
    x = jnp.asarray([-127.0, -1e4, -jnp.inf], jnp.float32)
    assert np.array_equal(np.asarray(run(x)), np.zeros(3))
    assert np.isnan(np.asarray(run(jnp.asarray([jnp.nan], jnp.float32)))).all()


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x = jnp.linspace(-50.0, 0.0, 101, dtype=jnp.float64)
        np.testing.assert_allclose(np.asarray(run(x)), np.exp2(np.asarray(x)), rtol=1e-14)
