"""Deliberate bugs in the TPU kernels; an interpreter on a CPU must notice every one of them."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import xsake
from tests.kernels.interpreted import CHECKED, Interpreted, register
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

SIZES = {
    "q_tokens": 45,
    "kv_tokens": 45,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "value_dim": 16,
}
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
    register(monkeypatch, OP, plain=Interpreted(), strict=Interpreted(CHECKED))
    monkeypatch.setattr(schedule, "MAX_SLOTS", 2)

    def forget():
        jax.clear_caches()
        schedule._pack_static.cache_clear()
        schedule._static_mask_blocks.cache_clear()
        pltpu.reset_tpu_interpret_mode_state()

    forget()
    yield
    forget()


@dataclasses.dataclass(frozen=True)
class Bug:
    """One mistake: what it replaces, by what, and where it must show."""

    name: str
    owner: object
    attribute: str
    broken: Callable
    case: str
    interpreter: str
    launches: int  # 1, or 2 for bugs that need a schedule of two launches


BUGS: list[Bug] = []


def bug(owner, attribute, case="windows", interpreter="plain", launches=1):
    """Enter the decorated function, which turns right into wrong, under its own name."""

    def enter(broken):
        name = broken.__name__
        BUGS.append(Bug(name, owner, attribute, broken, case, interpreter, launches))
        return broken

    return enter


@bug(online_softmax, "rescale")
def earlier_sums_are_not_rescaled(right):
    def broken(m, m_tile, base):
        m_new, m_safe, alpha = right(m, m_tile, base)
        return m_new, m_safe, 0 * alpha + 1

    return broken


@bug(online_softmax, "score_grad")
def the_row_term_of_dk_is_dropped(right):
    return lambda p, dp, delta, slope: right(p, dp, 0 * delta, slope)


@bug(mosaic_tpu, "_scale")
def queries_are_not_scaled(right):
    return lambda q, config: q


@bug(mosaic_tpu, "_late_scale", case="rounded")
def products_of_bfloat16_are_not_scaled(right):
    return lambda dtype, config: 1.0


@bug(launch.Prefetch, "wait", interpreter="strict")
def a_group_is_used_before_it_has_arrived(right):
    return lambda self, group: None


@bug(launch.Prefetch, "_copy", interpreter="strict")
def both_groups_share_one_buffer(right):
    return lambda self, group, *rest: right(self, 0 * group, *rest)


@bug(launch.Prefetch, "blocks", interpreter="strict")
def the_other_half_of_the_buffer_is_read(right):
    return lambda self, group: right(self, group + 1)


@bug(launch.Prefetch, "numbers", interpreter="strict")
def a_block_after_the_last_one_is_fetched(right):
    return lambda self, group: [number + 99 for number in right(self, group)]


@bug(RaggedGrid, "inner_offset", case="shared")
def replicas_of_a_list_read_the_first_head(right):
    return lambda self, replica: 0 * replica


@bug(RaggedGrid, "outer_number", case="shared", interpreter="strict")
def replicas_of_a_list_write_the_first_head(right):
    return lambda self, row, replica: right(self, row, 0 * replica)


@bug(launch, "_row_of", interpreter="strict", case="holes")
def the_last_row_of_a_core_is_not_written(right):
    def broken(lists, core, step):
        row, is_active = right(lists, core, step)
        return row, is_active & (row != lists.bounds[core + 1] - 1)

    return broken


@bug(launch, "_row_of", interpreter="strict")
def a_core_that_is_done_continues(right):
    return lambda lists, core, step: (lists.bounds[core] + step, step >= 0)


@bug(launch, "_aliases", interpreter="strict", launches=2)
def a_launch_drops_the_rows_of_the_one_before(right):
    return lambda lists, operands: {}


@bug(launch.TpuLaunch, "_outer_block", interpreter="strict")
def two_cores_write_one_row(right):
    def broken(self, core, *rest):
        block, *others = right(self, core, *rest)
        return block - core, *others

    return broken


@bug(masking, "LIVE", case="holes")
def dead_slots_count(right):
    return 0xFFFFFF


@bug(masking, "PARTIAL")
def element_masks_are_never_applied(right):
    return 0


@bug(MaskProgram, "scalars")
def every_head_has_the_mask_of_the_first(right):
    return lambda self, tables, grid, q_number: right(self, tables, grid, 0 * q_number)


@bug(masking.TpuTileSide, "token_index")
def positions_restart_in_every_block(right):
    return lambda self: right(dataclasses.replace(self, first=0))


@bug(masking, "element_mask", case="packed")
def segments_do_not_separate_keys(right):
    without = lambda side: dataclasses.replace(side, integers=side.integers._replace(segments=None))
    return lambda q, kv, *rest: right(without(q), without(kv), *rest)


@bug(launch, "_index_by_batch", case="packed")
def segments_are_those_of_the_first_batch_element(right):
    return lambda grid, x, number, is_outer: right(grid, x, number, is_outer) % grid.q_blocks


@bug(schedule.TpuSchedule, "mask_blocks", case="table")
def every_partial_block_has_the_first_mask(right):
    return lambda self, keys_first: (right(self, keys_first)[0], 0 * right(self, keys_first)[1])


@bug(schedule, "_bounds", interpreter="strict", launches=2)
def a_row_between_two_cores_is_lost(right):
    def broken(xp, starts, sizes):
        bounds = right(xp, starts, sizes)
        bounds[:, 0] += 1
        return bounds

    return broken


EVERY_TIME = ["a_group_is_used_before_it_has_arrived", "element_masks_are_never_applied"]


def test_there_are_at_least_ten_bugs():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 10


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
    monkeypatch.setattr(bug.owner, bug.attribute, bug.broken(getattr(bug.owner, bug.attribute)))
    assert noticed(bug.case, bug.interpreter) != [], "the bug went unnoticed"
