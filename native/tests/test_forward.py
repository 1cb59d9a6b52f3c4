"""Forward and decode handlers against a float64 oracle."""

import ml_dtypes
import native_call
import numpy as np
import oracle
import pytest
from cases import CASES, causal

ATTEND = {"forward": native_call.forward, "decode": native_call.decode}


def check_outputs(case, o, lse):
    """Compare o and lse with float64; errors in units of what float32 sums allow."""
    expected_o, expected_lse = oracle.forward(case)
    logits = np.abs(np.where(case.pairs, oracle.scores(case)[1], 0)).max(initial=1)
    atol = 4e-7 * (4 + logits)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    seen = ~np.isneginf(expected_lse)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=atol)
    step = 1.01 * oracle.ulp_bound(case.q.dtype)
    np.testing.assert_allclose(np.asarray(o, np.float64), expected_o, rtol=step, atol=2 * atol)
    assert not np.asarray(o, np.float32)[~seen].any()


@pytest.mark.parametrize("target", ATTEND)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, target):
    case = oracle.build_case(np.random.default_rng(0), **CASES[name])
    check_outputs(case, *ATTEND[target](case))


@pytest.mark.parametrize("target", ATTEND)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("array", ["k", "v", "q"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_nonfinite_values_reach_only_queries_that_see_them(dtype, array, bad, target):
    sizes = {"batch": 2, "q_tokens": 257, "q_heads": 4, "kv_heads": 2, "dim": 32, "dtype": dtype}
    case = oracle.build_case(np.random.default_rng(1), **sizes, **causal())
    before = ATTEND[target](case)
    token, head = 130, 1
    x = getattr(case, array).copy()
    x[1, token, head, 3] = bad
    setattr(case, array, x)
    after = ATTEND[target](case)
    affected = np.zeros(case.q.shape[:3], bool)
    if array == "q":
        affected[1, token, head] = True
    else:
        affected[1, token:, 2 * head : 2 * head + 2] = True
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[~affected], new[~affected])
    if array == "v" or np.isnan(bad):
        assert np.isnan(after[0][affected]).all() and np.isnan(after[1][affected]).all()


@pytest.mark.parametrize("target", ATTEND)
def test_hidden_nan_in_a_mask_block_and_in_padding(target):
    rng = np.random.default_rng(2)
    case = oracle.build_case(rng, q_tokens=150, mask_blocks=True, dtype=np.float32)
    before = ATTEND[target](case)
    hidden = ~case.pairs[0].any((0, 1))
    assert not hidden.any()  # every key is seen by some query: choose one query and one key
    case.v = case.v.copy()
    case.v[0, 70, 0] = np.nan
    after = ATTEND[target](case)
    blind = ~case.pairs[0, 0, :, 70]
    assert blind.any()
    assert np.array_equal(before[0][0, blind, 0], after[0][0, blind, 0])
    assert np.isnan(after[0][0, ~blind, 0]).all()


@pytest.mark.parametrize("target", ATTEND)
def test_results_depend_on_no_neighbour_and_no_thread(target):
    rng = np.random.default_rng(3)
    case = oracle.build_case(rng, batch=3, q_tokens=300, q_heads=4, kv_heads=2, dim=64, **causal())
    reference = ATTEND[target](case, 1)
    for workers in (1, 2, 7):
        for x, y in zip(ATTEND[target](case, workers), reference, strict=True):
            assert np.array_equal(x, y)
    case.q, case.k, case.v, case.pairs = (x[1:2] for x in (case.q, case.k, case.v, case.pairs))
    for x, y in zip(ATTEND[target](case), reference, strict=True):
        assert np.array_equal(x, y[1:2])
