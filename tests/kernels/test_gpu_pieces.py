"""Rows that are cut into pieces: every item once, none too long, and the sums are the rows'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted import GPU_CHECKED
from xsake.kernels.block_sparse import gpu_lists, gpu_pieces, mosaic_gpu, mosaic_gpu_hopper
from xsake.kernels.block_sparse.problem import Cotangents, Operands, Problem
from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.layout import BlockLayout
from xsake.masks import Causal

ROWS = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), min_size=1, max_size=12)


@settings(max_examples=20)  # every size of the traced list is compiled anew
@given(ROWS, st.integers(1, 9), st.integers(0, 5))
def test_pieces_hold_every_item_once_and_none_is_too_long(rows, length, spare):
    counts = np.array([count for count, _ in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    middles = starts[:-1] + np.array([int(count * share) for count, share in rows], np.int32)
    capacity, longest = int(starts[-1]) + spare, int(counts.max())
    known = gpu_pieces.cut(starts, middles, length, capacity, longest)
    traced = gpu_pieces.cut(*map(jnp.asarray, (starts, middles)), length, capacity, longest)
    for found in (known, traced):
        own, begin, end, middle, first = map(np.asarray, found[:5])
        assert (end - begin <= length).all() and ((begin <= middle) & (middle <= end)).all()
        assert (np.diff(first) <= found.most).all()
        items = [(row, x) for row, a, b in zip(own, begin, end, strict=True) for x in range(a, b)]
        wanted = [(row, x) for row in range(len(counts)) for x in range(*starts[row : row + 2])]
        assert sorted(items) == wanted
        for row, a, b, m in zip(own, begin, end, middle, strict=True):
            assert m == min(max(middles[row], a), b)


@pytest.mark.parametrize(("list_batch", "list_heads"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_sums_go_to_the_blocks_that_the_kernel_calls_by_number(list_batch, list_heads):
    grid = RaggedGrid(True, 2, 8, 4, 5, 3, list_batch, list_heads)
    rows = grid.rows // grid.copies
    first = np.concatenate([[0], np.cumsum(1 + np.arange(rows) % 3)]).astype(np.int32)
    parts = np.random.default_rng(0).standard_normal((first[-1], grid.copies, 2, 16)).astype("f")
    found = gpu_pieces.summed(jnp.asarray(parts).reshape(-1, 2, 16), first, 3, grid)
    found = np.asarray(found).reshape(2, 3, 2, 4, 16)  # batch, block, token, head, feature
    for row in range(rows):
        for copy in range(grid.copies):
            number = int(grid.own_number(jnp.int32(row), jnp.int32(copy)))
            batch, head, block = np.unravel_index(number, (2, 4, 3))
            wanted = parts[first[row] : first[row + 1], copy].sum(0)
            np.testing.assert_allclose(found[batch, block, :, head], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("backend", "is_traced"),
    [pytest.param(mosaic_gpu_hopper, False, marks=pytest.mark.slow), (mosaic_gpu, True)],
)
def test_gradients_of_cut_rows_are_those_of_whole_ones(backend, is_traced, monkeypatch):
    layout = BlockLayout.from_mask(Causal(), q_tokens=256, block_q=64, block_kv=64)
    q, k = (
        jax.random.normal(jax.random.key(heads), (1, 256, heads, 32), jnp.bfloat16)
        for heads in (4, 2)
    )
    operands = Operands(q, k, k[:, ::-1], layout)
    lse = jnp.full(q.shape[:3], 5.0, jnp.float32)
    saved = q, lse, Cotangents(q[:, ::-1], 0 * lse)

    def gradients(least: int, layout):
        monkeypatch.setattr(gpu_pieces, "LEAST", least)
        gpu_lists._static_lists.cache_clear()
        given = operands._replace(layout=layout)
        most = gpu_lists.by_key(given, 64).most
        found = backend.key_value_gradient(given, Problem(0.2), *saved, GPU_CHECKED)
        gpu_lists._static_lists.cache_clear()
        return most, [np.asarray(x, np.float32) for x in found]

    one, whole = gradients(100, layout)
    several, cut = gradients(3, layout.traced(layout.capacity + 3) if is_traced else layout)
    assert (one, several) == (1, 3)
    for a, b in zip(whole, cut, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
