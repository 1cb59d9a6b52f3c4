"""Logits at the ends of the number range: finite wherever the truth is, and still right (N6)."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.compiled import compiled
from tests.kernels.implementations import each_implementation
from tests.lanes import slow
from xsake.masks import Causal
from xsake.testing.budget import non_finite
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import call, compute_truth, run_naive

BASE = ConformanceCase(
    "extreme", Causal(), block=(16, 16), q_tokens=60, kv_tokens=60, head_dim=16, value_dim=16,
    bias=(False, False),
)  # fmt: skip


def largest_logit(operands):
    q, k, bias = (operands[n].astype(np.float64) for n in ("q", "k", "bias"))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    return float(np.abs(s[np.isfinite(s)]).max())


def spread(operands, size):
    """Random logits of mixed sign up to `size`, from large queries."""
    q = operands["q"].astype(np.float64) * size / largest_logit(operands)
    return {"q": q.astype(operands["q"].dtype)}


def with_bias(operands, edit):
    bias = np.zeros_like(operands["bias"])
    edit(bias)
    return {"bias": bias}


def rows_gone(bias):
    bias[:, :, [0, 7, 59]] = -np.inf


def block_gone(bias):
    bias[:, :, 16:32, :16] = -np.inf
    bias[:, :, 40:44, 3:] = -np.inf


VARIANTS = {
    "ten_thousand": lambda x: spread(x, 1e4),
    "thirty_thousand": lambda x: spread(x, 3e4),
    "all_equal": lambda x: {"q": np.zeros_like(x["q"]), "bias": np.full_like(x["bias"], 50.0)},
    "dominant_88": lambda x: with_bias(x, lambda bias: bias.__setitem__((..., 5), 88.0)),
    "dominant_700": lambda x: with_bias(x, lambda bias: bias.__setitem__((..., 5), 700.0)),
    "dominant_late": lambda x: with_bias(x, lambda bias: bias.__setitem__((..., 50), 700.0)),
    "deep_below_zero": lambda x: {"bias": np.full_like(x["bias"], -1e4)},
    "minus_infinite_rows": lambda x: with_bias(x, rows_gone),
    "minus_infinite_block": lambda x: with_bias(x, block_gone),
    "subnormal": lambda x: {
        n: (x[n].astype(np.float64) * 1e-39).astype(x[n].dtype) for n in ("q", "v")
    },
    "huge_values": lambda x: {"v": (x["v"].astype(np.float64) * 1e30).astype(x["v"].dtype)},
}


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@each_implementation
def test_finite_and_right_wherever_the_truth_is_finite(implementation, dtype):
    for name in VARIANTS:
        check_variant(name, implementation, dtype)


def check_variant(name, implementation, dtype):
    case = dataclasses.replace(BASE, dtype=dtype)
    inputs = case.inputs()
    inputs = inputs.replace(**VARIANTS[name](inputs.operands))
    truth, plain = compute_truth(case, inputs), run_naive(case, inputs)
    got = call(compiled(case, implementation), inputs)
    # An error of one unit in the last place of the largest logit moves a probability by as much;
    # what it moves is at most as large as the operands that meet in that array.
    sizes = {n: float(np.abs(inputs.operands[n].astype(np.float64)).max()) for n in "qkv"}
    largest, eps = largest_logit(inputs.operands), float(ml_dtypes.finfo(dtype).eps)
    logit_error = eps * (2.0 + min(largest, 1 / eps))
    flow = sizes["v"] * float(np.abs(inputs.d_out.astype(np.float64)).max()) * case.value_dim
    reach = {"out": sizes["v"], "lse": largest + 4, "d_v": 60.0, "d_bias": flow}
    reach |= {"d_q": flow * sizes["k"] * 8, "d_k": flow * sizes["q"] * 8}
    for array, right in truth.items():
        where = f"{name}: {array}"
        assert non_finite(got[array].astype(np.float64), right) is None, where
        seen = np.isfinite(right)
        error = np.abs(got[array][seen].astype(np.float64) - right[seen]).max()
        naive_error = np.abs(plain[array][:, seen].astype(np.float64) - right[seen]).max()
        flushed = 1e-36  # XLA may flush subnormal numbers to zero
        assert error <= 2 * naive_error + logit_error * reach[array] + flushed, where
