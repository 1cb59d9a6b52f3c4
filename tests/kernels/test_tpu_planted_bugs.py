"""Deliberate bugs in the TPU kernels; an interpreter on a CPU must notice every one of them."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.interpreted import CHECKED, on_tpu, register
from tests.kernels.planted import (
    Bug,
    first_head_only,
    not_rescaled,
    noticed,
    plant,
    sizes,
    some_pairs,
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
from xsake.masks import Causal, PerHead, Window
from xsake.testing.cases import ConformanceCase

SIZES = sizes(45)
WINDOWS = PerHead([Causal() & Window(left=left, right=0) for left in (2, 11, 24, 40)])
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
    "table": ConformanceCase("table", some_pairs(45), block=(8, 8), **SIZES),
    "shared": ConformanceCase("shared", Causal(), block=(8, 8), batch=2, **SIZES),
    "packed": ConformanceCase(
        "packed", Causal(), block=(8, 8), batch=2, segments=SEGMENTS, **SIZES
    ),
}


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


def last_row_inactive(right, lists, core, step):
    row, is_active = right(lists, core, step)
    return row, is_active & (row != lists.bounds[core + 1] - 1)


def block_of_core_before(right, self, core, *rest):
    block, *others = right(self, core, *rest)
    return block - core, *others


def first_row_lost(right, xp, starts, sizes):
    bounds = right(xp, starts, sizes)
    bounds[:, 0] += 1
    return bounds


def first_mask(right, self, keys_first):
    mask_blocks, mask_ids = right(self, keys_first)
    return mask_blocks, 0 * mask_ids


# fmt: off
BUGS = [
    Bug("earlier_sums_are_not_rescaled", online_softmax, "rescale", not_rescaled, "windows"),
    Bug("the_row_term_of_dk_is_dropped", online_softmax, "score_grad", without_delta, "windows"),
    Bug("queries_are_not_scaled", mosaic_tpu, "_scale",
        lambda right, q, config: q, "windows"),
    Bug("products_of_bfloat16_are_not_scaled", mosaic_tpu, "_late_scale",
        lambda right, dtype, config: 1.0, "rounded"),
    Bug("a_group_is_used_before_it_has_arrived", launch.Prefetch, "wait",
        lambda right, self, group: None, "windows", "strict"),
    Bug("both_groups_share_one_buffer", launch.Prefetch, "_copy",
        lambda right, self, group, *at: right(self, 0 * group, *at), "windows", "strict"),
    Bug("the_other_half_of_the_buffer_is_read", launch.Prefetch, "blocks",
        lambda right, self, group: right(self, group + 1), "windows", "strict"),
    Bug("a_block_after_the_last_one_is_fetched", launch.Prefetch, "numbers",
        lambda right, self, at: [x + 99 for x in right(self, at)], "windows", "strict"),
    Bug("replicas_of_a_list_read_the_first_head", RaggedGrid, "inner_offset",
        lambda right, self, replica: 0 * replica, "shared"),
    Bug("replicas_of_a_list_write_the_first_head", RaggedGrid, "outer_number",
        lambda right, self, row, replica: right(self, row, 0 * replica), "shared", "strict"),
    Bug("the_last_row_of_a_core_is_not_written", launch, "_row_of",
        last_row_inactive, "holes", "strict"),
    Bug("a_core_that_is_done_continues", launch, "_row_of",
        lambda right, lists, core, step: (lists.bounds[core] + step, step >= 0),
        "windows", "strict"),
    Bug("a_launch_drops_the_rows_of_the_one_before", launch, "_aliases",
        lambda right, lists, operands: {}, "windows", "strict", launches=2),
    Bug("two_cores_write_one_row", launch.TpuLaunch, "_outer_block",
        block_of_core_before, "windows", "strict"),
    Bug("dead_slots_count", masking, "LIVE", lambda right: 0xFFFFFF, "holes"),
    Bug("element_masks_are_never_applied", masking, "PARTIAL", lambda right: 0, "windows"),
    Bug("every_head_has_the_mask_of_the_first", MaskProgram, "scalars", first_head_only, "windows"),
    Bug("positions_restart_in_every_block", masking.TpuTileSide, "token_index",
        lambda right, self: right(dataclasses.replace(self, first=0)), "windows"),
    Bug("segments_do_not_separate_keys", masking, "element_mask", without_segments, "packed"),
    Bug("segments_are_those_of_the_first_batch_element", launch, "_index_by_batch",
        lambda right, grid, *rest: right(grid, *rest) % grid.q_blocks, "packed"),
    Bug("every_partial_block_has_the_first_mask", schedule.TpuSchedule, "mask_blocks",
        first_mask, "table"),
    Bug("a_row_between_two_cores_is_lost", schedule, "_bounds",
        first_row_lost, "windows", "strict", launches=2),
]
# fmt: on


@pytest.mark.slow
@pytest.mark.parametrize(("interpreter", "launches"), [("plain", 1), ("strict", 1), ("strict", 2)])
def test_the_right_kernels_are_not_accused(interpreter, launches, monkeypatch):
    if launches == 2:
        monkeypatch.setattr(schedule, "MAX_ENTRIES", 100)
    for case in CASES if interpreter == "plain" else ("windows", "holes"):
        assert noticed(CASES[case], interpreter) == []


@pytest.mark.parametrize(
    "bug", gate(["element_masks_are_never_applied"], BUGS), ids=lambda bug: bug.name
)
def test_planted_bug_is_noticed(bug, monkeypatch):
    if bug.launches == 2:
        monkeypatch.setattr(schedule, "MAX_ENTRIES", 100)
    plant(monkeypatch, bug)
    assert noticed(CASES[bug.case], bug.interpreter), "the bug went unnoticed"
