"""Deliberate bugs in the TPU kernels; an interpreter on a CPU must notice every one of them."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import xsake
from tests.kernels.interpreted import CHECKED, on_tpu, register
from tests.kernels.planted import (
    Bug,
    first_head_only,
    not_rescaled,
    plant,
    without_delta,
    without_segments,
)
from tests.lanes import gate
from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.mosaic_tpu import kernels as mosaic_tpu
from xsake.kernels.block_sparse.mosaic_tpu import launch, masking, schedule
from xsake.kernels.mask_program import MaskProgram
from xsake.layout import BlockLayout
from xsake.layout.numbering import RaggedGrid
from xsake.masks import Causal, Explicit, PerHead, Window
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

SIZES = dict.fromkeys(("q_tokens", "kv_tokens"), 45) | dict.fromkeys(("head_dim", "value_dim"), 16)
SIZES = SIZES | {"q_heads": 4, "kv_heads": 2}
WINDOWS = PerHead([Causal() & Window(left=left, right=0) for left in (2, 11, 24, 40)])
SOME_PAIRS = np.random.default_rng(0).random((45, 45)) < 0.3
SEGMENTS = (((20, 18), (20, 18)), ((45,), (45,)))


def _holes(case: ConformanceCase) -> BlockLayout:
    """Rows of every length, none included: the last row of each head has no block."""
    grid = np.random.default_rng(2).random((case.q_heads, 6, 6)) < 0.6
    grid[:, -1] = False
    return BlockLayout.from_block_mask(
        grid, q_tokens=45, kv_tokens=45, block_q=8, block_kv=8, mask=Causal()
    )


CASES = {
    "windows": ConformanceCase("windows", WINDOWS, block=(8, 8), **SIZES),
    "rounded": ConformanceCase("rounded", WINDOWS, block=(8, 8), dtype="bfloat16", **SIZES),
    "holes": ConformanceCase("holes", Causal(), layout=_holes, **SIZES),
    "table": ConformanceCase("table", Explicit(SOME_PAIRS), block=(8, 8), **SIZES),
    "shared": ConformanceCase("shared", Causal(), block=(8, 8), batch=2, **SIZES),
    "packed": ConformanceCase(
        "packed", Causal(), block=(8, 8), batch=2, segments=SEGMENTS, **SIZES
    ),
}


def noticed(case: str, interpreter: str) -> list[str]:
    """Failures that an interpreter reports: exceeded budgets, or the error it stopped with."""
    try:
        return failures(check_case(xsake.attention, CASES[case], interpreter))
    except (jax.errors.JaxRuntimeError, IndexError, ValueError) as error:
        return [str(error)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Both interpreters, and no trace or schedule of an earlier kernel."""
    register(monkeypatch, OP, plain=on_tpu(), strict=on_tpu(CHECKED))
    monkeypatch.setattr(schedule, "MAX_SLOTS", 2)

    def forget():
        jax.clear_caches()
        schedule._pack_static.cache_clear()
        schedule._static_mask_blocks.cache_clear()
        pltpu.reset_tpu_interpret_mode_state()

    forget()
    yield
    forget()


def last_row_inactive(right):
    def broken(lists, core, step):
        row, is_active = right(lists, core, step)
        return row, is_active & (row != lists.bounds[core + 1] - 1)

    return broken


def block_of_core_before(right):
    def broken(self, core, *rest):
        block, *others = right(self, core, *rest)
        return block - core, *others

    return broken


def first_row_lost(right):
    def broken(xp, starts, sizes):
        bounds = right(xp, starts, sizes)
        bounds[:, 0] += 1
        return bounds

    return broken


