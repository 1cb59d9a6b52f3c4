"""Run an attention function on conformance cases and check every output and gradient.

The tested function is an argument; it has the signature of `xsake.attention`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xsake.testing import naive, oracle
from xsake.testing.budget import ErrorReport, check_error
from xsake.testing.cases import CaseInputs, ConformanceCase
from xsake.testing.oracle import Truth

Arrays = dict[str, np.ndarray]


def bind(
    attention: Callable[..., Any], case: ConformanceCase, implementation: str
) -> Callable[..., Any]:
    """Return `attention` as a function of arrays only: operands and integers by name."""

    static = case.static  # built outside of tracing

    def attend(operands: dict[str, Any], integers: dict[str, Any]):
        return attention(
            **operands, **integers, **static, return_lse=True, implementation=implementation
        )

    return attend


def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `attend(operands, integers)` and all gradients."""

    def run(operands, integers, d_out, d_lse):
        (out, lse), vjp = jax.vjp(lambda given: attend(given, integers), operands)
        (gradients,) = vjp((d_out, d_lse))
        return {"out": out, "lse": lse, **{f"d_{name}": g for name, g in gradients.items()}}

    return run


def call(run: Callable[..., Any], inputs: CaseInputs) -> Arrays:
    """Call a function of `with_gradients` and convert the results to NumPy."""
    answer = run(inputs.operands, inputs.integers, inputs.d_out, inputs.d_lse)
    return {name: np.asarray(value) for name, value in answer.items()}


def run_case(
    attention: Callable[..., Any], case: ConformanceCase, implementation: str, inputs: CaseInputs
) -> Arrays:
    """Run one jitted call; return out, lse and all gradients by name."""
    return call(jax.jit(with_gradients(bind(attention, case, implementation))), inputs)


def select_outputs(results: Truth, inputs: CaseInputs) -> Arrays:
    """Return results by the names of `with_gradients`."""
    names = ["out", "lse", *(f"d_{name}" for name in inputs.operands)]
    return {name: getattr(results, name) for name in names}


def compute_truth(case: ConformanceCase, inputs: CaseInputs) -> Arrays:
    """Return the float64 results."""
    return select_outputs(oracle.attend(case.operands(inputs), inputs.d_out, inputs.d_lse), inputs)


def run_naive(case: ConformanceCase, inputs: CaseInputs) -> Arrays:
    """Return naive results in the dtype of the case, runs stacked on a new first axis."""
    runs = naive.run_three_orders(case.operands(inputs), inputs.d_out, inputs.d_lse, case.dtype)
    each = [select_outputs(results, inputs) for results in runs]
    return {name: np.stack([run[name] for run in each]) for name in each[0]}


@functools.lru_cache(maxsize=128)
def reference_results(case: ConformanceCase) -> tuple[CaseInputs, Arrays, Arrays]:
    """Return inputs, truth and naive results of a case, independent of the implementation."""
    inputs = case.inputs()
    return inputs, compute_truth(case, inputs), run_naive(case, inputs)


def compare(
    got: Arrays, naive_results: Arrays, truth: Arrays, *, dtype: str, **options: Any
) -> list[ErrorReport]:
    """Check every array of the truth."""
    missing = truth.keys() - got.keys()
    if missing:
        raise KeyError(f"the implementation returned no {sorted(missing)}")
    return [
        check_error(name, got[name], naive_results[name], truth[name], dtype=dtype, **options)
        for name in truth
    ]


def check_case(
    attention: Callable[..., Any],
    case: ConformanceCase,
    implementation: str,
    *,
    extra_ulps: float = 0.0,
) -> list[ErrorReport]:
    """Check out, lse and all gradients of one implementation in one case; see `check_error`."""
    inputs, truth, naive_results = reference_results(case)
    got = run_case(attention, case, implementation, inputs)
    # The absolute limit is defined for unit-variance inputs.
    return compare(
        got, naive_results, truth, dtype=case.dtype, extra_ulps=extra_ulps,
        backstop=case.logits == 1.0,
    )  # fmt: skip


def failures(reports: list[ErrorReport]) -> list[str]:
    """Return the messages of failed checks."""
    return [report.failure for report in reports if report.failure is not None]
