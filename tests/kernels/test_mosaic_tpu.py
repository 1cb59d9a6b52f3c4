"""The TPU kernels by interpreters: the conformance table, and what only they can get wrong.

Finite is asserted before any tolerance by the judge of the table itself.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import xsake
from tests.kernels.covered_cases import NEEDED
from tests.kernels.interpreted import (
    CHECKED,
    SMALL_TRACED_GRID,
    assert_declines_tables,
    case_inputs,
    every_result,
    on_tpu,
    register,
)
from tests.lanes import slow
from xsake.errors import UnsupportedError
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.mosaic_tpu import kernels as mosaic_tpu
from xsake.kernels.block_sparse.mosaic_tpu import schedule
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, TileSizes
from xsake.layout import BlockLayout
from xsake.masks import Causal, Explicit, PerHead, Window
from xsake.testing.case_table import BY_NAME, CASES
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

# What the kernels decline, and which words say so.
DECLINED = {case.name: "float16" for case in CASES if case.dtype == "float16"}
DECLINED |= {case.name: "bias" for case in CASES if case.bias is not None}

SMALL = {"q_tokens": 45, "kv_tokens": 45, "head_dim": 16, "value_dim": 16}
WINDOWS = [Causal() & Window(left=left, right=0) for left in (2, 11, 24, 40, 7, 30, 18, 3, 26)]
OWN_CASES = [
    ConformanceCase(
        "three_query_heads_a_group", PerHead(WINDOWS), block=(16, 8), q_heads=9, kv_heads=3, **SMALL
    ),
    ConformanceCase(
        "eight_query_heads_a_group", PerHead(WINDOWS[:8]), block=(8, 16), q_heads=8, kv_heads=1,
        batch=2, **SMALL,
    ),
    ConformanceCase(
        "shared_list_group_of_three", Causal(), block=(16, 16), q_heads=6, kv_heads=2, batch=2,
        **SMALL,
    ),
    ConformanceCase(
        "segments_and_windows", PerHead(WINDOWS[:4]), block=(16, 16), q_heads=4, kv_heads=2,
        batch=2, segments=(((20, 18), (20, 18)), ((45,), (45,))), softcap=2.0, sinks=2, **SMALL,
    ),
    ConformanceCase(
        "hardware_blocks", Causal() & Window(left=150, right=0), block=(128, 128), q_tokens=300,
        kv_tokens=300, head_dim=64, value_dim=64, dtype="bfloat16",
    ),
]  # fmt: skip
SERVED = [case for case in NEEDED if case.name not in DECLINED]


@pytest.fixture(autouse=True)
def interpreters(monkeypatch):
    """Both interpreters as backends, each under its name."""
    register(monkeypatch, OP, tpu_interpreted=on_tpu(), tpu_checked=on_tpu(CHECKED))
    monkeypatch.setattr(schedule, "MAX_SLOTS", 2)  # half the code, half the time to compile it
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    "case", [SMALL_TRACED_GRID, *map(slow, SERVED + OWN_CASES)], ids=lambda case: case.name
)
def test_no_error_beyond_the_budget_no_race_no_stray_access_no_unwritten_memory(case):
    assert failures(check_case(xsake.attention, case, "tpu_checked")) == []


@pytest.mark.parametrize(("name", "reason"), DECLINED.items())
def test_what_is_declined_is_declined_with_its_reason(name, reason):
    with pytest.raises(UnsupportedError, match=reason):
        check_case(xsake.attention, BY_NAME[name], "tpu_interpreted")


def test_rules_that_need_tables_are_declined_for_traced_layouts_and_positions():
    assert_declines_tables(mosaic_tpu, "tpu", jnp.float32)


@pytest.mark.slow
def test_launches_and_cores_change_no_bit(monkeypatch):
    inputs, config = case_inputs("ragged_grid"), BlockSparseConfig(0.2)
    whole = every_result(on_tpu(), inputs, 0.2)
    assert [x.launches for x in mosaic_tpu.count_passes(inputs, config, "tpu")] == [1, 1, 1]
    monkeypatch.setattr(schedule, "CORES", 1)
    assert every_result(on_tpu(), inputs, 0.2) == whole
    monkeypatch.setattr(schedule, "CORES", 2)
    monkeypatch.setattr(schedule, "MAX_ENTRIES", 55)
    assert all(x.launches > 1 for x in mosaic_tpu.count_passes(inputs, config, "tpu"))
    assert every_result(on_tpu(), inputs, 0.2) == whole


@pytest.mark.slow
def test_a_traced_layout_gives_the_bits_of_the_static_one(monkeypatch):
    inputs, config = case_inputs("ragged_grid"), BlockSparseConfig(0.2)
    whole = every_result(on_tpu(), inputs, 0.2)
    traced = inputs._replace(layout=inputs.layout.traced(capacity=120))
    assert every_result(on_tpu(), traced, 0.2) == whole
    monkeypatch.setattr(schedule, "MAX_ENTRIES", 150)
    assert all(x.launches > 1 for x in mosaic_tpu.count_passes(traced, config, "tpu"))
    assert every_result(on_tpu(), traced, 0.2) == whole


@pytest.mark.slow
def test_launches_pass_the_strict_interpreter(monkeypatch):
    monkeypatch.setattr(schedule, "MAX_ENTRIES", 150)
    case = dataclasses.replace(BY_NAME["ragged_grid_traced"], name="split")
    assert failures(check_case(xsake.attention, case, "tpu_checked")) == []


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3, 4])
def test_groups_of_any_size_stay_within_the_error_budget(slots, monkeypatch):
    monkeypatch.setattr(schedule, "MAX_SLOTS", slots)
    case = dataclasses.replace(BY_NAME["ragged_grid"], name=f"groups_of_{slots}")
    assert failures(check_case(xsake.attention, case, "tpu_interpreted")) == []


def kernel_calls(jaxpr):
    """The kernels of a program, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            yield from kernel_calls(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_compiler_gets_the_cost_that_the_model_counts(is_traced):
    static, config = case_inputs("ragged_grid"), BlockSparseConfig(0.2)

    def run(arrays, layout, do, dlse):
        inputs = BlockSparseInputs(*arrays, static.layout if layout is None else layout)
        o, lse = mosaic_tpu.forward(inputs, config, "tpu")
        return mosaic_tpu.backward(inputs, config, "tpu", o, lse, do, dlse)

    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    layout = jax.tree.map(abstract, static.layout.traced()) if is_traced else None
    arrays, lse = static[:3], jax.ShapeDtypeStruct(static.q.shape[:3], "float32")
    calls = kernel_calls(jax.make_jaxpr(run)(arrays, layout, static.q, lse).jaxpr)
    inputs = static if layout is None else static._replace(layout=layout)
    counted = mosaic_tpu.count_passes(inputs, config, "tpu")
    assert [x.launches for x in counted] == [1, 1, 1]
    for call, expected in zip(calls, counted, strict=True):
        estimate = call.params["cost_estimate"]
        assert estimate.flops == expected.flops > 0
        assert estimate.bytes_accessed == expected.bytes_read + expected.bytes_written


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_vmap_joins_the_batch(traced):
    layout = BlockLayout.from_block_mask(
        np.tri(3, dtype=bool), q_tokens=45, kv_tokens=45, block_q=16, block_kv=16
    )
    layout = layout.traced() if traced else layout
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((3, 2, 45, heads, 16), np.float32) for heads in (4, 2))
    positions = rng.permutation(45).astype(np.int32)

    def loss(q, k, implementation):
        given = {"mask": Causal() & Window(20, 0), "layout": layout}
        given |= {"q_positions": positions, "kv_positions": positions}
        return (xsake.attention(q, k, k, **given, implementation=implementation) ** 2).sum()

    def gradients(implementation):
        one = lambda q, k: jax.grad(loss, (0, 1))(q, k, implementation)
        return jax.jit(jax.vmap(one, (0, None)))

    for found, expected in zip(
        gradients("tpu_interpreted")(q, k[0]), gradients("xla")(q, k[0]), strict=True
    ):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, atol=2e-5)
    lowered = gradients(None).trace(q, k[0]).lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("tpu_custom_call") == 3


