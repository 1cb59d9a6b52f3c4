"""Runs an attention function through a case and judges every output and gradient.

The function under test is handed in; it takes the arguments of `xsake.attention`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xsake.testing import naive, oracle
from xsake.testing.budget import Report, judge
from xsake.testing.cases import Case, Inputs
from xsake.testing.oracle import Truth

Arrays = dict[str, np.ndarray]


def bind(attention: Callable[..., Any], case: Case, implementation: str) -> Callable[..., Any]:
    """`attention` as a function of arrays only: operands by name, then integers by name."""

    static = case.static  # built here, where arrays have values, and not while tracing

    def attend(operands: dict[str, Any], integers: dict[str, Any]):
        return attention(
            **operands, **integers, **static, return_lse=True, implementation=implementation
        )

    return attend


def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `attend(operands, integers) -> (out, lse)` into one that also returns every gradient."""

    def run(operands, integers, d_out, d_lse):
        (out, lse), pull = jax.vjp(lambda given: attend(given, integers), operands)
        (gradients,) = pull((d_out, d_lse))
        return {"out": out, "lse": lse, **{f"d_{name}": g for name, g in gradients.items()}}

    return run


def call(run: Callable[..., Any], inputs: Inputs) -> Arrays:
    """Call what `with_gradients` made, and bring the answer to NumPy."""
    answer = run(inputs.operands, inputs.integers, inputs.d_out, inputs.d_lse)
    return {name: np.asarray(value) for name, value in answer.items()}


def run_case(
    attention: Callable[..., Any], case: Case, implementation: str, inputs: Inputs
) -> Arrays:
    """One jitted call of the library: out, lse and all gradients by name."""
    return call(jax.jit(with_gradients(bind(attention, case, implementation))), inputs)


def named(found: Truth, inputs: Inputs) -> Arrays:
    """Truth or comparator under the names `with_gradients` uses."""
    names = ["out", "lse", *(f"d_{name}" for name in inputs.operands)]
    return {name: getattr(found, name) for name in names}


def truth_of(case: Case, inputs: Inputs) -> Arrays:
    """The float64 answer."""
    return named(oracle.attend(case.operands(inputs), inputs.d_out, inputs.d_lse), inputs)


def run_naive(case: Case, inputs: Inputs) -> Arrays:
    """The comparator's answers in the dtype of the case, its runs stacked on a new first axis."""
    runs = naive.in_three_orders(case.operands(inputs), inputs.d_out, inputs.d_lse, case.dtype)
    each = [named(found, inputs) for found in runs]
    return {name: np.stack([run[name] for run in each]) for name in each[0]}


@functools.lru_cache(maxsize=128)
def expected(case: Case) -> tuple[Inputs, Arrays, Arrays]:
    """Inputs, truth and comparator of a case; they do not depend on the implementation."""
    inputs = case.inputs()
    return inputs, truth_of(case, inputs), run_naive(case, inputs)


def compare(got: Arrays, plain: Arrays, truth: Arrays, *, dtype: str, **rules: Any) -> list[Report]:
    """Judge every array the truth has."""
    missing = truth.keys() - got.keys()
    if missing:
        raise KeyError(f"the implementation returned no {sorted(missing)}")
    return [
        judge(name, got[name], plain[name], truth[name], dtype=dtype, **rules) for name in truth
    ]


def check_case(attention: Callable[..., Any], case: Case, implementation: str) -> list[Report]:
    """Reports on out, lse and all gradients of one implementation in one case."""
    inputs, truth, plain = expected(case)
    got = run_case(attention, case, implementation, inputs)
    # N3's absolute limit is stated for unit-variance inputs.
    return compare(got, plain, truth, dtype=case.dtype, backstop=case.logits == 1.0)


def failures(reports: list[Report]) -> list[str]:
    """The broken rules, in words."""
    return [report.failure for report in reports if report.failure is not None]
