"""Index lists, as FlexAttention and NSA have them, become layouts."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layout.expansion import listed_items, pairs_of_layout
from xsake.errors import LayoutError
from xsake.layout import BlockLayout
from xsake.masks import Causal, FromFunction, Full, PerHead

SIZES = {"block_q": 8, "block_kv": 8}


def both_kinds(indices, counts, **keywords):
    indices, counts = np.asarray(indices), np.asarray(counts)
    static = BlockLayout.from_indices_counts(indices, counts, **SIZES, **keywords)
    build = jax.jit(lambda i, c: BlockLayout.from_indices_counts(i, c, **SIZES, **keywords))
    traced = build(indices, counts)
    assert static.is_static
    assert not traced.is_static
    assert listed_items(traced.validate()) == listed_items(static)
    return static, traced


def test_unsorted_slots_are_sorted():
    static, traced = both_kinds([[[[3, 0, 2]], [[1, 3, 0]]]], [[[3], [2]]], kv_tokens=32)
    assert static.kv_block.tolist() == [0, 2, 3, 1, 3]
    assert static.row_starts.tolist() == [0, 3, 5]
    assert traced.capacity == 6


def test_minus_one_and_slots_past_the_count_are_unused():
    static, _ = both_kinds([[-1, 1, 99], [0, -1, -7], [5, 5, 5]], [2, 2, 0], kv_tokens=16)
    assert listed_items(static) == [(0, 0, 0, 1, False), (0, 0, 1, 0, False)]


def test_a_list_without_any_block_is_a_layout():
    static, _ = both_kinds(np.zeros((2, 4, 3), int), np.zeros((2, 4), int))
    assert static.items == 0
    assert not pairs_of_layout(static).any()


def test_random_lists_equal_their_grids():
    rng = np.random.default_rng(1)
    chosen = rng.random((2, 3, 4, 5)) < 0.5
    counts = chosen.sum(-1)
    order = np.argsort(np.where(chosen, rng.random(chosen.shape), 2.0), axis=-1)
    keywords = {"q_tokens": 29, "kv_tokens": 35, "mask": Causal()}
    static, _ = both_kinds(order, counts, **keywords)
    grid = BlockLayout.from_block_mask(chosen, **SIZES, **keywords)
    assert listed_items(static) == listed_items(grid)


def test_a_mask_with_heads_expands_shared_lists_of_every_batch_element():
    indices = np.array([[[[0, 1], [1, 0]]], [[[0, 0], [1, 0]]]])
    counts = np.array([[[2, 2]], [[1, 2]]])
    mask = PerHead([Causal(), Full(), Causal()])
    static, _ = both_kinds(indices, counts, mask=mask)
    assert (static.batch, static.heads) == (2, 3)
    chosen = np.array([[[[1, 1], [1, 1]]], [[[1, 0], [1, 1]]]], bool)
    grid = BlockLayout.from_block_mask(chosen, **SIZES, mask=mask)
    assert listed_items(static) == listed_items(grid)


def test_static_duplicates_are_refused():
    with pytest.raises(LayoutError, match="XSK-301.duplicate-blocks") as caught:
        BlockLayout.from_indices_counts(np.array([[0, 1], [1, 1]]), np.array([2, 2]), **SIZES)
    assert "query block 1" in str(caught.value)


@pytest.mark.parametrize("stray", [2, -2, 2**40])
def test_static_strays_are_refused(stray):
    with pytest.raises(LayoutError, match="XSK-301.kv-block-range"):
        BlockLayout.from_indices_counts(np.array([[0, 1], [0, stray]]), np.array([2, 2]), **SIZES)


@pytest.mark.parametrize("count", [-1, 3])
def test_static_counts_that_do_not_fit_are_refused(count):
    with pytest.raises(LayoutError, match="XSK-301.count-range"):
        BlockLayout.from_indices_counts(np.array([[0, 1], [0, 1]]), np.array([2, count]), **SIZES)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match="XSK-301.indices-shape"):
        BlockLayout.from_indices_counts(np.zeros((2, 2), int), np.zeros((1, 2), int), **SIZES)


def test_traced_duplicates_merge_and_strays_vanish():
    indices = jnp.array([[1, 1, 0, 1], [7, -2, 1, 1]])
    build = jax.jit(lambda i, c: BlockLayout.from_indices_counts(i, c, **SIZES))
    layout = build(indices, jnp.array([4, 9])).validate()
    assert listed_items(layout) == [(0, 0, 0, 0, False), (0, 0, 0, 1, False), (0, 0, 1, 1, False)]
    assert layout.capacity == 4
    again = build(jnp.array([[0, 0, 0, 0], [1, 0, 0, 0]]), jnp.array([0, -3])).validate()
    assert again.items == 0
    assert build._cache_size() == 1


def test_the_overhanging_block_is_partial_without_a_mask():
    static, _ = both_kinds([[0], [1]], [1, 1], q_tokens=13, kv_tokens=13)
    assert static.is_partial.tolist() == [False, True]
    assert pairs_of_layout(static)[0, 0, 12, 8:].all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_narrow_indices_reach_every_block(dtype):
    """More blocks than the dtype of the indices can number."""
    indices, counts = np.minimum(np.arange(300), 120)[:, None], np.ones(300, np.int32)
    static, traced = both_kinds(indices.astype(dtype), counts)
    assert static.kv_block.tolist() == indices[:, 0].tolist()
    assert traced.kv_block.tolist() == indices[:, 0].tolist()


REFUSED = {
    "from_block_mask([[True]], block_q=8, block_kv=8)": "must be an array",
    "from_indices_counts([[0]], np.ones(1, int), block_q=8, block_kv=8)": "must be an array",
    "from_block_mask(np.ones((1, 1), bool), block_q=8, block_kv=8, capacity=4.0)": "capacity",
    "from_mask(Causal(), q_tokens=8).with_capacity('4')": "capacity",
    "from_mask(np.ones((8, 8), bool), q_tokens=8)": "unsupported type",
    "from_block_mask(np.ones((1, 1), bool), block_q=8, block_kv=8, mask='causal')": "unsupported",
}


def test_values_of_a_wrong_kind_are_refused_with_a_reason():
    """As users see it: without the type checks that tests run under."""
    code = """
import numpy as np
from xsake.errors import XsakeError
from xsake.layout import BlockLayout
from xsake.masks import Causal
for text, words in REFUSED.items():
    try:
        eval("BlockLayout." + text)
    except XsakeError as error:
        assert words in str(error), (text, error)
    else:
        raise AssertionError(text)
print("all refused")
"""
    code = f"REFUSED = {REFUSED!r}" + code
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "all refused", run.stderr[-2000:]


def test_an_exported_function_of_a_layout_is_written_and_read():
    layout = BlockLayout.from_mask(Causal(), q_tokens=20, **SIZES).traced()
    count = jax.jit(lambda layout: layout.row_starts[-1] + layout.q_tokens)
    data = jax.export.export(count)(layout).serialize()
    again = jax.export.deserialize(data)
    assert int(again.call(layout)) == 26
    assert again.in_tree == jax.tree.structure(((layout,), {}))
    rule = FromFunction(lambda q_pos, kv_pos: kv_pos <= q_pos)
    other = BlockLayout.from_mask(rule, q_tokens=20, **SIZES).traced()
    with pytest.raises(LayoutError, match="XSK-301.mask-not-serializable"):
        jax.export.export(count)(other).serialize()
