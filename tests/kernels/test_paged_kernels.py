"""Kernels of attention over pages, by interpreters: the budget, races, splits, planted bugs."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.interpreted import CHECKED, GPU_CHECKED, Interpreted, register
from tests.kernels.planted import Bug, not_rescaled, plant
from tests.kernels.test_paged_decode import (
    CASES,
    Case,
    budget_failures,
    check_nonfinite_values,
    run,
)
from tests.lanes import gate, slow
from xsake.errors import UnsupportedError
from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.mosaic_gpu import ops
from xsake.kernels.paged_decode import OP, api, mosaic_gpu, mosaic_tpu, paged_attention, splits
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs
from xsake.masks import Causal, FromFunction, PerHead, Window

# What the TPU kernel declines, and which words say so.
DECLINED = {
    "several_queries": "multiple of 8 tokens, not 4",
    "odd_sizes": "multiple of 8 tokens, not 7",
    "long_pages": "multiple of 8 tokens, not 300",
    "float16": "float32 and bfloat16",
    "int8_odd": "multiple of 32 tokens, not 5",
}
OWN_CASES = [
    # Two tiles of rows, several splits, and a split without a page.
    Case("tiles", (100, 9), q_tokens=5, q_heads=8, page=8, head_dim=8, value_dim=24),
    Case("pages_of_a_step_and_more", (300,), page=64, q_heads=2, mask=Causal() & Window(70, 0)),
    Case(
        "rules_of_bfloat16", (90, 31), q_tokens=3, dtype="bfloat16", softcap=5.0, num_sinks=1,
        mask=PerHead([Causal(), Causal() & Window(9, 0)] * 3), listed=0.7,
    ),
]  # fmt: skip
SERVED = [case for case in CASES if case.name not in DECLINED] + OWN_CASES
BY_NAME = {case.name: case for case in [*CASES, *OWN_CASES]}
SPLIT = BY_NAME["lists_per_head"]


def _fit_gpu(name: str, /, **changes: Any) -> Case:
    """The case with pages and a dtype that GPU kernels take."""
    case = BY_NAME[name]
    half = {"dtype": "bfloat16"} if case.dtype == "float32" else {}
    pages = {"head_dim": 16, "value_dim": 16, "page": 32} if case.head_dim <= 16 else {}
    return dataclasses.replace(case, **half | pages | changes)


GPU_NAMES = [
    "one_query", "several_queries", "more_queries_than_tokens", "no_group", "group_of_eight",
    "many_queries", "window_and_sinks", "softcap", "lists_per_head", "shared_prefix", "bfloat16",
    "float16", "rules_of_bfloat16",
]  # fmt: skip
ON_GPU = [_fit_gpu(name) for name in GPU_NAMES] + [
    _fit_gpu("group_of_eight", name="values_of_48", head_dim=64, lengths=(130,), listed=0.8),
    # 8 tokens a page; two tiles of rows.
    _fit_gpu(
        "tiles", name="gpu_tiles", lengths=(70, 9), q_tokens=20, head_dim=64, value_dim=64,
        listed=0.8,
    ),
    _fit_gpu("int8"),
    Case("gpu_wide", (70,), q_heads=2, kv_heads=1, head_dim=192, value_dim=256, dtype="float16"),
    Case(
        "gpu_int8_of_float16", (90,), q_heads=3, kv_heads=3, q_tokens=2, is_int8=True, page=32,
        head_dim=32, value_dim=32, dtype="float16", softcap=3.0,
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interpreters as backends; small steps, splits and tiles, so that calls have several."""
    backends = {
        "tpu": Interpreted(mosaic_tpu, True, "tpu"),
        "tpu_checked": Interpreted(mosaic_tpu, CHECKED, "tpu"),
        "gpu": Interpreted(mosaic_gpu, GPU_CHECKED, "sm_80"),
    }
    register(monkeypatch, OP, **backends)
    for name, value in (("STEP_KEYS", 32), ("SPLIT_KEYS", 96), ("MAX_TILE", 16)):
        monkeypatch.setattr(mosaic_tpu, name, value)
    monkeypatch.setattr(mosaic_gpu, "STEP_KEYS", ((256, 64),))
    monkeypatch.setattr(mosaic_gpu, "SPLIT_KEYS", 128)
    api._run.clear_cache()
    yield
    api._run.clear_cache()


OFTEN = ["lists_per_head", "rules_of_bfloat16", "int8"]


@pytest.mark.parametrize("case", gate(OFTEN, SERVED), ids=lambda case: case.name)
def test_results_are_within_the_error_budget(case):
    assert budget_failures(case, "tpu") == []


