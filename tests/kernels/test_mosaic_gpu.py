"""The GPU kernels by their interpreter, which looks for races: the conformance table and more.

What is not seen here: registers, how copies are made before Hopper, and the hardware's own
exponentials. Finite is asserted before any tolerance by the judge of the table itself.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.kernels.covered_cases import NEEDED
from tests.kernels.interpreted import (
    SMALL_TRACED_GRID,
    assert_declines_tables,
    case_inputs,
    every_result,
    on_gpu,
    register,
)
from tests.lanes import slow
from xsake.errors import UnsupportedError
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.mosaic_gpu import ampere, hopper
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.layout import BlockLayout
from xsake.layout.synthetic import ragged_grid
from xsake.masks import Causal, FromFunction, PerHead, Window
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

WINDOWS = [Causal() & Window(left=left, right=0) for left in (2, 11, 24, 40, 7, 30, 18, 3, 26)]
SMALL = {"q_tokens": 45, "kv_tokens": 45, "head_dim": 16, "value_dim": 16, "dtype": "bfloat16"}


def _half(case: ConformanceCase) -> ConformanceCase:
    """The case in a dtype that the kernels take."""
    if case.dtype != "float32":
        return case
    return dataclasses.replace(case, name=f"{case.name}_in_bfloat16", dtype="bfloat16")


OWN_CASES = [
    ConformanceCase(
        "group_of_three", PerHead(WINDOWS), block=(16, 32), q_heads=9, kv_heads=3, **SMALL
    ),
    ConformanceCase(
        "group_of_eight", Causal(), block=(32, 16), q_heads=8, kv_heads=1, batch=2, **SMALL
    ),
    ConformanceCase(
        "segments_and_windows", PerHead(WINDOWS[:4]), block=(32, 32), q_heads=4, kv_heads=2,
        batch=2, segments=(((20, 18), (20, 18)), ((45,), (45,))), softcap=2.0, sinks=2, **SMALL,
    ),
    ConformanceCase(
        "blocks_of_several_tiles", Causal() & Window(left=100, right=0), block=(128, 64),
        q_tokens=190, kv_tokens=190, q_heads=2, kv_heads=1, dtype="float16",
    ),
]  # fmt: skip
SERVED = [_half(case) for case in NEEDED if case.bias is None] + OWN_CASES
# What differs on Hopper, whose warp groups and tiles of 64 tokens serve the same schedules: one and
# two groups, tiles within and beyond a block, every shape of a list, integers, features.
ON_HOPPER = [
    case for case in SERVED if case.name.removesuffix("_in_bfloat16") in {
        "explicit_with_empty_rows_and_columns", "window_100_100", "more_queries_than_keys",
        "decode_one_query", "head_dim_96_values_40", "ragged_grid_traced",
        "indices_and_counts_per_batch", "empty_layout", "softcap", "positions_per_batch",
        "head_dim_64_longer_float16", "group_of_three", "segments_and_windows",
    }
]  # fmt: skip


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Both backends, run by the interpreter."""
    register(monkeypatch, OP, gpu_checked=on_gpu(), hopper_checked=on_gpu(hopper))


@pytest.mark.parametrize(
    "case", [_half(SMALL_TRACED_GRID), *map(slow, SERVED)], ids=lambda case: case.name
)
def test_kernels_are_within_the_error_budget_and_without_races(case):
    assert failures(check_case(xsake.attention, case, "gpu_checked")) == []


@pytest.mark.parametrize("case", [OWN_CASES[3], *map(slow, ON_HOPPER)], ids=lambda case: case.name)
def test_specialized_warp_groups_are_within_the_error_budget_and_without_races(case):
    assert failures(check_case(xsake.attention, case, "hopper_checked")) == []


def test_heads_that_hopper_has_no_registers_for_are_declined():
    with pytest.raises(UnsupportedError, match="128 features"):
        check_case(xsake.attention, _half(BY_NAME["head_dim_256"]), "hopper_checked")


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        ("cuda", "no GPU was found"),
        ("sm_75", "7.5 is older than 8.0"),
        ("sm_130", "13.0 is not among those"),
        ("sm_80", None),
        ("sm_89", None),
        ("sm_90a", None),
        ("sm_120a", None),
    ],
)
def test_the_capability_is_checked_before_anything_is_lowered(platform, reason):
    inputs = case_inputs("ragged_grid", jnp.bfloat16)
    found = ampere.unsupported_reason(inputs, BlockSparseConfig(0.2), platform)
    assert found is None if reason is None else reason in found


