"""What attention means at its edges, N5 and the peers' bugs, mostly without a tolerance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.kernels.compiled import compiled
from tests.kernels.implementations import each_implementation
from tests.lanes import slow
from xsake.layout import BlockLayout
from xsake.masks import Causal, Explicit
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import call, compare, failures, reference_results


@each_implementation
@pytest.mark.parametrize(
    "name", ["explicit_with_empty_rows_and_columns", "empty_layout", slow("ragged_grid")]
)
def test_empty_rows_and_columns_are_exactly_zero(name, implementation):
    case = BY_NAME[name]
    got = call(compiled(case, implementation), case.inputs())
    empty_row = np.moveaxis(~case.allowed.any(-1), 1, 2)  # [B, Tq, Hq]
    assert empty_row.any()
    assert not got["out"][empty_row].any() and np.all(got["lse"][empty_row] == -np.inf)
    assert not got["d_q"][empty_row].any()
    heads = case.allowed.reshape(case.batch, case.kv_heads, -1, *case.allowed.shape[2:])
    empty_column = np.moveaxis(~heads.any((2, 3)), 1, 2)  # [B, Tk, Hk]
    assert not got["d_k"][empty_column].any() and not got["d_v"][empty_column].any()
    for array in (got["out"], got["d_q"], got["d_k"], got["d_v"]):
        assert np.isfinite(array).all()


@each_implementation
def test_causal_compares_positions_and_guesses_no_corner(implementation):
    case = ConformanceCase("corner", Causal(), block=(16, 16), q_tokens=5, kv_tokens=40)
    values = jnp.broadcast_to(jnp.eye(40)[None, :, None, :], (1, 40, 2, 40))
    x = case.inputs().operands | {"v": values}
    out = xsake.attention(**x, **case.static, implementation=implementation)
    seen = np.asarray(out)[0, :, 0] > 0
    np.testing.assert_array_equal(seen, np.tril(np.ones((5, 40), bool)))


@each_implementation
def test_mask_and_layout_together_mean_both(implementation):
    table = np.random.default_rng(0).random((64, 64)) < 0.7
    grid = np.random.default_rng(1).random((1, 4, 4)) < 0.6
    layout = BlockLayout.from_block_mask(grid, block_q=16, block_kv=16)
    pairs = Explicit(table & np.kron(grid[0], np.ones((16, 16), bool)))
    both = ConformanceCase("both", pairs, block=(16, 16), q_tokens=64, kv_tokens=64)
    inputs, truth, plain = reference_results(both)
    rules = {"mask": Explicit(table), "layout": layout, "implementation": implementation}
    out, lse = jax.jit(lambda x: xsake.attention(**x, **rules, return_lse=True))(inputs.operands)
    got = {"out": np.asarray(out), "lse": np.asarray(lse)}
    assert failures(compare(got, plain, {n: truth[n] for n in got}, dtype="float32")) == []