def test_another_budget_in_the_same_bucket_is_the_same_program_for_a_tpu():
    x = jnp.zeros((1, 1024, 4, 64), jnp.bfloat16)
    rng = np.random.default_rng(0)

    def program(budget):
        grid = rng.random((4, 8, 8)) < budget
        layout = BlockLayout.from_block_mask(grid, block_q=128, block_kv=128, mask=Causal())
        attend = jax.jit(lambda x, layout: xsake.attention(x, x, x, layout=layout))
        layout = layout.traced(capacity=160)
        lowered = attend.trace(x, layout).lower(lowering_platforms=("tpu",)).as_text()
        return layout.items, lowered

    (few, first), (many, second) = program(0.3), program(0.9)
    assert few < many and "tpu_custom_call" in first
    assert first == second


def test_a_global_matmul_precision_changes_no_product():
    x = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    layout = BlockLayout.from_mask(Causal(), q_tokens=128)
    inputs = lambda x: BlockSparseInputs(x, x, x, layout)
    run = jax.make_jaxpr(lambda x: mosaic_tpu.forward(inputs(x), BlockSparseConfig(1.0), "tpu"))
    usual = str(run(x))
    with jax.default_matmul_precision("highest"):  # which libtpu refuses for bfloat16
        assert str(run(x)) == usual


def test_tiles_can_be_chosen():
    inputs = case_inputs("ragged_grid")
    counted = mosaic_tpu.count_passes(inputs, BlockSparseConfig(0.2, tiles=TileSizes(1, 2)), "tpu")
    assert [x.tiles.blocks for x in counted] == [2, 2, 2]
    assert counted[0].computed == 2 * counted[0].steps


def test_element_masks_are_stored_once_each():
    table = np.tile(np.random.default_rng(0).random((16, 16)) < 0.5, (6, 6))
    layout = BlockLayout.from_mask(Explicit(table), q_tokens=96, block_q=16, block_kv=16)
    x = jnp.zeros((1, 96, 2, 8))
    made = schedule.schedule_queries(BlockSparseInputs(x, x, x, layout), BlockSparseConfig(1.0))
    mask_blocks, _ = made.mask_blocks(keys_first=True)
    assert mask_blocks.shape == (1, 16, 16)
