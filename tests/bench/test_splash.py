"""Counting the two sides needs neither TPU nor libtpu; compiling is left to the benchmark."""

import dataclasses

import numpy as np
import pytest

from benchmarks.experiments import splash, splash_sides
from benchmarks.experiments.splash_job import Job
from tests.bench.sample_rows import sample_row
from xsake.benchmarking import BenchmarkRow

JOB = Job("splash", "causal", 1024, 4, 4, 64, 128, is_compiled=False)


def counts(tmp_path, **changes) -> dict[str, dict[str, int]]:
    return splash_sides.answer(dataclasses.replace(JOB, **changes), "v5e", tmp_path)


def test_splash_pads_causal_rows_and_skips_what_it_does_not_compute(tmp_path):
    for found in counts(tmp_path).values():
        assert found["iterations"] == 4 * 8 * 8
        assert found["computed_blocks"] == 4 * 36


def test_a_window_shrinks_the_padded_grid_to_the_widest_row(tmp_path):
    """Queries of a block of 128 see 1023 keys before their own: 9 blocks."""
    found = counts(tmp_path, mask="window", tokens=2048)["forward"]
    assert found["iterations"] == 4 * 16 * 9


@pytest.mark.parametrize("mask", ["causal", "window", "per_head", "ragged_50"])
def test_both_sides_list_the_same_blocks(tmp_path, mask):
    theirs, ours = (counts(tmp_path, mask=mask, side=side) for side in ("splash", "xsake"))
    for name in splash.PASSES:
        assert ours[name]["listed_blocks"] == theirs[name]["listed_blocks"]
        assert ours[name]["computed_blocks"] >= ours[name]["listed_blocks"]
        assert (
            ours[name]["iterations"] * ours[name]["iteration_blocks"]
            >= ours[name]["computed_blocks"]
        )
        assert ours[name]["launches"] == theirs[name]["launches"] == 1


def test_ragged_heads_are_drawn_once_and_told_to_splash_exactly():
    job = dataclasses.replace(JOB, mask="ragged_50")
    grid = splash_sides.drawn_grid(job)
    mask = splash_sides.GridMask(grid[1], job.tokens)
    seen = mask[slice(128, 384), slice(0, 256)]
    cells = seen.reshape(2, 128, 2, 128).any((1, 3))
    assert np.array_equal(cells, grid[1, 1:3, 0:2])
    assert not np.triu(mask[slice(0, 128), slice(0, 128)], 1).any()


def row(**counts: int) -> BenchmarkRow:
    return sample_row(counts=counts)


def test_bundles_around_the_blocks_are_counted():
    """10 iterations of 4 blocks for 36 listed ones: 500 with masks; 5 grid steps of 100 around."""
    ours = row(
        loop_bundles=400, most_loop_bundles=500, around_bundles=100,
        iterations=10, grid_steps=5, listed_blocks=36, computed_blocks=40, iteration_blocks=4,
    )  # fmt: skip
    assert splash.inner_bundles(ours) == 100
    assert splash.issued_bundles(ours) == 10 * 500 + 5 * 100


def test_steps_that_compute_nothing_cost_their_scalar_code():
    theirs = row(
        loop_bundles=600, edge_bundles=100, scalar_bundles=200, work_bundles=300,
        grid_steps=64, listed_blocks=36, computed_blocks=36, iteration_blocks=1,
    )  # fmt: skip
    assert splash.inner_bundles(theirs) == 500
    assert splash.issued_bundles(theirs) == 64 * 200 + 36 * 300
    assert splash.issued_bundles(row(grid_steps=3)) is None
