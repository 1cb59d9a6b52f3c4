"""TPU kernel of attention over pages, by interpreters: the budget, races, splits, planted bugs."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.interpreted import CHECKED, Interpreted, register
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
from xsake.kernels.paged_decode import OP, api, mosaic_tpu, paged_attention, splits
from xsake.masks import Causal, FromFunction, PerHead, Window

# What the kernel declines, and which words say so.
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
SPLIT = next(case for case in CASES if case.name == "lists_per_head")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interpreters as backends; small steps, splits and tiles, so that calls have several."""
    backends = {
        "tpu": Interpreted(mosaic_tpu, True, "tpu"),
        "tpu_checked": Interpreted(mosaic_tpu, CHECKED, "tpu"),
    }
    register(monkeypatch, OP, **backends)
    for name, value in (("STEP_KEYS", 32), ("SPLIT_KEYS", 96), ("MAX_TILE", 16)):
        monkeypatch.setattr(mosaic_tpu, name, value)
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


@pytest.mark.slow
def test_sizes_of_hardware_are_within_the_error_budget(monkeypatch):
    monkeypatch.undo()
    register(monkeypatch, OP, tpu=Interpreted(mosaic_tpu, True, "tpu"))
    case = Case("hardware", (9000, 700), q_heads=4, head_dim=64, value_dim=64, dtype="bfloat16")
    assert budget_failures(case, "tpu") == []


@pytest.mark.parametrize(("name", "reason"), DECLINED.items())
def test_what_is_declined_is_declined_with_its_reason(name, reason):
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(UnsupportedError, match=reason):
        run(case.arguments(), "tpu")


def test_pages_and_masks_that_do_not_fit_are_declined():
    given = Case("fits", (33,)).arguments()
    wavy = FromFunction(lambda q, kv: jnp.sin(q * kv) > 0)
    with pytest.raises(UnsupportedError, match="computes with float32"):
        run(given, "tpu", mask=wavy)
    large = Case("large", (9,), page=8192, head_dim=128, value_dim=128).arguments()
    with pytest.raises(UnsupportedError, match="MiB of vector memory"):
        run(large, "tpu")
    with pytest.raises(UnsupportedError, match="runs on tpu only"):
        run(given, "mosaic_tpu")


def test_values_that_are_not_finite_reach_only_queries_that_see_them():
    check_nonfinite_values(Case("bad", (40, 40), mask=Causal() & Window(10, 0)), "tpu")


def test_factors_that_are_not_finite_reach_only_queries_that_see_them():
    case = Case("bad_factors", (40, 64), is_int8=True, page=32, mask=Causal() & Window(5, 0))
    given = case.arguments()
    clean = run(given, "tpu")
    for name in ("k_scale", "v_scale"):
        bad = given[name].copy()
        bad[given["page_table"][0, 0], 0] = np.nan  # all its keys are hidden
        for x, y in zip(run(given, "tpu", **{name: bad}), clean, strict=True):
            np.testing.assert_array_equal(x, y)
        bad[given["page_table"][1, 1], 1] = np.nan
        o, lse = run(given, "tpu", **{name: bad})
        np.testing.assert_array_equal(o[1, :, :3], clean[0][1, :, :3])
        assert np.isnan(o[1, :, 3:]).all() and np.isnan(lse[1, :, 3:]).all()


@pytest.mark.slow
def test_vmap_runs_one_call_after_the_other():
    given = Case("mapped", (33, 20)).arguments()
    call = lambda **arrays: paged_attention(**given | arrays, implementation="tpu")
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
]
# fmt: on


@pytest.mark.parametrize(
    "bug", gate(["splits_weigh_the_same", "a_page_that_is_not_listed_is_read"], BUGS),
    ids=lambda bug: bug.name,
)  # fmt: skip
def test_planted_bug_is_noticed(bug, monkeypatch):
    plant(monkeypatch, bug)
    case = next(case for case in SERVED if case.name == bug.case)
    name = "tpu" if bug.interpreter == "plain" else bug.interpreter
    # An interpreter may stop.
    with contextlib.suppress(jax.errors.JaxRuntimeError, IndexError, ValueError, RuntimeError):
        assert budget_failures(case, name), "the bug went unnoticed"
