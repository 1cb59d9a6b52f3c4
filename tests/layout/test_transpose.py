"""The kv-major list holds the same items as the layout, gathered under grouped heads."""

import jax
import numpy as np
import pytest
from hypothesis import given

from tests.layout.expansion import block_grids, listed_items
from xsake.errors import LayoutError
from xsake.layout import BlockLayout
from xsake.masks import Causal


def brute_force_rows(layout, kv_heads, q_heads):
    """Rows of (q_head, q_block, partial) by definition, one list per (batch, head, kv block)."""
    gathered = layout.heads == q_heads and q_heads != kv_heads and layout.heads != 1
    group = q_heads // kv_heads if gathered else 1
    heads = kv_heads if gathered else layout.heads
    rows = [[] for _ in range(layout.batch * heads * layout.kv_blocks)]
    for b, h, i, j, partial in listed_items(layout):
        row = (b * heads + h // group) * layout.kv_blocks + j
        rows[row].append((h % group, i, partial))
    return heads, group, [sorted(row) for row in rows]


def rows_of(transposed):
    starts = np.asarray(transposed.row_starts)
    columns = zip(
        *(np.asarray(a).tolist() for a in (transposed.q_head, transposed.q_block)),
        np.asarray(transposed.is_partial).tolist(),
        strict=True,
    )
    items = list(columns)
    return [items[first:last] for first, last in zip(starts[:-1], starts[1:], strict=True)]


def assert_transposes(layout, kv_heads, q_heads):
    heads, group, rows = brute_force_rows(layout, kv_heads, q_heads)
    transposed = layout.transpose(kv_heads, q_heads)
    assert (transposed.heads, transposed.group) == (heads, group)
    assert transposed.batch == layout.batch
    assert transposed.capacity == layout.capacity
    assert transposed.rows == len(rows)
    assert transposed.items == layout.items
    assert rows_of(transposed) == rows
    unused = slice(layout.items, None)
    assert not np.asarray(transposed.q_block)[unused].any()
    assert not np.asarray(transposed.is_partial)[unused].any()


@pytest.mark.parametrize(("kv_heads", "q_heads"), [(1, 4), (2, 4), (4, 4), (4, 8)])
@given(choice=block_grids(heads=(4,)))
def test_transpose_of_one_list_per_head(kv_heads, q_heads, choice):
    chosen, sizes = choice
    if q_heads == 4:
        mask = Causal()
    else:
        mask = None  # four lists over eight query heads: one per kv head
    layout = BlockLayout.from_block_mask(chosen, mask=mask, **sizes)
    assert_transposes(layout, kv_heads, q_heads)
    assert_transposes(layout.with_capacity(layout.items + 5), kv_heads, q_heads)


@given(block_grids(heads=(1,)))
def test_transpose_of_a_shared_list(choice):
    chosen, sizes = choice
    assert_transposes(BlockLayout.from_block_mask(chosen, **sizes), 2, 8)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_traced_transpose_equals_the_static_one(kv_heads):
    transpose = jax.jit(lambda layout: layout.transpose(kv_heads, 4))
    rng = np.random.default_rng(0)
    for density in (0.0, 0.3, 1.0):
        chosen = rng.random((2, 4, 3, 5)) < density
        layout = BlockLayout.from_block_mask(
            chosen, q_tokens=21, kv_tokens=37, block_q=8, block_kv=8, mask=Causal()
        )
        traced = layout.traced(capacity=128)
        static = layout.with_capacity(128).transpose(kv_heads, 4)
        found = transpose(traced)
        assert not found.is_static
        for name in ("row_starts", "q_block", "q_head", "is_partial"):
            np.testing.assert_array_equal(getattr(found, name), getattr(static, name))
        assert_transposes(traced, kv_heads, 4)
    assert transpose._cache_size() == 1


def test_static_transposes_are_kept():
    layout = BlockLayout.from_mask(Causal(), q_tokens=64, block_q=16, block_kv=16)
    assert layout.transpose(2, 4) is layout.transpose(4, 4)
    assert layout.transpose(2, 4).is_static
    with pytest.raises(ValueError, match="read-only"):
        layout.transpose(2, 4).q_block[0] = 1


def test_heads_that_fit_nothing_are_refused():
    layout = BlockLayout.from_block_mask(np.ones((3, 2, 2), bool), block_q=8, block_kv=8)
    with pytest.raises(LayoutError, match="XSK-301.transpose-heads"):
        layout.transpose(2, 4)
    with pytest.raises(LayoutError, match="XSK-301.transpose-groups"):
        layout.transpose(2, 3)


def test_items_of_a_traced_transpose_are_unknown_inside_jit():
    layout = BlockLayout.from_mask(Causal(), q_tokens=64, block_q=16, block_kv=16).traced()
    with pytest.raises(LayoutError, match="XSK-301.traced-count"):
        jax.jit(lambda value: value.transpose(1, 1).items)(layout)
