"""Blocks of heads: nothing better exists where curves are convex, and totals are exact."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError
from xsake.hads.allocation import static_units, take_units, water_fill
from xsake.hads.budget import ForcedBlocks, level_totals, visible_blocks

FORCED = ForcedBlocks()


def convex(rng, heads: int, n: int) -> np.ndarray:
    """Falling curves over levels whose gains per block fall too, [1, heads, n + 1]."""
    density = np.sort(rng.gamma(0.5, size=(heads, n)), axis=1)[:, ::-1]
    steps = density * np.arange(n, 0, -1)
    steps[:, : FORCED.blocks_per_row] = 0
    curve = np.concatenate([steps, np.zeros((heads, 1))], axis=1)[:, ::-1].cumsum(1)[:, ::-1]
    return curve[None]


def loss_of(curves, totals) -> float:
    """Sum over heads; between two levels the loss is a straight line."""
    heads, levels = curves.shape[1:]
    k = np.arange(min(FORCED.blocks_per_row, levels - 1), levels)
    cost = level_totals(k, levels - 1, FORCED)
    return sum(np.interp(totals[h], cost, curves[0, h, k]) for h in range(heads))


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(4, 6), st.floats(0, 1))
def test_no_other_choice_of_blocks_loses_less(seed, heads, n, where):
    curves = convex(np.random.default_rng(seed), heads, n)
    least, most = FORCED.total(n), visible_blocks(n)
    total = round(heads * (least + where * (most - least)))
    chosen = water_fill(curves, total, FORCED, floor=0)
    assert chosen.sum() == total
    others = (
        totals
        for totals in itertools.product(range(least, most + 1), repeat=heads)
        if sum(totals) == total
    )
    best = min(loss_of(curves, totals) for totals in others)
    assert loss_of(curves, chosen[0]) <= best + 1e-9


@given(st.integers(0, 10**6), st.integers(3, 9), st.floats(0, 1), st.sampled_from([None, 0]))
def test_any_curves_end_exactly_on_the_total(seed, n, where, floor):
    """Also those that are not convex, or rise by noise."""
    rng = np.random.default_rng(seed)
    curves = -np.sort(-rng.gamma(0.5, size=(2, 3, n + 1)), axis=-1)
    curves += rng.normal(size=curves.shape) * 1e-6
    least, most = 6 * FORCED.total(n), 6 * visible_blocks(n)
    total = round(least + where * (most - least))
    chosen = water_fill(curves, total, FORCED, floor=floor)
    assert chosen.shape == (2, 3) and chosen.sum() == total
    assert chosen.min() >= FORCED.total(n) and chosen.max() <= visible_blocks(n)


def test_every_head_gets_the_floor_that_the_total_allows():
    curves = np.zeros((1, 2, 9))
    curves[0, 0] = np.linspace(8, 0, 9)
    bare, one, two = level_totals(np.array([3, 4, 5]), 8, FORCED).tolist()
    assert water_fill(curves, bare + visible_blocks(8), FORCED)[0].tolist() == [
        bare + visible_blocks(8) - one,
        one,
    ]
    assert water_fill(curves, 2 * bare + 1, FORCED)[0].tolist() == [bare + 1, bare]
    assert water_fill(curves, 2 * two + 1, FORCED, floor=2)[0].tolist() == [two + 1, two]
    with pytest.raises(ArgumentError, match="XSK-102.total-below-floor"):
        water_fill(curves, 2 * two - 1, FORCED, floor=2)


def test_a_step_that_gains_nothing_is_bought_for_the_sake_of_the_next():
    curves = np.array([[[9, 9, 9, 9, 9, 0, 0, 0], [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6]]], float)
    bare, two = level_totals(np.array([3, 5]), 7, FORCED).tolist()
    assert water_fill(curves, two + bare, FORCED, floor=0).tolist() == [[two, bare]]


def test_equal_heads_differ_by_one_segment_at_most_and_the_first_is_fed_first():
    curves = np.tile(convex(np.random.default_rng(0), 1, 8), (1, 4, 1))
    for total in range(4 * FORCED.total(8), 4 * visible_blocks(8)):
        chosen = water_fill(curves, total, FORCED, floor=0)[0]
        assert (np.diff(chosen) <= 0).all() and np.ptp(chosen) <= 5


@pytest.mark.parametrize("total", [2 * 12 - 1, 2 * 15 + 1])
def test_impossible_totals_are_refused(total):
    with pytest.raises(ArgumentError, match="24 .forced. to 30"):
        water_fill(np.zeros((1, 2, 6)), total, FORCED)
    with pytest.raises(ArgumentError, match="24 .forced. to 30"):
        static_units(np.zeros((1, 2, 5)), np.zeros((1, 2, 5)), total, FORCED)


def test_a_diagonal_and_a_column_that_hold_the_mass_are_chosen():
    n = 12
    offsets, columns = np.full((1, 2, n), 1e-4), np.full((1, 2, n), 1e-4)
    offsets[0, 0, 5], columns[0, 1, 3] = 0.1, 0.12
    columns[0, :, 0] = 0.3  # the sink, which is on anyway
    offsets[0, :, 1:] += 0.3 / (n - np.arange(1, n))  # as every diagonal sees it
    found = static_units(offsets, columns, 2 * FORCED.total(n) + 13, FORCED)
    assert found.offsets == ((5,), ()) and found.columns == ((), (3,))
    # The diagonal crosses the sink, and the column two diagonals that are always on.
    assert (found.totals - FORCED.total(n)).tolist() == [[n - 5 - 1, n - 3 - 2]]


@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0, 1))
def test_static_totals_are_exact_and_hold_all_their_units(seed, n, where):
    rng = np.random.default_rng(seed)
    masses = rng.dirichlet(np.full(n, 0.3), (2, 2, 3))
    least, most = 6 * FORCED.total(n), 6 * visible_blocks(n)
    total = round(least + where * (most - least))
    found = static_units(masses[0], masses[1], total, FORCED)
    assert found.totals.sum() == total
    for head, blocks in enumerate(found.totals.ravel()):
        grid = take_units(found.offsets[head], found.columns[head], int(blocks), n, FORCED)
        assert grid.sum() == blocks and (grid >= FORCED.grid(n)).all()
        assert all(np.diagonal(grid, -offset).all() for offset in found.offsets[head])
        assert all(grid[column:, column].all() for column in found.columns[head])


@given(st.integers(1, 12), st.data())
def test_units_serve_any_length_with_exactly_the_blocks_asked_for(n, data):
    numbers = st.lists(st.integers(0, 14), unique=True, max_size=4).map(lambda x: tuple(sorted(x)))
    offsets, columns = data.draw(numbers), data.draw(numbers)
    before = None
    for total in range(FORCED.total(n), visible_blocks(n) + 1):
        grid = take_units(offsets, columns, total, n, FORCED)
        assert grid.sum() == total and not np.triu(grid, 1).any()
        assert before is None or (grid >= before).all()
        before = grid
