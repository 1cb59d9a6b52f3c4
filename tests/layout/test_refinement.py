"""Capacity, expansion, refinement and further masks keep a layout's meaning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

from tests.layout.expansion import (
    any_masks,
    block_grids,
    headless_masks,
    listed_items,
    pairs_of_layout,
    pairs_of_mask,
)
from xsake.errors import LayoutError
from xsake.layout import BlockLayout, capacity_bucket
from xsake.masks import Causal, Coverage, Full, PerHead, Window

# While tests run, beartype checks lists by random samples, also when strategies build masks.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


def causal(tokens=32, block=8):
    return BlockLayout.from_mask(Causal(), q_tokens=tokens, block_q=block, block_kv=block)


@given(st.integers(0, 10**7))
def test_buckets_hold_their_items_with_little_to_spare(items):
    bucket = capacity_bucket(items)
    assert bucket >= items
    assert bucket == 16 or bucket <= 1.25 * items
    assert capacity_bucket(bucket) == bucket


def test_there_are_four_buckets_per_octave():
    assert len({capacity_bucket(items) for items in range(1025, 2049)}) == 4


def test_capacity_changes_no_item():
    layout = causal()
    for kind in (layout, layout.traced()):
        wide = kind.with_capacity(99)
        assert wide.capacity == 99
        assert wide.is_static == kind.is_static
        assert listed_items(wide) == listed_items(wide.with_capacity(10)) == listed_items(layout)
        with pytest.raises(LayoutError, match="capacity=16"):
            kind.with_capacity(9)


def test_traced_layouts_get_a_bucket_by_default():
    layout = causal(tokens=64)
    assert layout.items == 36
    assert layout.traced().capacity == 40
    assert layout.traced().traced().capacity == 40
    assert layout.traced(50).capacity == 50


def test_overflow_while_tracing_is_reported_by_checkify():
    def build(chosen):
        return BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8, capacity=3)

    checked = jax.jit(checkify.checkify(build))
    error, layout = checked(jnp.array([[True, False], [True, True]]))
    error.throw()
    assert layout.validate().items == 3
    error, layout = checked(jnp.ones((2, 2), bool))
    with pytest.raises(checkify.JaxRuntimeError, match="XSK-301.capacity: 4 work items"):
        error.throw()
    # Without checkify the list is cut, but it is still a layout.
    assert jax.jit(build)(jnp.ones((2, 2), bool)).validate().items == 3


@given(block_grids(heads=(1,)))
def test_expansion_repeats_the_shared_list(choice):
    chosen, sizes = choice
    layout = BlockLayout.from_block_mask(chosen, mask=Causal(), **sizes)
    expected = np.broadcast_to(pairs_of_layout(layout), (layout.batch, 3, *_tokens(layout)))
    np.testing.assert_array_equal(pairs_of_layout(layout.expand(heads=3)), expected)


def test_traced_expansion_equals_the_static_one():
    layout = causal().refine(np.array([[2, 0, 0, 1, 2, 2, 2, 0, 0, 1]], np.int8))
    layout = layout.expand(batch=2)
    traced = jax.jit(lambda value: value.expand(heads=3))(layout.traced()).validate()
    assert listed_items(traced) == listed_items(layout.expand(heads=3))


def _tokens(layout):
    return layout.q_tokens, layout.kv_tokens


def test_expanding_the_batch_and_refusing_what_is_not_shared():
    wide = causal().expand(batch=2, heads=3)
    assert (wide.batch, wide.heads, wide.items) == (2, 3, 60)
    with pytest.raises(LayoutError, match="XSK-301.expand-shared"):
        wide.expand(heads=6)


@given(block_grids(), any_masks.filter(lambda mask: mask.heads in (None, 2)), headless_masks)
def test_a_further_mask_intersects_exactly(choice, first, second):
    chosen, sizes = choice
    chosen = chosen[:, :1] if first.heads is not None else chosen
    layout = BlockLayout.from_block_mask(chosen, mask=first, **sizes)
    further = layout.with_mask(second).validate()
    allowed = pairs_of_mask(second, 1, *_tokens(layout))
    expected = pairs_of_layout(layout) & allowed
    np.testing.assert_array_equal(pairs_of_layout(further), expected)
    for b, h, i, j, _ in listed_items(further):
        block = expected[b, h, i * layout.block_q :, j * layout.block_kv :]
        assert block[: layout.block_q, : layout.block_kv].any()


def test_a_further_mask_on_a_traced_layout_means_the_same():
    add = jax.jit(lambda layout, mask: layout.with_mask(mask), static_argnums=1)
    layout = causal(tokens=29)
    for mask in (Window(5, 0), Window(9, 0) | Causal(), PerHead([Full(), Window(3, 3)]), ~Full()):
        static, traced = layout.with_mask(mask), add(layout.traced(), mask).validate()
        np.testing.assert_array_equal(pairs_of_layout(traced), pairs_of_layout(static))
        assert traced.capacity == 16 * (mask.heads or 1)


@pytest.mark.parametrize("xp", [np, jnp])
def test_codes_drop_and_cut_items(xp):
    layout = BlockLayout.from_block_mask(np.ones((2, 3), bool), block_q=8, block_kv=8)
    codes = xp.asarray([[0, 2, 1, 2, 3, 0]], dtype=np.int8)
    refined = layout.refine(codes).validate()
    assert refined.is_static == (xp is np)
    assert listed_items(refined) == [
        (0, 0, 0, 1, False),
        (0, 0, 0, 2, True),
        (0, 0, 1, 0, False),
        (0, 0, 1, 1, True),
    ]


@pytest.mark.parametrize("xp", [np, jnp])
def test_codes_per_batch_element_split_a_shared_list(xp):
    rng = np.random.default_rng(0)
    layout = causal().expand(heads=2).with_capacity(24)
    codes = rng.integers(0, 4, (3, 24)).astype(np.int8)
    refined = layout.refine(xp.asarray(codes)).validate()
    assert (refined.batch, refined.heads) == (3, 2)
    expected = [
        (b, h, i, j, partial or int(code) != Coverage.ALL)
        for b in range(3)
        for (_, h, i, j, partial), code in zip(listed_items(layout), codes[b], strict=False)
        if code != Coverage.NONE
    ]
    assert listed_items(refined) == expected
    again = xp.asarray(np.full((3, refined.capacity), Coverage.ALL, np.int8))
    assert listed_items(refined.refine(again)) == expected


def test_codes_of_another_size_are_refused():
    with pytest.raises(LayoutError, match="XSK-301.coverage-shape"):
        causal().refine(np.zeros((1, 3), np.int8))
    with pytest.raises(LayoutError, match="XSK-301.coverage-shape"):
        causal().expand(batch=2).refine(np.zeros((3, 20), np.int8))
