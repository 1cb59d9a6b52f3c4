"""Error budget: compare a result with the float64 truth and naive attention in its dtype.

For an array x with truth r (float64) and comparator n (naive attention in the same dtype, the
worst of three summation orders):

    max |x - r| <= 2 * max |n - r| + 2 * ulp       ulp = max |(r + 0.3 - 0.3) - r| in the dtype
    rms (x - r) <= f * rms (n - r) + floor         f = 3 in float32, 1.1 in bfloat16 and float16
    max |x - r| <= backstop * max(1, max |r|)      backstop per dtype, for unit-variance inputs

The floor is the rounding of r to the dtype of x. Finiteness is checked first, because comparisons
with NaN are False.
"""

import dataclasses

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class DtypeLimits:
    """Limits of one dtype."""

    rms_factor: float
    out_backstop: float
    gradient_backstop: float


LIMITS = {
    "float64": DtypeLimits(3.0, 1e-12, 1e-11),
    "float32": DtypeLimits(3.0, 2e-6, 1e-5),
    "float16": DtypeLimits(1.1, 2e-3, 4e-3),
    "bfloat16": DtypeLimits(1.1, 1e-2, 2e-2),
}


@dataclasses.dataclass(frozen=True)
class ErrorReport:
    """Errors of one array; `failure` is None if all limits hold."""

    name: str
    dtype: str
    max_error: float
    naive_max_error: float
    max_allowed: float
    rms_error: float
    naive_rms_error: float
    rms_allowed: float
    failure: str | None

    @property
    def max_ratio(self) -> float:
        """Max error relative to naive attention (0 if exact)."""
        return _ratio(self.max_error, self.naive_max_error)

    @property
    def rms_ratio(self) -> float:
        """RMS error relative to naive attention (0 if exact)."""
        return _ratio(self.rms_error, self.naive_rms_error)

    @property
    def used(self) -> float:
        """Used fraction of the error budget; 1 is the limit."""
        max_used = _ratio(self.max_error, self.max_allowed)
        return max(max_used, _ratio(self.rms_error, self.rms_allowed))


def _ratio(error: float, other: float) -> float:
    if error == 0.0:
        return 0.0
    return error / other if other > 0.0 else float("inf")


def _failed_report(name: str, dtype: str, reason: str) -> ErrorReport:
    nan = float("nan")
    return ErrorReport(name, dtype, nan, nan, nan, nan, nan, nan, f"{name}: {reason}")


def non_finite(got: np.ndarray, truth: np.ndarray) -> str | None:
    """Return why NaNs and infinities of `got` differ from the truth, or None."""
    if got.shape != truth.shape:
        return f"shape {got.shape} differs from {truth.shape}"
    finite = np.isfinite(truth)
    is_wrong = finite & ~np.isfinite(got)
    if is_wrong.any():
        return f"{int(is_wrong.sum())} non-finite values where the truth is finite"
    if not np.array_equal(got[~finite], truth[~finite]):
        return "differs from the truth where the truth is infinite"
    return None


def ulp_term(truth: np.ndarray, dtype: str) -> float:
    """Return the rounding of the truth in `dtype` after a shift by 0.3, as in FlashAttention."""
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shift, low = np.asarray(0.3, numpy_dtype), truth.astype(numpy_dtype)
    return _max_abs(((low + shift) - shift).astype(np.float64) - low.astype(np.float64))


def check_error(
    name: str,
    got: np.ndarray,
    naive: np.ndarray,
    truth: np.ndarray,
    *,
    dtype: str,
    condition: float = 0.0,
    extra_ulps: float = 0.0,
    backstop: bool = True,
) -> ErrorReport:
    """Check one array against the error budget.

    Args:
        name: "out", "lse", "d_q", ...
        got: result of the implementation.
        naive: results of naive attention, runs stacked on the first axis; the worst run counts.
        truth: float64 result.
        dtype: dtype of the call.
        condition: maximum |logit| if far from 1: a logit of size c has an error of c ulp.
        extra_ulps: ulps of max(1, max |r|) allowed on top, for cases found by a search: it finds
            few elements for which naive attention is exact by chance.
        backstop: whether to apply the absolute limit for unit-variance inputs.
    """
    got, naive = np.asarray(got, np.float64), np.asarray(naive, np.float64)
    reason = non_finite(got, truth)
    if reason is not None:
        return _failed_report(name, dtype, reason)
    finite = np.isfinite(truth)
    if not np.isfinite(naive[:, finite]).all():
        return _failed_report(name, dtype, "naive attention is not finite")
    got, naive, truth = got[finite], naive[:, finite], truth[finite]
    limits, size = LIMITS[dtype], _max_abs(truth)
    eps = float(ml_dtypes.finfo(dtype).eps)
    slack = eps * (condition * size + extra_ulps * max(1.0, size))
    max_error, naive_max = _max_abs(got - truth), _max_abs(naive - truth)
    max_allowed = 2.0 * naive_max + 2.0 * ulp_term(truth, dtype) + slack
    rms_error, naive_rms = _rms(got - truth), max(_rms(run - truth) for run in naive)
    rms_allowed = limits.rms_factor * naive_rms + 0.5 * eps * _rms(truth) + slack
    absolute = limits.gradient_backstop if name.startswith("d_") else limits.out_backstop
    limit = absolute * max(1.0, size)
    failure = None
    for kind, error, allowed, naive_error in (
        ("max", max_error, max_allowed, naive_max),
        ("rms", rms_error, rms_allowed, naive_rms),
    ):
        if failure is None and error > allowed:
            failure = f"{kind} error {error:.3g} > allowed {allowed:.3g} (naive {naive_error:.3g})"
    if failure is None and backstop and max_error > limit:
        failure = f"max error {max_error:.3g} > backstop {limit:.3g}"
    failure = None if failure is None else f"{name}: {failure}"
    return ErrorReport(
        name, dtype, max_error, naive_max, max_allowed, rms_error, naive_rms, rms_allowed, failure
    )


def _max_abs(x: np.ndarray) -> float:
    return float(np.abs(x).max()) if x.size else 0.0


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
