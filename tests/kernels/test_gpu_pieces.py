"""Rows that are split into pieces: every item once, none too long, and the sums of whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted import GPU_CHECKED
from xsake.kernels.block_sparse.mosaic_gpu import ampere, hopper, schedule, split_rows
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.layout import BlockLayout
from xsake.layout.numbering import RaggedGrid
from xsake.masks import Causal

ROWS = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), min_size=1, max_size=12)


@pytest.mark.slow  # quicker: tests/kernels/test_mosaic_gpu.py: a traced grid, forward and backward
@settings(max_examples=20)  # every size of the traced list is compiled again
@given(ROWS, st.integers(1, 9), st.integers(0, 5))
def test_pieces_hold_every_item_once_and_none_is_too_long(rows, length, spare):
    counts = np.array([count for count, _ in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    first_unmasked = starts[:-1] + np.array([int(count * share) for count, share in rows], np.int32)
    capacity, longest = int(starts[-1]) + spare, int(counts.max())
    traced = map(jnp.asarray, (starts, first_unmasked))
    for pieces in (
        split_rows.split(starts, first_unmasked, length, capacity, longest),
        split_rows.split(*traced, length, capacity, longest),
    ):
        row_of, begin, end, middle, first = map(np.asarray, pieces[:5])
        assert (end - begin <= length).all() and ((begin <= middle) & (middle <= end)).all()
        assert (np.diff(first) <= pieces.max_of_row).all()
        spans = zip(row_of, begin, end, strict=True)
        items = [(row, x) for row, a, b in spans for x in range(a, b)]
        expected = [(row, x) for row in range(len(counts)) for x in range(*starts[row : row + 2])]
        assert sorted(items) == expected
        for row, a, b, m in zip(row_of, begin, end, middle, strict=True):
            assert m == min(max(first_unmasked[row], a), b)


@pytest.mark.parametrize(("list_batch", "list_heads"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_sums_go_to_the_blocks_that_the_kernel_numbers(list_batch, list_heads):
    grid = RaggedGrid(True, 2, 8, 4, 5, 3, list_batch, list_heads)
    rows = grid.rows // grid.replicas
    first = np.concatenate([[0], np.cumsum(1 + np.arange(rows) % 3)]).astype(np.int32)
    parts = np.random.default_rng(0).standard_normal((first[-1], grid.replicas, 2, 16)).astype("f")
    sums = split_rows.sum_pieces(jnp.asarray(parts).reshape(-1, 2, 16), first, 3, grid)
    sums = np.asarray(sums).reshape(2, 3, 2, 4, 16)  # batch, block, token, head, feature
    for row in range(rows):
        for replica in range(grid.replicas):
            number = int(grid.outer_number(jnp.int32(row), jnp.int32(replica)))
            batch, head, block = np.unravel_index(number, (2, 4, 3))
            expected = parts[first[row] : first[row + 1], replica].sum(0)
            np.testing.assert_allclose(sums[batch, block, :, head], expected, rtol=1e-6)


@pytest.mark.slow  # quicker: tests/kernels/test_mosaic_gpu.py: a traced grid, forward and backward
@pytest.mark.parametrize(
    ("backend", "is_traced"), [pytest.param(hopper, False, marks=pytest.mark.slow), (ampere, True)]
)
def test_gradients_of_split_rows_are_those_of_whole_ones(backend, is_traced, monkeypatch):
    layout = BlockLayout.from_mask(Causal(), q_tokens=256, block_q=64, block_kv=64)
    q, k = (
        jax.random.normal(jax.random.key(heads), (1, 256, heads, 32), jnp.bfloat16)
        for heads in (4, 2)
    )
    inputs = BlockSparseInputs(q, k, k[:, ::-1], layout)
    lse = jnp.full(q.shape[:3], 5.0, jnp.float32)
    residuals = q, lse, q[:, ::-1], 0 * lse

    def gradients(min_length: int, layout):
        monkeypatch.setattr(split_rows, "MIN_LENGTH", min_length)
        schedule._static_lists.cache_clear()
        given = inputs._replace(layout=layout)
        max_pieces = schedule.schedule_keys(given, 64).max_pieces
        grads = backend.dkv_pass(given, BlockSparseConfig(0.2), *residuals, interpret=GPU_CHECKED)
        schedule._static_lists.cache_clear()
        return max_pieces, [np.asarray(x, np.float32) for x in grads]

    one, whole = gradients(100, layout)
    several, split = gradients(3, layout.traced(layout.capacity + 3) if is_traced else layout)
    assert (one, several) == (1, 3)
    for a, b in zip(whole, split, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
