"""Deliberate bugs in the GPU kernels; their interpreter on a CPU must notice every one of them."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

import xsake
from tests.kernels.interpreted import InterpretedGpu
from xsake.kernels.block_sparse import (
    gpu_call,
    gpu_lists,
    gpu_passes,
    gpu_step,
    mosaic_gpu,
    mosaic_gpu_hopper,
    op,
    tiles,
)
from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.kernels.mosaic_gpu_compat import Machine
from xsake.masks import Causal, Explicit, PerHead, Window
from xsake.testing.cases import Case
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
    "windows": Case("windows", WINDOWS, block=(32, 32), **SIZES),
    "padded": Case("padded", Causal(), block=(40, 24), **SIZES),
    "table": Case("table", Explicit(SOME_PAIRS), block=(32, 32), **SIZES),
    "shared": Case("shared", Causal(), block=(64, 32), batch=2, **SIZES),
    "packed": Case(
        "packed", Causal(), block=(32, 32), batch=2, segments=(((30, 35),) * 2, ((75,),) * 2),
        **SIZES,
    ),
    "capped": Case("capped", Causal(), block=(64, 64), softcap=2.0, **SIZES),
}  # fmt: skip


def noticed(case: str) -> list[str]:
    """What the interpreter has to say: broken budgets, or the error it stopped with."""
    try:
        return failures(check_case(xsake.attention, CASES[case], "gpu_checked"))
    except (jax.errors.JaxRuntimeError, IndexError, ValueError, RuntimeError) as error:
        return [str(error)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The interpreter, and no trace or list of an earlier kernel."""
    monkeypatch.setitem(op.BACKENDS, "gpu_checked", InterpretedGpu())

    def forget():
        jax.clear_caches()
        gpu_lists._static_lists.cache_clear()
        _forget_interpreted()

    forget()
    yield
    forget()


def _forget_interpreted() -> None:
    """After an error the interpreter keeps what it was doing."""
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


@bug(Machine, "wait")
def a_tile_is_used_before_it_has_arrived(right):
    return lambda self, barriers, slot=0: None


@bug(gpu_call, "STAGES")
def the_tile_that_is_read_is_overwritten(right):
    return 1


@bug(Machine, "done_reading")
def a_slot_is_given_back_without_saying_so(right):
    return lambda self: None


@bug(gpu_call.Row, "_met")
def every_step_takes_the_first_item(right):
    return lambda self, step: right(self, 0 * step)


@bug(gpu_step, "place_of", case="shared")
def the_next_part_of_a_block_is_taken(right):
    return lambda number, part, *rest: right(number, part + 1, *rest)


@bug(RaggedGrid, "met_shift", case="shared")
def copies_of_a_list_read_the_first_batch_element(right):
    return lambda self, copy: 0 * copy


@bug(RaggedGrid, "own_number", case="shared")
def copies_of_a_list_write_the_first_batch_element(right):
    return lambda self, row, copy: right(self, row, 0 * copy)


@bug(gpu_lists, "partial_first")
def the_last_partial_item_of_a_row_counts_as_full(right):
    def broken(row_starts, is_partial):
        order, partial = right(row_starts, is_partial)
        return order, np.maximum(partial - 1, 0)

    return broken


@bug(gpu_step.Pairs, "_token")
def tokens_are_counted_from_one(right):
    return lambda self, axis: right(self, axis) + (1 if axis else 0)


@bug(gpu_step.Pairs, "_padded", case="padded")
def keys_that_fill_a_tile_are_seen(right):
    return lambda self: []


@bug(gpu_step.Pairs, "_scalars")
def every_head_has_the_window_of_the_first(right):
    return lambda self, rule: [self.lists.tables[row * rule.heads] for row in range(len(rule.rows))]


@bug(gpu_lists, "mask_tiles", case="table")
def items_have_the_element_mask_of_their_neighbour(right):
    def broken(*given, **named):
        shown, numbers = right(*given, **named)
        return shown, np.roll(numbers, 1)

    return broken


@bug(gpu_step.Pairs, "_ids", case="packed")
def segments_do_not_keep_keys_apart(right):
    return lambda self, axis: 0 * right(self, axis)


@bug(tiles, "raised")
def earlier_sums_are_not_rescaled(right):
    def broken(peak, highest, unit):
        new, origin, decay = right(peak, highest, unit)
        return new, origin, 0 * decay + 1

    return broken


@bug(tiles, "logit_gradient")
def the_row_term_of_the_gradient_is_dropped(right):
    return lambda weight, d_weight, delta, slope: right(weight, d_weight, 0 * delta, slope)


@bug(tiles, "softcap_slope", case="capped")
def the_softcap_has_no_slope(right):
    return lambda *given, **named: None


@bug(gpu_passes, "_logits")
def logits_are_scaled_by_the_square_of_the_scale(right):
    return lambda *given: right(*given) * given[-1].scale


# Hopper's warp groups hand slots back by barriers, so that one slot is right there, only slow.
NO_BUG_ON_HOPPER = ("the_tile_that_is_read_is_overwritten",)


def _marked(found: Bug, backend):
    is_quick = backend is mosaic_gpu and found.name in EVERY_TIME
    name = backend.__name__.rpartition(".")[2]
    marks = () if is_quick else (pytest.mark.slow,)
    return pytest.param(found, backend, id=f"{name}-{found.name}", marks=marks)


@pytest.mark.parametrize(
    ("found", "backend"),
    [_marked(each, mosaic_gpu) for each in BUGS]
    + [_marked(each, mosaic_gpu_hopper) for each in BUGS if each.name not in NO_BUG_ON_HOPPER],
)
def test_a_planted_bug_is_noticed(found, backend, monkeypatch):
    monkeypatch.setitem(op.BACKENDS, "gpu_checked", InterpretedGpu(backend))
    right = getattr(found.owner, found.attribute)
    monkeypatch.setattr(found.owner, found.attribute, found.broken(right))
    if found.owner is gpu_step and found.attribute == "place_of":
        monkeypatch.setattr(gpu_call, "place_of", found.broken(right))
    assert noticed(found.case) != []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_noticed_without_a_bug(case):
    assert noticed(case) == []