@pytest.mark.parametrize("case", [SPLIT, *map(slow, OWN_CASES)], ids=lambda case: case.name)
def test_a_strict_interpreter_finds_nothing_wrong(case):
    assert budget_failures(case, "tpu_checked") == []


@pytest.mark.parametrize(
    "case", gate(["lists_per_head", "int8", "values_of_48"], ON_GPU), ids=lambda case: case.name
)
def test_the_gpu_kernel_is_within_the_error_budget_and_without_races(case):
    assert budget_failures(case, "gpu") == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths"), [("tpu", (9000, 700)), ("gpu", (1100, 130))])
def test_sizes_of_hardware_are_within_the_error_budget(monkeypatch, name, lengths):
    monkeypatch.undo()
    backend, interpret = {"tpu": (mosaic_tpu, True), "gpu": (mosaic_gpu, GPU_CHECKED)}[name]
    platform = {"tpu": "tpu", "gpu": "sm_90"}[name]
    register(monkeypatch, OP, **{name: Interpreted(backend, interpret, platform)})
    case = Case("hardware", lengths, q_heads=4, head_dim=64, value_dim=64, dtype="bfloat16")
    assert budget_failures(case, name) == []


@pytest.mark.parametrize(("name", "reason"), DECLINED.items())
def test_what_is_declined_is_declined_with_its_reason(name, reason):
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(UnsupportedError, match=reason):
        run(case.arguments(), "tpu")


WAVY = FromFunction(lambda q, kv: jnp.sin(q * kv) > 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
        ({"head_dim": 512}, "at most 256 features of bfloat16 pages"),
        ({"head_dim": 192, "is_int8": True}, "at most 128 features of int8 pages"),
        ({"page": 12}, "64 tokens is not made of whole pages of 12"),
        ({"page": 128}, "64 tokens is not made of whole pages of 128"),
        ({"page": 8}, "whole KiB .* not 8 tokens of 64 bytes"),
        ({"head_dim": 40}, "rows of whole 32 bytes, not 16 tokens of 80"),
        ({"is_int8": True}, "not 16 tokens of 32 bytes"),
        ({"mask": WAVY}, "computes with float32"),
    ],
)
def test_what_gpus_decline_is_declined_with_its_reason(changes, reason):
    sizes = {"head_dim": 32, "value_dim": 32, "dtype": "bfloat16"}
    with pytest.raises(UnsupportedError, match=reason):
        run(Case("declined", (33,), **sizes | changes).arguments(), "gpu")


@pytest.mark.parametrize(
    ("platform", "reason"),
    [("cuda", "no GPU was found"), ("sm_75", "older than 8.0"), ("sm_80", None), ("sm_120a", None)],
)
def test_the_capability_is_checked_before_anything_is_lowered(platform, reason):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    q, k, integers = shape(1, 1, 6, 64), shape(9, 2, 16, 64), jnp.zeros((1, 2, 9), int)
    inputs = PagedInputs(q, k, k, integers, integers, integers > 0, integers[0], integers[0, 0])
    found = mosaic_gpu.unsupported_reason(inputs, PagedConfig(0.1, None, Causal()), platform)
    assert found is None if reason is None else reason in found


def test_pages_and_masks_that_do_not_fit_are_declined():
    given = Case("fits", (33,)).arguments()
    with pytest.raises(UnsupportedError, match="computes with float32"):
        run(given, "tpu", mask=WAVY)
    large = Case("large", (9,), page=8192, head_dim=128, value_dim=128).arguments()
    with pytest.raises(UnsupportedError, match="MiB of vector memory"):
        run(large, "tpu")
    with pytest.raises(UnsupportedError, match="runs on tpu only"):
        run(given, "mosaic_tpu")


@pytest.mark.parametrize(("name", "dtype"), [("tpu", "float32"), ("gpu", "bfloat16")])
def test_values_that_are_not_finite_reach_only_queries_that_see_them(name, dtype):
    sizes = {"head_dim": 32, "value_dim": 32, "dtype": dtype}
    check_nonfinite_values(Case("bad", (40, 40), mask=Causal() & Window(10, 0), **sizes), name)


@pytest.mark.parametrize(("name", "dtype"), [("tpu", "float32"), ("gpu", "bfloat16")])
def test_factors_that_are_not_finite_reach_only_queries_that_see_them(name, dtype):
    case = Case(
        "bad_factors", (40, 64), is_int8=True, page=32, mask=Causal() & Window(5, 0), head_dim=32,
        value_dim=32, dtype=dtype,
    )  # fmt: skip
    given = case.arguments()
    clean = run(given, name)
    for scale in ("k_scale", "v_scale"):
        bad = given[scale].copy()
        bad[given["page_table"][0, 0], 0] = np.nan  # all its keys are hidden
        for x, y in zip(run(given, name, **{scale: bad}), clean, strict=True):
            np.testing.assert_array_equal(x, y)
        bad[given["page_table"][1, 1], 1] = np.nan
        o, lse = run(given, name, **{scale: bad})
        np.testing.assert_array_equal(o[1, :, :3], clean[0][1, :, :3])
        assert np.isnan(o[1, :, 3:]).all() and np.isnan(lse[1, :, 3:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("tpu", "float32"), ("gpu", "bfloat16")])
