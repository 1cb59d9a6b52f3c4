"""Deliberate bugs in the GPU kernels; their interpreter on a CPU must notice every one of them."""

import jax
import numpy as np
import pytest

from tests.kernels.interpreted import on_gpu, register
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
from xsake.kernels.block_sparse.mosaic_gpu import hopper, kernels, launch, masking, schedule
from xsake.kernels.block_sparse.mosaic_gpu.ops import GpuOps
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import RaggedGrid
from xsake.masks import Causal, PerHead, Window
from xsake.testing.cases import ConformanceCase

SIZES = sizes(75, q_heads=2, kv_heads=1, dtype="bfloat16")
WINDOWS = PerHead([Causal() & Window(left=left, right=0) for left in (5, 50)])
CASES = {
    "windows": ConformanceCase("windows", WINDOWS, block=(32, 32), **SIZES),
    "padded": ConformanceCase("padded", Causal(), block=(40, 24), **SIZES),
    "table": ConformanceCase("table", some_pairs(75), block=(32, 32), **SIZES),
    "shared": ConformanceCase("shared", Causal(), block=(64, 32), batch=2, **SIZES),
    "packed": ConformanceCase(
        "packed", Causal(), block=(32, 32), batch=2, segments=(((30, 35),) * 2, ((75,),) * 2),
        **SIZES,
    ),
    "capped": ConformanceCase("capped", Causal(), block=(64, 64), softcap=2.0, **SIZES),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Both backends, and no trace or schedule of an earlier kernel."""
    register(monkeypatch, OP, ampere=on_gpu(), hopper=on_gpu(hopper))

    def forget():
        jax.clear_caches()
        schedule._static_lists.cache_clear()
        _forget_interpreted()

    forget()
    yield
    forget()


def _forget_interpreted() -> None:
    """Reset the interpreter, which keeps its state after an error."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def one_partial_less(right, row_starts, is_partial):
    order, partial = right(row_starts, is_partial)
    return order, np.maximum(partial - 1, 0)


def masks_of_neighbours(right, *given, **named):
    mask_blocks, mask_ids = right(*given, **named)
    return mask_blocks, np.roll(mask_ids, 1)


# fmt: off
BUGS = [
    Bug("a_tile_is_used_before_it_has_arrived", GpuOps, "wait",
        lambda right, self, barriers, slot=0: None, "windows"),
    Bug("the_tile_that_is_read_is_overwritten", launch, "STAGES", lambda right: 1, "windows"),
    Bug("a_slot_is_released_without_a_commit", GpuOps, "release",
        lambda right, self: None, "windows"),
    Bug("every_step_takes_the_first_item", launch.RowProgram, "_inner_coords",
        lambda right, self, step: right(self, 0 * step), "windows"),
    Bug("the_next_tile_of_a_block_is_taken", masking, "locate_tile",
        lambda right, number, part, *rest: right(number, part + 1, *rest), "shared"),
    Bug("replicas_of_a_list_read_the_first_batch_element", RaggedGrid, "inner_offset",
        lambda right, self, replica: 0 * replica, "shared"),
    Bug("replicas_of_a_list_write_the_first_batch_element", RaggedGrid, "outer_number",
        lambda right, self, row, replica: right(self, row, 0 * replica), "shared"),
    Bug("the_last_partial_item_of_a_row_counts_as_full", schedule, "partial_first",
        one_partial_less, "windows"),
    Bug("tokens_are_counted_from_one", masking.GpuTileSide, "token_index",
        lambda right, self: right(self) + (1 if self.axis else 0), "windows"),
    Bug("keys_that_pad_a_tile_are_visible", masking.GpuTileSide, "block_index",
        lambda right, self: 0 * right(self), "padded"),
    Bug("every_head_has_the_window_of_the_first", MaskProgram, "scalars",
        first_head_only, "windows"),
    Bug("items_have_the_element_mask_of_their_neighbour", schedule, "build_mask_blocks",
        masks_of_neighbours, "table"),
    Bug("segments_do_not_separate_keys", masking, "element_mask", without_segments, "packed"),
    Bug("earlier_sums_are_not_rescaled", online_softmax, "rescale", not_rescaled, "windows"),
    Bug("the_row_term_of_the_gradient_is_dropped", online_softmax, "score_grad",
        without_delta, "windows"),
    Bug("the_softcap_has_no_slope", online_softmax, "softcap_grad",
        lambda right, *given, **named: None, "capped"),
    Bug("scores_are_scaled_by_the_square_of_the_scale", kernels, "to_scores",
        lambda right, *given: right(*given) * given[1], "windows"),
]
# fmt: on
# What Hopper does in its own way: barriers of warp groups and tiles of 64 tokens. One slot is
# correct there, only slow.
ON_HOPPER = {
    "a_tile_is_used_before_it_has_arrived",
    "a_slot_is_released_without_a_commit",
    "the_next_tile_of_a_block_is_taken",
    "keys_that_pad_a_tile_are_visible",
}


@pytest.mark.parametrize(
    "bug", gate(["the_tile_that_is_read_is_overwritten"], BUGS), ids=lambda bug: bug.name
)
def test_a_planted_bug_is_noticed(bug, monkeypatch):
    plant(monkeypatch, bug)
    assert noticed(CASES[bug.case], "ampere")


@pytest.mark.slow  # quicker: ampere
@pytest.mark.parametrize("bug", [b for b in BUGS if b.name in ON_HOPPER], ids=lambda bug: bug.name)
def test_a_planted_bug_is_noticed_on_hopper(bug, monkeypatch):
    plant(monkeypatch, bug)
    assert noticed(CASES[bug.case], "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_noticed_without_a_bug(case):
    assert noticed(CASES[case], "ampere") == []
