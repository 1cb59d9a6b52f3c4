"""The error budget: is a result as close to the float64 truth as its dtype allows?

For an array x with truth r (float64) and comparator n (naive attention in the same dtype, the
worst of three summation orders):

    max |x - r| <= 2 * max |n - r| + 2 * ulp       ulp = max |(r + 0.3 - 0.3) - r| in the dtype
    rms (x - r) <= f * rms (n - r) + floor         f = 3 in float32, 1.1 in bfloat16 and float16
    max |x - r| <= backstop * max(1, max |r|)      backstop per dtype, for unit-variance inputs

The floor is the rounding of r itself to the dtype of x, which no implementation can beat.
Finiteness is decided first: a NaN never reaches a comparison, which it would pass by accident.
"""

import dataclasses

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Limits:
    """The factors of one dtype."""

    rms_factor: float
    out_backstop: float
    gradient_backstop: float


LIMITS = {
    "float64": Limits(3.0, 1e-12, 1e-11),
    "float32": Limits(3.0, 2e-6, 1e-5),
    "float16": Limits(1.1, 2e-3, 4e-3),
    "bfloat16": Limits(1.1, 1e-2, 2e-2),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdict on one array; `failure` is None when every rule holds."""

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
        """Our largest error over the comparator's (0 when both are exact)."""
        return _ratio(self.max_error, self.naive_max_error)

    @property
    def rms_ratio(self) -> float:
        """Our rms error over the comparator's (0 when both are exact)."""
        return _ratio(self.rms_error, self.naive_rms_error)

    @property
    def used(self) -> float:
        """The share of the allowance that was used, 1 being the limit."""
        shares = _ratio(self.max_error, self.max_allowed), _ratio(self.rms_error, self.rms_allowed)
        return max(shares)


def _ratio(error: float, other: float) -> float:
    if error == 0.0:
        return 0.0
    return error / other if other > 0.0 else float("inf")


def _broken(name: str, dtype: str, why: str) -> Report:
    nan = float("nan")
    return Report(name, dtype, nan, nan, nan, nan, nan, nan, f"{name}: {why}")


def non_finite(got: np.ndarray, truth: np.ndarray) -> str | None:
    """What is wrong with the NaNs and infinities of `got`, or None; they must be the truth's."""
    if got.shape != truth.shape:
        return f"shape {got.shape} differs from {truth.shape}"
    finite = np.isfinite(truth)
    stray = finite & ~np.isfinite(got)
    if stray.any():
        return f"{int(stray.sum())} non-finite values where the truth is finite"
    if not np.array_equal(got[~finite], truth[~finite]):
        return "differs from the truth where the truth is infinite"
    return None


def ulp_term(truth: np.ndarray, dtype: str) -> float:
    """Rounding of the truth in `dtype` after a shift by 0.3, as FlashAttention's tests have it."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shift, low = np.asarray(0.3, kind), truth.astype(kind)
    return _largest(((low + shift) - shift).astype(np.float64) - low.astype(np.float64))


def judge(
    name: str,
    got: np.ndarray,
    naive: np.ndarray,
    truth: np.ndarray,
    *,
    dtype: str,
    condition: float = 0.0,
    backstop: bool = True,
) -> Report:
    """Apply the budget to one array.

    Args:
        name: "out", "lse", "d_q", ...
        got: what the implementation returned.
        naive: what the comparator returned, its runs stacked on the first axis; the worst counts.
        truth: float64.
        dtype: the dtype of the call; rounding is judged by it.
        condition: the largest |logit|, when far from 1: a logit of size c carries an error of
            c units in the last place before the exponential sees it.
        backstop: whether the inputs have unit variance, so that the absolute limit applies.
    """
    got, naive = np.asarray(got, np.float64), np.asarray(naive, np.float64)
    why = non_finite(got, truth)
    if why is not None:
        return _broken(name, dtype, why)
    finite = np.isfinite(truth)
    if not np.isfinite(naive[:, finite]).all():
        return _broken(name, dtype, "the comparator is not finite here; it cannot judge")
    got, naive, truth = got[finite], naive[:, finite], truth[finite]
    limits, size = LIMITS[dtype], _largest(truth)
    eps = float(ml_dtypes.finfo(dtype).eps)
    slack = condition * eps * size
    max_error, naive_max = _largest(got - truth), _largest(naive - truth)
    max_allowed = 2.0 * naive_max + 2.0 * ulp_term(truth, dtype) + slack
    rms_error, naive_rms = _rms(got - truth), max(_rms(run - truth) for run in naive)
    rms_allowed = limits.rms_factor * naive_rms + 0.5 * eps * _rms(truth) + slack
    absolute = limits.gradient_backstop if name.startswith("d_") else limits.out_backstop
    limit = absolute * max(1.0, size)
    failure = None
    if max_error > max_allowed:
        failure = (
            f"{name}: max error {max_error:.3g} > allowed {max_allowed:.3g} (naive {naive_max:.3g})"
        )
    elif rms_error > rms_allowed:
        failure = (
            f"{name}: rms error {rms_error:.3g} > allowed {rms_allowed:.3g} (naive {naive_rms:.3g})"
        )
    elif backstop and max_error > limit:
        failure = f"{name}: max error {max_error:.3g} > backstop {limit:.3g}"
    return Report(
        name, dtype, max_error, naive_max, max_allowed, rms_error, naive_rms, rms_allowed, failure
    )


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max()) if x.size else 0.0


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