def test_vmap_runs_one_call_after_the_other(name, dtype):
    given = Case("mapped", (33, 20), head_dim=32, value_dim=32, dtype=dtype).arguments()
    call = lambda **arrays: paged_attention(**given | arrays, implementation=name)
    arrays = {name: jnp.asarray(given[name])[:, None] for name in ("q", "page_table", "lengths")}
    found = jax.vmap(lambda arrays: call(**arrays))(arrays)
    np.testing.assert_allclose(found[:, 0], call(), atol=1e-6)


def test_a_program_for_a_tpu_has_one_kernel():
    given = Case("lowered", (33, 20)).arguments()
    mask = given.pop("mask")
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    attend = jax.jit(lambda arrays: paged_attention(**arrays, mask=mask))
    lowered = attend.trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("tpu_custom_call") == 1


def equal_weights(right, lse):
    """`splits._split_weights` of splits that weigh the same."""
    return jnp.ones_like(lse), right(lse)[1]


def every_copy(right, *arguments, **named):
    """`make_async_copy` whose waits return at once."""
    copy = right(*arguments, **named)
    return dataclasses.make_dataclass("Copy", ["start", "wait"])(copy.start, lambda: None)


def without_waits(right, self, barriers, slot=0):
    """`GpuOps.wait` that returns at once, but for the queries."""
    return None if barriers[0].shape[0] > 1 else right(self, barriers, slot)


# fmt: off
BUGS = [
    Bug("splits_weigh_the_same", splits, "_split_weights", equal_weights, "lists_per_head"),
    Bug("a_page_that_is_not_listed_is_read", splits, "_key_positions",
        lambda right, inputs, page, number: right(inputs, 0 * page, number), "lists_per_head"),
    Bug("keys_after_the_end_are_seen", splits, "_key_positions",
        lambda right, inputs, *at: right(inputs._replace(lengths=inputs.lengths + 99), *at),
        "softcap"),
    Bug("steps_before_a_new_maximum_are_not_rescaled", online_softmax, "rescale", not_rescaled,
        "lists_per_head"),
    Bug("queries_take_the_rule_of_the_first_head", splits, "visible_pairs",
        lambda right, program, rows, kv_pos: right(program, [rows[0], 9 + 0 * rows[1]], kv_pos),
        "rules_of_bfloat16"),
    Bug("a_step_is_used_before_it_has_arrived", mosaic_tpu.pltpu, "make_async_copy", every_copy,
        "lists_per_head", "tpu_checked"),
    Bug("gpu_splits_weigh_the_same", splits, "_split_weights", equal_weights, "lists_per_head",
        "gpu"),
    Bug("gpu_keys_without_a_page_are_seen", splits, "_key_positions",
        lambda right, inputs, page, number: right(inputs, 0 * page, number), "lists_per_head",
        "gpu"),
    Bug("gpu_queries_take_the_rule_of_the_first_head", splits, "visible_pairs",
        lambda right, program, rows, kv_pos: right(program, [rows[0], 9 + 0 * rows[1]], kv_pos),
        "rules_of_bfloat16", "gpu"),
    Bug("gpu_factors_of_the_first_step", mosaic_gpu._Split, "_scores",
        lambda right, self, k, v, at: right(self, k, v, (*at[:2], 0)), "int8", "gpu"),
    Bug("a_step_is_used_before_it_was_copied", ops.GpuOps, "wait", without_waits,
        "lists_per_head", "gpu"),
]
# fmt: on
OFTEN_PLANTED = [
    "splits_weigh_the_same",
    "a_page_that_is_not_listed_is_read",
    "gpu_factors_of_the_first_step",
]  # fmt: skip


@pytest.mark.parametrize(
    "bug", gate(OFTEN_PLANTED, BUGS),
    ids=lambda bug: bug.name,
)  # fmt: skip
def test_planted_bug_is_noticed(bug, monkeypatch):
    plant(monkeypatch, bug)
    name = "tpu" if bug.interpreter == "plain" else bug.interpreter
    case = next(x for x in (ON_GPU if name == "gpu" else SERVED) if x.name == bug.case)
    # An interpreter may stop.
    with contextlib.suppress(jax.errors.JaxRuntimeError, IndexError, ValueError, RuntimeError):
        assert budget_failures(case, name), "the bug went unnoticed"
