"""`xsake bench` measures what it says, finds wrong results, and says what it did not run."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.lanes import gate
from xsake.benchmarking import HEADS, model_shape
from xsake.benchmarking.measure import DENSE, PRODUCT, BenchSettings, measure
from xsake.benchmarking.workloads import (
    TOLERANCE,
    random_inputs,
    spot_error,
    xsake_call,
)
from xsake.errors import ArgumentError
from xsake.layout.synthetic import causal_grid, ragged_grid

SMALL = BenchSettings("gemma-3-1b", tokens=(96,), budgets=(0.6,), block=16, rounds=2)


@pytest.mark.parametrize("kind", gate(["attention"], ["attention", "backward"]))
def test_every_side_has_a_row_that_was_checked_and_compared(kind):
    rows = {row.side: row for row in measure(kind, SMALL)}
    assert list(rows) == [DENSE, "xsake, 60%", "jax.nn"]
    for row in rows.values():
        assert row.is_correct and row.seconds is not None and row.repeats == 2
        assert row.ratio_to(PRODUCT).median > 0
    dense, sparse = rows[DENSE], rows["xsake, 60%"]
    assert dense.budget == 1 and 0.5 < sparse.budget < 0.7
    assert sparse.flops / dense.flops == pytest.approx(sparse.budget)
    # Two products of 2 x 256 flops for every pair of the blocks, and five more for gradients.
    blocks = causal_grid(4, 6).sum()
    assert dense.flops == blocks * 16**2 * 2 * 256 * (2 if kind == "attention" else 7)


def test_a_new_token_sees_the_whole_cache():
    row = measure("decode", dataclasses.replace(SMALL, tokens=(80,)))[0]
    assert (row.shape.q_tokens, row.shape.kv_tokens, row.is_correct) == (1, 80, True)


@pytest.mark.slow  # quicker: rows of the forward pass
def test_memory_is_the_compilers_and_nothing_is_run():
    rows = measure("memory", SMALL)
    assert all(row.temp_bytes and row.seconds is None and row.is_correct is None for row in rows)


def test_a_side_that_needs_too_much_is_named_with_the_reason():
    rows = measure("attention", dataclasses.replace(SMALL, max_bytes=1000))
    assert rows[-1].side == "jax.nn" and "GB" in rows[-1].failure and rows[-1].seconds is None


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_wrong_result_is_found(is_backward):
    inputs = random_inputs(model_shape("smollm2-135m", 64), "float32", 0)
    grid = ragged_grid(9, 4, 0.7, seed=0)
    call = xsake_call(inputs, "xsake_call", grid, block=16, is_backward=is_backward)
    found = call.result if is_backward else (call.result,)
    check = lambda found, grid: spot_error(inputs, found, grid, block=16, seed=1)
    assert check(found, grid) <= TOLERANCE["float32"]
    assert check(found, None) > 1e-2, "another grid"
    out, *rest = found
    assert check((out * 1.001, *rest), grid) > 1e-4
    assert np.isnan(check((jnp.full_like(out, jnp.nan), *rest), grid))
    if is_backward:
        assert check((out, rest[0] * 1.001, *rest[1:]), grid) > 1e-5


def test_shapes_are_those_of_models():
    assert all(q % kv == 0 for q, kv, _ in HEADS.values())
    with pytest.raises(ArgumentError, match="smollm2-135m"):
        model_shape("smollm3", 64)
