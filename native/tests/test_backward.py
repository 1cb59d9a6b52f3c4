"""Backward handler against a float64 oracle."""

import native_call
import numpy as np
import oracle
import pytest
from cases import CASES, causal


def gradients(case, rng, workers=2):
    """`(native gradients, float64 gradients)` for random cotangents."""
    o, lse = native_call.forward(case)
    do = rng.standard_normal(o.shape).astype(case.q.dtype)
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    dlse[np.isneginf(lse)] = 0
    return native_call.backward(case, o, lse, do, dlse, workers), oracle.backward(case, do, dlse)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    rng = np.random.default_rng(0)
    case = oracle.build_case(rng, **CASES[name])
    native, expected = gradients(case, rng)
    assert (expected[3] is not None) == bool(case.bias.size)
    logits = np.abs(np.where(case.pairs, oracle.scores(case)[1], 0)).max(initial=1)
    half = oracle.ulp_bound(case.q.dtype) if case.q.dtype != np.float32 else 0
    for x, y in zip(native, expected, strict=True):
        if y is None:
            continue
        assert x.shape == y.shape
        largest = np.abs(y).max(initial=1e-3)
        atol = largest * (2e-6 + 4e-7 * logits + half)
        if half:  # o is rounded to the dtype before delta is computed from it
            atol += largest * 4 * half
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2 * half + 1e-5, atol=atol)


@pytest.mark.parametrize("q_tokens", [4096, 2500])
def test_key_ranges_are_merged(q_tokens):
    rng = np.random.default_rng(1)
    kwargs = {
        "q_tokens": q_tokens,
        "q_heads": 2,
        "kv_heads": 1,
        "dim": 16,
        "layout_heads": 2,
        "density": 0.3,
    }
    case = oracle.build_case(rng, block_q=128, block_kv=128, **kwargs, **causal())
    native, expected = gradients(case, rng)
    for x, y in zip(native[:3], expected[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=4e-6 * np.abs(y).max(), rtol=1e-5)


def test_results_depend_on_no_thread():
    rng = np.random.default_rng(2)
    case = oracle.build_case(
        rng, batch=2, q_tokens=2100, q_heads=2, kv_heads=1, bias=(1, 1), **causal()
    )
    first = gradients(case, np.random.default_rng(3), 1)[0]
    for workers in (1, 2, 5):
        for x, y in zip(gradients(case, np.random.default_rng(3), workers)[0], first, strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize("features", [{}, {"softcap": 4.0, "bias": (1, 1)}])
@pytest.mark.parametrize("array", ["q", "k", "v", "do", "o", "dlse"])
def test_nonfinite_values_reach_only_pairs_that_count(array, features):
    rng = np.random.default_rng(4)
    case = oracle.build_case(rng, q_tokens=257, q_heads=2, dim=32, **features, **causal())
    do = rng.standard_normal((1, 257, 2, 32)).astype(np.float32)
    dlse = rng.standard_normal((1, 257, 2)).astype(np.float32)
    o, lse = native_call.forward(case)
    before = native_call.backward(case, o, lse, do, dlse)
    token, head = 130, 1
    arrays = {"q": case.q, "k": case.k, "v": case.v, "do": do, "o": o, "dlse": dlse}
    x = arrays[array] = arrays[array].copy()
    x[(0, token, head) if x.ndim == 3 else (0, token, head, 3)] = np.nan
    case.q, case.k, case.v = (arrays[name] for name in "qkv")
    if array in "qkv":
        o, lse = native_call.forward(case)
        arrays["o"] = o
    after = native_call.backward(case, arrays["o"], lse, arrays["do"], arrays["dlse"])
    # NaN of a query reaches the keys it sees, NaN of a key the queries that see it and their keys.
    dq_bad, dkv_bad = np.zeros((1, 257, 2), bool), np.zeros((1, 257, 2), bool)
    if array in ("k", "v"):
        dq_bad[0, token:, head], dkv_bad[0, :, head] = True, True
    else:
        dq_bad[0, token, head], dkv_bad[0, : token + 1, head] = True, True
    bad = dq_bad, dkv_bad, dkv_bad
    for old, new, affected in zip(before[:3], after[:3], bad, strict=True):
        assert np.array_equal(old[~affected], new[~affected])
    assert np.isnan(after[0][dq_bad]).all()
    assert np.isnan(after[1][dkv_bad]).all()


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_bias_of_minus_infinity_hides_pairs(softcap):
    rng = np.random.default_rng(5)
    case = oracle.build_case(rng, q_tokens=150, bias=(1, 1), softcap=softcap, **causal())
    hidden = rng.random(case.bias.shape) < 0.3
    case.bias = np.where(hidden, -np.inf, case.bias).astype(np.float32)
    o, lse = native_call.forward(case)
    do = rng.standard_normal(o.shape).astype(np.float32)
    native = native_call.backward(case, o, lse, do, np.zeros_like(lse))
    expected_o, _ = oracle.forward(case)
    np.testing.assert_allclose(o, expected_o, atol=1e-5)
    np.testing.assert_allclose(native_call.decode(case)[0], expected_o, atol=1e-5)
    for x, y in zip(native, oracle.backward(case, do, 0 * lse), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), rtol=1e-4)
