"""Deliberate bugs in the GPU kernels; their interpreter on a CPU must notice every one of them."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

import xsake
from tests.kernels.interpreted import InterpretedGpu, register
from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.mosaic_gpu import (
    ampere,
    hopper,
    kernels,
    launch,
    masking,
    schedule,
)
from xsake.kernels.block_sparse.mosaic_gpu.ops import GpuOps
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import RaggedGrid
from xsake.masks import Causal, Explicit, PerHead, Window
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

SIZES = {
    "q_tokens": 75,
    "kv_tokens": 75,
    "q_heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "value_dim": 16,
    "dtype": "bfloat16",
}
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


@dataclasses.dataclass(frozen=True)
class Bug:
    """One mistake: what it replaces, by what, and where it must show."""

    name: str
    owner: object
    attribute: str
    broken: Callable
    case: str


BUGS: list[Bug] = []
# These stand for their kind every time; the others are for the nightly lane.
EVERY_TIME = ("a_tile_is_used_before_it_has_arrived", "the_tile_that_is_read_is_overwritten")


def bug(owner, attribute, case="windows"):
    """Enter the decorated function, which turns right into wrong, under its own name."""

    def enter(broken):
        BUGS.append(Bug(broken.__name__, owner, attribute, broken, case))
        return broken

    return enter


@bug(GpuOps, "wait")
def a_tile_is_used_before_it_has_arrived(right):
    return lambda self, barriers, slot=0: None


@bug(launch, "STAGES")
def the_tile_that_is_read_is_overwritten(right):
    return 1


@bug(GpuOps, "release")
def a_slot_is_released_without_a_commit(right):
    return lambda self: None


@bug(launch.RowProgram, "_inner_coords")
def every_step_takes_the_first_item(right):
    return lambda self, step: right(self, 0 * step)


@bug(masking, "locate_tile", case="shared")
def the_next_tile_of_a_block_is_taken(right):
    return lambda number, part, *rest: right(number, part + 1, *rest)


@bug(RaggedGrid, "inner_offset", case="shared")
def replicas_of_a_list_read_the_first_batch_element(right):
    return lambda self, replica: 0 * replica


@bug(RaggedGrid, "outer_number", case="shared")
def replicas_of_a_list_write_the_first_batch_element(right):
    return lambda self, row, replica: right(self, row, 0 * replica)


@bug(schedule, "partial_first")
def the_last_partial_item_of_a_row_counts_as_full(right):
    def broken(row_starts, is_partial):
        order, partial = right(row_starts, is_partial)
        return order, np.maximum(partial - 1, 0)

    return broken


@bug(masking.GpuTileSide, "token_index")
def tokens_are_counted_from_one(right):
    return lambda self: right(self) + (1 if self.axis else 0)


@bug(masking.GpuTileSide, "block_index", case="padded")
def keys_that_pad_a_tile_are_visible(right):
    return lambda self: 0 * right(self)


@bug(MaskProgram, "scalars")
def every_head_has_the_window_of_the_first(right):
    return lambda self, tables, grid, q_number: right(self, tables, grid, 0 * q_number)


@bug(schedule, "build_mask_blocks", case="table")
def items_have_the_element_mask_of_their_neighbour(right):
    def broken(*given, **named):
        mask_blocks, mask_ids = right(*given, **named)
        return mask_blocks, np.roll(mask_ids, 1)

    return broken


@bug(masking, "element_mask", case="packed")
def segments_do_not_separate_keys(right):
    without = lambda side: dataclasses.replace(side, integers=side.integers._replace(segments=None))
    return lambda q, kv, *rest: right(without(q), without(kv), *rest)


@bug(online_softmax, "rescale")
def earlier_sums_are_not_rescaled(right):
    def broken(m, m_tile, base):
        m_new, m_safe, alpha = right(m, m_tile, base)
        return m_new, m_safe, 0 * alpha + 1

    return broken


@bug(online_softmax, "score_grad")
def the_row_term_of_the_gradient_is_dropped(right):
    return lambda p, dp, delta, slope: right(p, dp, 0 * delta, slope)


@bug(online_softmax, "softcap_grad", case="capped")
def the_softcap_has_no_slope(right):
    return lambda *given, **named: None


@bug(kernels, "_scores")
def scores_are_scaled_by_the_square_of_the_scale(right):
    return lambda *given: right(*given) * given[-1].scale


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
    register(monkeypatch, OP, gpu_checked=InterpretedGpu(backend))
    right = getattr(found.owner, found.attribute)
    monkeypatch.setattr(found.owner, found.attribute, found.broken(right))
    if found.attribute == "locate_tile":
        monkeypatch.setattr(launch, "locate_tile", found.broken(right))
    assert noticed(found.case) != []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_noticed_without_a_bug(case, monkeypatch):
    register(monkeypatch, OP, gpu_checked=InterpretedGpu())
    assert noticed(case) == []
