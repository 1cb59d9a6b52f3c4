"""Deliberate bugs in the GPU kernels; their interpreter on a CPU must notice every one of them."""

import jax
import numpy as np
import pytest

import xsake
from tests.kernels.interpreted import on_gpu, register
from tests.kernels.planted import (
    Bug,
    first_head_only,
    not_rescaled,
    plant,
    without_delta,
    without_segments,
)
from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.mosaic_gpu import ampere, hopper, kernels, launch, masking, schedule
from xsake.kernels.block_sparse.mosaic_gpu.ops import GpuOps
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import RaggedGrid
from xsake.masks import Causal, Explicit, PerHead, Window
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

SIZES = dict.fromkeys(("q_tokens", "kv_tokens"), 75) | dict.fromkeys(("head_dim", "value_dim"), 16)
SIZES = SIZES | {"q_heads": 2, "kv_heads": 1, "dtype": "bfloat16"}
WINDOWS = PerHead([Causal() & Window(left=left, right=0) for left in (5, 50)])
SOME_PAIRS = np.random.default_rng(0).random((75, 75)) < 0.3
CASES = {
    "windows": ConformanceCase("windows", WINDOWS, block=(32, 32), **SIZES),
    "padded": ConformanceCase("padded", Causal(), block=(40, 24), **SIZES),
    "table": ConformanceCase("table", Explicit(SOME_PAIRS), block=(32, 32), **SIZES),
    "shared": ConformanceCase("shared", Causal(), block=(64, 32), batch=2, **SIZES),
    "packed": ConformanceCase(
        "packed", Causal(), block=(32, 32), batch=2, segments=(((30, 35),) * 2, ((75,),) * 2),
        **SIZES,
    ),
    "capped": ConformanceCase("capped", Causal(), block=(64, 64), softcap=2.0, **SIZES),
}  # fmt: skip


def noticed(case: str) -> list[str]:
    """Failures that the interpreter reports: exceeded budgets, or the error it stopped with."""
    try:
        return failures(check_case(xsake.attention, CASES[case], "gpu_checked"))
    except (jax.errors.JaxRuntimeError, IndexError, ValueError, RuntimeError) as error:
        return [str(error)]


@pytest.fixture(autouse=True)
def fresh():
    """No trace or schedule of an earlier kernel."""

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


def one_partial_less(right):
    def broken(row_starts, is_partial):
        order, partial = right(row_starts, is_partial)
        return order, np.maximum(partial - 1, 0)

    return broken


def masks_of_neighbours(right):
    def broken(*given, **named):
        mask_blocks, mask_ids = right(*given, **named)
        return mask_blocks, np.roll(mask_ids, 1)

    return broken


# fmt: off
BUGS = [
    Bug("a_tile_is_used_before_it_has_arrived", GpuOps, "wait",
        lambda right: lambda self, barriers, slot=0: None, "windows"),
    Bug("the_tile_that_is_read_is_overwritten", launch, "STAGES", lambda right: 1, "windows"),
    Bug("a_slot_is_released_without_a_commit", GpuOps, "release",
        lambda right: lambda self: None, "windows"),
    Bug("every_step_takes_the_first_item", launch.RowProgram, "_inner_coords",
        lambda right: lambda self, step: right(self, 0 * step), "windows"),
    Bug("the_next_tile_of_a_block_is_taken", masking, "locate_tile",
        lambda right: lambda number, part, *rest: right(number, part + 1, *rest), "shared"),
    Bug("replicas_of_a_list_read_the_first_batch_element", RaggedGrid, "inner_offset",
        lambda right: lambda self, replica: 0 * replica, "shared"),
    Bug("replicas_of_a_list_write_the_first_batch_element", RaggedGrid, "outer_number",
        lambda right: lambda self, row, replica: right(self, row, 0 * replica), "shared"),
    Bug("the_last_partial_item_of_a_row_counts_as_full", schedule, "partial_first",
        one_partial_less, "windows"),
    Bug("tokens_are_counted_from_one", masking.GpuTileSide, "token_index",
        lambda right: lambda self: right(self) + (1 if self.axis else 0), "windows"),
    Bug("keys_that_pad_a_tile_are_visible", masking.GpuTileSide, "block_index",
        lambda right: lambda self: 0 * right(self), "padded"),
    Bug("every_head_has_the_window_of_the_first", MaskProgram, "scalars",
        first_head_only, "windows"),
    Bug("items_have_the_element_mask_of_their_neighbour", schedule, "build_mask_blocks",
        masks_of_neighbours, "table"),
    Bug("segments_do_not_separate_keys", masking, "element_mask", without_segments, "packed"),
    Bug("earlier_sums_are_not_rescaled", online_softmax, "rescale", not_rescaled, "windows"),
    Bug("the_row_term_of_the_gradient_is_dropped", online_softmax, "score_grad",
        without_delta, "windows"),
    Bug("the_softcap_has_no_slope", online_softmax, "softcap_grad",
        lambda right: lambda *given, **named: None, "capped"),
    Bug("scores_are_scaled_by_the_square_of_the_scale", kernels, "_scores",
        lambda right: lambda *given: right(*given) * given[-1].scale, "windows"),
]
# fmt: on
# These stand for their kind every time; the others are for the nightly lane.
EVERY_TIME = ("a_tile_is_used_before_it_has_arrived", "the_tile_that_is_read_is_overwritten")
# Hopper's warp groups release slots by barriers, so that one slot is correct there, only slow.
NO_BUG_ON_HOPPER = ("the_tile_that_is_read_is_overwritten",)


def _marked(found: Bug, backend):
    is_quick = backend is ampere and found.name in EVERY_TIME
    name = backend.__name__.rpartition(".")[2]
    marks = () if is_quick else (pytest.mark.slow,)
    return pytest.param(found, backend, id=f"{name}-{found.name}", marks=marks)


@pytest.mark.parametrize(
    ("found", "backend"),
    [_marked(each, ampere) for each in BUGS]
    + [_marked(each, hopper) for each in BUGS if each.name not in NO_BUG_ON_HOPPER],
)
def test_a_planted_bug_is_noticed(found, backend, monkeypatch):
    register(monkeypatch, OP, gpu_checked=on_gpu(backend))
    plant(monkeypatch, found)
    assert noticed(found.case) != []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_noticed_without_a_bug(case, monkeypatch):
    register(monkeypatch, OP, gpu_checked=on_gpu())
    assert noticed(case) == []