def test_float32_and_bias_are_declined_with_their_reasons():
    inputs, config = case_inputs("ragged_grid"), BlockSparseConfig(0.2)
    assert "not float32" in ampere.unsupported_reason(inputs, config, "sm_80")
    with pytest.raises(UnsupportedError, match="bias"):
        check_case(xsake.attention, _half(BY_NAME["bias_shared"]), "gpu_checked")


def test_explain_reports_the_backend_of_each_gpu_and_why():
    half, whole = (jax.ShapeDtypeStruct((1, 1024, 4, 64), x) for x in ("bfloat16", "float32"))
    explain = lambda x, platform: xsake.explain(x, x, x, mask=Causal(), platform=platform)
    assert explain(half, "sm_80").implementation == "mosaic_gpu"
    assert explain(half, "sm_90a").implementation == "mosaic_gpu_hopper"
    assert "not 12.0" in explain(half, "sm_120a").declined["mosaic_gpu_hopper"]
    for platform, x, reason in (
        ("sm_75", half, "older than 8.0 (Ampere)"),
        ("sm_90", whole, "not float32"),
        ("rocm", half, "runs on cuda only"),
    ):
        found = explain(x, platform)
        assert found.implementation == "xla"
        assert reason in found.declined["mosaic_gpu"]


def test_rules_that_need_tables_are_declined_for_traced_layouts_and_positions():
    assert_declines_tables(ampere, "sm_80", jnp.bfloat16)


def small_inputs() -> BlockSparseInputs:
    rng = np.random.default_rng(0)
    layout = BlockLayout.from_mask(Causal() & Window(20, 0), q_tokens=70, block_q=32, block_kv=32)
    shapes = (1, 70, 4, 16), (1, 70, 2, 16), (1, 70, 2, 16)
    arrays = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    return BlockSparseInputs(*arrays, layout)


@pytest.mark.slow
def test_a_traced_layout_gives_the_bits_of_the_static_one():
    inputs = small_inputs()
    traced = inputs._replace(layout=inputs.layout.traced(capacity=40))
    assert every_result(on_gpu(), traced, 0.2) == every_result(on_gpu(), inputs, 0.2)


@pytest.mark.slow
def test_what_no_query_sees_changes_no_bit():
    # Keys 50..53 and queries 60..63 share blocks with others, but have no visible pair.
    hidden = lambda q, kv: ((kv < 50) | (kv >= 54)) & ((q < 60) | (q >= 64))
    mask = Causal() & FromFunction(hidden)
    layout = BlockLayout.from_mask(mask, q_tokens=70, block_q=32, block_kv=32)
    clean = small_inputs()._replace(layout=layout)
    token = jnp.arange(70)[None, :, None, None]
    bad_key, bad_query = (token >= 50) & (token < 54), (token >= 60) & (token < 64)
    dirty = clean._replace(
        k=jnp.where(bad_key, jnp.nan, clean.k),
        v=jnp.where(bad_key, jnp.inf, clean.v),
        q=jnp.where(bad_query, jnp.nan, clean.q),
    )
    assert every_result(on_gpu(), dirty, 0.2) == every_result(on_gpu(), clean, 0.2)


@pytest.mark.parametrize("mean", [0.25, 0.5])
def test_ragged_heads_keep_132_multiprocessors_busy_and_explain_says_so(mean):
    grid = ragged_grid(32, 32, mean, seed=0, low=0.1, high=0.9)
    layout = BlockLayout.from_block_mask(grid, block_q=128, block_kv=128, mask=Causal())
    q, k = (jax.ShapeDtypeStruct((1, 4096, heads, 128), "bfloat16") for heads in (32, 8))
    report = xsake.explain(q, k, k, layout=layout, platform="sm_90a")
    assert report.implementation == "mosaic_gpu_hopper"
    for each in report.passes:
        assert (each.cores, each.computed) == (132, each.listed)
        assert 1 <= each.balance <= 1.10
        assert each.padded > 1.2
    assert "mean of 132 cores" in str(report) and "padding to the widest head" in str(report)


@pytest.mark.parametrize(
    ("platform", "features", "implementation"),
    [("sm_86", 256, "xla"), ("sm_86", 192, "mosaic_gpu"), ("sm_80", 256, "mosaic_gpu"),
     ("sm_120a", 256, "xla")],
)  # fmt: skip
def test_heads_that_do_not_fit_into_shared_memory_are_declined(platform, features, implementation):
    q = jax.ShapeDtypeStruct((1, 256, 2, features), "bfloat16")
    report = xsake.explain(q, q, q, mask=Causal(), platform=platform)
    assert report.implementation == implementation
    assert ("KiB of shared memory" in str(report)) == (implementation == "xla")
