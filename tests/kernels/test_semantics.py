"""What attention means at its edges, N5 and the peers' bugs, mostly without a tolerance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.lanes import each_implementation
from xsake.layout import BlockLayout
from xsake.masks import Causal, Explicit, Full, Window
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import compare, failures, reference_results, run_case


@each_implementation
@pytest.mark.parametrize(
    "name", ["explicit_with_empty_rows_and_columns", "empty_layout", "ragged_grid"]
)
def test_empty_rows_and_columns_are_exactly_zero(name, implementation):
    case = BY_NAME[name]
    got = run_case(xsake.attention, case, implementation, case.inputs())
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
def test_sinks_alone_give_their_own_lse(implementation):
    case = BY_NAME["empty_layout_with_sinks"]
    inputs = case.inputs()
    got = run_case(xsake.attention, case, implementation, inputs)
    assert not got["out"].any() and not got["d_q"].any() and not got["d_k"].any()
    np.testing.assert_allclose(
        got["lse"], np.broadcast_to(inputs.operands["sinks"], got["lse"].shape), rtol=1e-6
    )


@pytest.mark.slow  # conformance has sinks in several blocks
@each_implementation
def test_sink_mass_does_not_depend_on_how_keys_are_cut(implementation):
    whole = ConformanceCase(
        "cut", Full(), block=(64, 64), q_tokens=64, kv_tokens=64, q_heads=2, sinks=0
    )
    inputs, truth, plain = reference_results(whole)
    for block in ((64, 64), (16, 4)):
        got = run_case(
            xsake.attention, dataclasses.replace(whole, block=block), implementation, inputs
        )
        assert failures(compare(got, plain, truth, dtype="float32")) == [], block


@pytest.mark.slow  # test_tile_sizes has tiles; here is the layout's own
@each_implementation
def test_block_sizes_never_change_the_meaning(implementation):
    rule = Causal() & Window(left=60, right=0)
    case = ConformanceCase(
        "blocks", rule, block=(128, 128), q_tokens=150, kv_tokens=150, kv_heads=1
    )
    inputs, truth, plain = reference_results(case)
    coarse = BlockLayout.from_mask(rule, q_tokens=150, block_q=128, block_kv=128)
    for block in ((128, 128), (64, 64), (32, 64), (64, 32)):
        resized = dataclasses.replace(case, layout=lambda case, block=block: coarse.resize(*block))
        got = run_case(xsake.attention, resized, implementation, inputs)
        assert failures(compare(got, plain, truth, dtype="float32")) == [], block


@each_implementation
def test_causal_compares_positions_and_guesses_no_corner(implementation):
    case = ConformanceCase("corner", Causal(), block=(16, 16), q_tokens=5, kv_tokens=40)
    values = jnp.broadcast_to(jnp.eye(40)[None, :, None, :], (1, 40, 2, 40))
    inputs = case.inputs()
    out = xsake.attention(
        jnp.asarray(inputs.operands["q"]),
        jnp.asarray(inputs.operands["k"]),
        values,
        **case.static,
        implementation=implementation,
    )
    seen = np.asarray(out)[0, :, 0] > 0
    np.testing.assert_array_equal(seen, np.tril(np.ones((5, 40), bool)))


@each_implementation
def test_mask_and_layout_together_mean_both(implementation):
    table = np.random.default_rng(0).random((64, 64)) < 0.7
    grid = np.random.default_rng(1).random((1, 4, 4)) < 0.6
    layout = BlockLayout.from_block_mask(grid, block_q=16, block_kv=16)
    both = ConformanceCase(
        "both",
        Explicit(table & np.kron(grid[0], np.ones((16, 16), bool))),
        block=(16, 16),
        q_tokens=64,
        kv_tokens=64,
    )
    inputs, truth, plain = reference_results(both)
    attend = jax.jit(
        lambda q, k, v: xsake.attention(
            q,
            k,
            v,
            mask=Explicit(table),
            layout=layout,
            return_lse=True,
            implementation=implementation,
        )
    )
    out, lse = attend(*inputs.operands.values())
    got = {"out": np.asarray(out), "lse": np.asarray(lse)}
    assert failures(compare(got, plain, {n: truth[n] for n in got}, dtype="float32")) == []
