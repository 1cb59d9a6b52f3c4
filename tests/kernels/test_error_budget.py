"""The judge itself: what the error budget must refuse and must let pass (N2, N3)."""

import numpy as np
import pytest

from xsake.testing.budget import LIMITS, check_error, ulp_term

RNG = np.random.default_rng(0)
TRUTH = RNG.standard_normal((64, 64))
NAIVE = TRUTH + 1e-7 * RNG.standard_normal((64, 64))


def verdict(got, truth=TRUTH, naive=NAIVE, **rules):
    return check_error("out", got, naive[None], truth, dtype="float32", **rules).failure


def test_an_error_like_the_comparators_passes():
    assert verdict(TRUTH + 1e-7 * RNG.standard_normal((64, 64))) is None
    assert verdict(TRUTH) is None


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_never_passes(poison):
    got = TRUTH.copy()
    got[3, 3] = poison
    assert "non-finite" in verdict(got)


def test_a_truth_of_minus_infinity_must_be_met_exactly():
    truth, naive = TRUTH.copy(), NAIVE.copy()
    truth[0, 0] = naive[0, 0] = -np.inf
    assert verdict(truth.copy(), truth, naive) is None
    for wrong in (np.nan, np.inf, 0.0, -3.4e38):
        got = truth.copy()
        got[0, 0] = wrong
        assert "infinite" in verdict(got, truth, naive)


def test_one_wrong_element_breaks_the_max_rule():
    got = TRUTH.copy()
    got[5, 5] += 5e-6
    assert "max error" in verdict(got)


def test_a_bias_of_every_element_breaks_the_rms_rule():
    naive = TRUTH.copy()
    naive[0, 0] += 1e-6
    assert "rms error" in verdict(TRUTH + 8e-7, naive=naive)


def test_the_backstop_holds_even_when_the_comparator_is_bad():
    naive = TRUTH + 1e-3
    assert "backstop" in verdict(TRUTH + 5e-4, naive=naive)
    assert verdict(TRUTH + 5e-4, naive=naive, backstop=False) is None


def test_a_wrong_shape_and_a_broken_comparator_are_refused():
    assert "shape" in verdict(TRUTH[:1])
    assert "naive attention" in verdict(TRUTH, naive=np.full_like(NAIVE, np.nan))


def test_low_precision_dtypes_have_coarser_ulps_and_tighter_rms():
    assert ulp_term(TRUTH, "bfloat16") > 4 * ulp_term(TRUTH, "float16") > ulp_term(TRUTH, "float32")
    assert LIMITS["bfloat16"].rms_factor == LIMITS["float16"].rms_factor == 1.1
