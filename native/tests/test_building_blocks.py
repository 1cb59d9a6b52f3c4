"""exp2, tanh and the microkernels against float64."""

import ctypes

import numpy as np
import pytest
import xsake_cpu


def _map(name, x):
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    getattr(xsake_cpu._library(), name)(pointer(x), pointer(y), ctypes.c_int64(x.size))
    return y


def test_exp2_relative_error():
    x = np.concatenate([np.linspace(-126, 0, 2_000_003), np.linspace(-1, 1, 100_001)]).astype(
        np.float32
    )
    expected = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(_map("xsake_cpu_test_exp2", x) / expected - 1)) <= 2e-7


def test_exp2_special_values():
    x = np.array([-127, -127.5, -1e30, -np.inf, 0, 1, 126], np.float32)
    expected = np.array([0, 0, 0, 0, 1, 2, 2.0**126], np.float32)
    np.testing.assert_array_equal(_map("xsake_cpu_test_exp2", x), expected)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0xFFC00001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_exp2_keeps_every_nan(bits):
    x = np.array([bits] * 17, np.uint32).view(np.float32)
    assert np.isnan(_map("xsake_cpu_test_exp2", x)).all()
    assert np.isnan(_map("xsake_cpu_test_tanh", x)).all()


def test_tanh_relative_error():
    x = np.concatenate([np.geomspace(1e-20, 20, 1_000_003), [0.0]]).astype(np.float32)
    x = np.concatenate([x, -x])
    with np.errstate(invalid="ignore"):
        error = np.abs(_map("xsake_cpu_test_tanh", x) / np.tanh(x.astype(np.float64)) - 1)
    assert np.nanmax(error) <= 3e-7
    np.testing.assert_array_equal(_map("xsake_cpu_test_tanh", [np.inf, -np.inf]), [1, -1])


@pytest.mark.parametrize(("m", "k"), [(2, 1), (8, 7), (6, 64), (14, 33), (128, 129)])
def test_product(m, k):
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, 64), np.float32)
    c = np.full((m, 64), 7, np.float32)
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c))
    xsake_cpu._library().xsake_cpu_test_product(*pointers, *map(ctypes.c_int64, (m, 64, k)))
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, atol=1e-5, rtol=1e-5)