# fmt: off
BUGS = [
    Bug("earlier_sums_are_not_rescaled", online_softmax, "rescale", not_rescaled, "windows"),
    Bug("the_row_term_of_dk_is_dropped", online_softmax, "score_grad", without_delta, "windows"),
    Bug("queries_are_not_scaled", mosaic_tpu, "_scale",
        lambda right: lambda q, config: q, "windows"),
    Bug("products_of_bfloat16_are_not_scaled", mosaic_tpu, "_late_scale",
        lambda right: lambda dtype, config: 1.0, "rounded"),
    Bug("a_group_is_used_before_it_has_arrived", launch.Prefetch, "wait",
        lambda right: lambda self, group: None, "windows", "strict"),
    Bug("both_groups_share_one_buffer", launch.Prefetch, "_copy",
        lambda right: lambda self, group, *at: right(self, 0 * group, *at), "windows", "strict"),
    Bug("the_other_half_of_the_buffer_is_read", launch.Prefetch, "blocks",
        lambda right: lambda self, group: right(self, group + 1), "windows", "strict"),
    Bug("a_block_after_the_last_one_is_fetched", launch.Prefetch, "numbers",
        lambda right: lambda self, at: [x + 99 for x in right(self, at)], "windows", "strict"),
    Bug("replicas_of_a_list_read_the_first_head", RaggedGrid, "inner_offset",
        lambda right: lambda self, replica: 0 * replica, "shared"),
    Bug("replicas_of_a_list_write_the_first_head", RaggedGrid, "outer_number",
        lambda right: lambda self, row, replica: right(self, row, 0 * replica), "shared", "strict"),
    Bug("the_last_row_of_a_core_is_not_written", launch, "_row_of",
        last_row_inactive, "holes", "strict"),
    Bug("a_core_that_is_done_continues", launch, "_row_of",
        lambda right: lambda lists, core, step: (lists.bounds[core] + step, step >= 0),
        "windows", "strict"),
    Bug("a_launch_drops_the_rows_of_the_one_before", launch, "_aliases",
        lambda right: lambda lists, operands: {}, "windows", "strict", launches=2),
    Bug("two_cores_write_one_row", launch.TpuLaunch, "_outer_block",
        block_of_core_before, "windows", "strict"),
    Bug("dead_slots_count", masking, "LIVE", lambda right: 0xFFFFFF, "holes"),
    Bug("element_masks_are_never_applied", masking, "PARTIAL", lambda right: 0, "windows"),
    Bug("every_head_has_the_mask_of_the_first", MaskProgram, "scalars", first_head_only, "windows"),
    Bug("positions_restart_in_every_block", masking.TpuTileSide, "token_index",
        lambda right: lambda self: right(dataclasses.replace(self, first=0)), "windows"),
    Bug("segments_do_not_separate_keys", masking, "element_mask", without_segments, "packed"),
    Bug("segments_are_those_of_the_first_batch_element", launch, "_index_by_batch",
        lambda right: lambda grid, *rest: right(grid, *rest) % grid.q_blocks, "packed"),
    Bug("every_partial_block_has_the_first_mask", schedule.TpuSchedule, "mask_blocks",
        lambda right: lambda self, keys_first: (right(self, keys_first)[0],
                                                0 * right(self, keys_first)[1]), "table"),
    Bug("a_row_between_two_cores_is_lost", schedule, "_bounds",
        first_row_lost, "windows", "strict", launches=2),
]
# fmt: on
EVERY_TIME = ["a_group_is_used_before_it_has_arrived", "element_masks_are_never_applied"]


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", ["strict", "plain"])
@pytest.mark.parametrize("launches", [1, 2])
def test_the_right_kernels_are_not_accused(interpreter, launches, monkeypatch):
    if launches == 2:
        monkeypatch.setattr(schedule, "MAX_ENTRIES", 100)
    for case in CASES if interpreter == "plain" and launches == 1 else ("windows", "holes"):
        assert noticed(case, interpreter) == []


@pytest.mark.parametrize("bug", gate(EVERY_TIME, BUGS), ids=lambda bug: bug.name)
def test_planted_bug_is_noticed(bug, monkeypatch):
    if bug.launches == 2:
        monkeypatch.setattr(schedule, "MAX_ENTRIES", 100)
    plant(monkeypatch, bug)
    assert noticed(bug.case, bug.interpreter) != [], "the bug went unnoticed"
