"""Other block sizes, same token pairs."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.layout.expansion import any_masks, headless_masks, listed_items, pairs_of_layout
from xsake.errors import LayoutError, MaskError
from xsake.layout import BlockLayout, ListedBlocks
from xsake.masks import AbstractMask, Causal, Coverage, PerHead, Window

# While tests run, beartype checks lists by random samples, also when strategies build masks.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

tokens = st.integers(1, 40)
powers = st.sampled_from([2, 4, 8, 16])


def random_choice(seed, density, sizes, batch=1, heads=1):
    q_blocks = -(-sizes["q_tokens"] // sizes["block_q"])
    kv_blocks = -(-sizes["kv_tokens"] // sizes["block_kv"])
    return np.random.default_rng(seed).random((batch, heads, q_blocks, kv_blocks)) < density


def assert_no_vain_items(layout, pairs):
    for b, h, i, j, _ in listed_items(layout):
        block = pairs[b, h, i * layout.block_q :, j * layout.block_kv :]
        assert block[: layout.block_q, : layout.block_kv].any()


@given(
    seed=st.integers(0, 99),
    density=st.sampled_from([0.2, 0.8, 1.0]),
    lengths=st.tuples(tokens, tokens),
    old=st.tuples(powers, powers),
    new=st.tuples(powers, powers),
    mask=st.none() | headless_masks,
)
def test_resizing_keeps_every_pair(seed, density, lengths, old, new, mask):
    sizes = {"q_tokens": lengths[0], "kv_tokens": lengths[1], "block_q": old[0], "block_kv": old[1]}
    chosen = random_choice(seed, density, sizes, heads=2)
    layout = BlockLayout.from_block_mask(chosen, mask=mask, **sizes)
    resized = layout.resize(*new).validate()
    assert (resized.block_q, resized.block_kv) == new
    pairs = pairs_of_layout(layout)
    np.testing.assert_array_equal(pairs_of_layout(resized), pairs)
    assert_no_vain_items(resized, pairs)
    back = resized.resize(*old).validate()
    np.testing.assert_array_equal(pairs_of_layout(back), pairs)
    assert_no_vain_items(back, pairs)


@given(any_masks, tokens, tokens, st.tuples(powers, powers), st.tuples(powers, powers))
def test_resizing_the_layout_of_a_mask_is_the_mask_in_other_blocks(mask, q, kv, old, new):
    keywords = {"q_tokens": q, "kv_tokens": kv}
    layout = BlockLayout.from_mask(mask, block_q=old[0], block_kv=old[1], **keywords)
    resized = layout.resize(*new)
    direct = BlockLayout.from_mask(mask, block_q=new[0], block_kv=new[1], **keywords)
    assert resized.mask == mask
    assert listed_items(resized) == listed_items(direct)


@given(st.integers(0, 99), st.tuples(tokens, tokens))
def test_blocks_of_a_batch_can_be_split(seed, lengths):
    sizes = {"q_tokens": lengths[0], "kv_tokens": lengths[1], "block_q": 8, "block_kv": 8}
    chosen = random_choice(seed, 0.5, sizes, batch=2, heads=2)
    layout = BlockLayout.from_block_mask(chosen, mask=Causal(), **sizes)
    np.testing.assert_array_equal(pairs_of_layout(layout.resize(4, 2)), pairs_of_layout(layout))


def test_a_traced_layout_splits_like_a_static_one_and_does_not_merge():
    layout = BlockLayout.from_mask(
        PerHead([Causal(), Causal() & Window(9, 0)]), q_tokens=29, block_q=16, block_kv=8
    )
    traced = jax.jit(lambda value: value.resize(4, 4))(layout.traced()).validate()
    np.testing.assert_array_equal(pairs_of_layout(traced), pairs_of_layout(layout))
    with pytest.raises(LayoutError, match="XSK-301.merge-traced"):
        layout.traced().resize(32, 8)


def test_merging_a_batch_works_where_no_new_mask_is_needed():
    layout = BlockLayout.from_mask(Causal(), q_tokens=32, block_q=8, block_kv=8)
    merged = layout.expand(batch=2).resize(16, 16)
    np.testing.assert_array_equal(pairs_of_layout(merged), pairs_of_layout(layout.expand(batch=2)))
    holes = np.tile(np.eye(4, dtype=bool), (2, 1, 1, 1))
    holes = BlockLayout.from_block_mask(holes, block_q=8, block_kv=8)
    with pytest.raises(LayoutError, match="XSK-301.merge-batch-mask"):
        holes.resize(16, 16)


@pytest.mark.parametrize("size", [0, -8, 12, 5, 2**31])
def test_sizes_that_do_not_divide_are_refused(size):
    layout = BlockLayout.from_mask(Causal(), q_tokens=32, block_q=8, block_kv=8)
    with pytest.raises(LayoutError):
        layout.resize(size, 8)


def listed(seed, heads=2):
    chosen = np.random.default_rng(seed).random((heads, 4, 5)) < 0.5
    return ListedBlocks(chosen, block_q=4, block_kv=3)


def test_listed_blocks_compare_by_content():
    assert listed(0) == listed(0)
    assert hash(listed(0)) == hash(listed(0))
    assert listed(0) != listed(1)
    assert listed(0).for_head(1) != listed(0).for_head(0)
    assert ListedBlocks(listed(0).chosen, 4, 4) != listed(0)
    assert isinstance(listed(0) & Causal(), AbstractMask)
    with pytest.raises(MaskError):
        listed(0).for_head(2)


def test_listed_blocks_own_their_content():
    chosen = np.ones((1, 2, 2), bool)
    mask = ListedBlocks(chosen, 4, 4)
    chosen[:] = False
    assert mask.allows(0, 0)


def test_listed_blocks_answer_for_pairs_inside_and_outside():
    mask = listed(3)
    q, kv = np.arange(20)[:, None], np.arange(20)[None, :]
    for head in range(2):
        expected = np.zeros((20, 20), bool)
        wide = mask.chosen[head].repeat(4, 0).repeat(3, 1)
        expected[: wide.shape[0], : wide.shape[1]] = wide
        np.testing.assert_array_equal(mask.allows(q, kv, head=np.array([[head]])), expected)
        np.testing.assert_array_equal(mask.for_head(head).allows(q, kv), expected)
        traced = jax.jit(lambda h: mask.allows(q, kv, head=h[None, None]))
        np.testing.assert_array_equal(traced(np.int32(head)), expected)


@given(*[st.integers(0, 18)] * 4, st.integers(0, 1))
def test_listed_blocks_never_lie_about_rectangles(q_first, q_last, kv_first, kv_last, head):
    assume(q_first <= q_last and kv_first <= kv_last)
    mask = listed(5)
    code = mask.coverage(q_first, q_last, kv_first, kv_last, head=head)
    q, kv = np.arange(q_first, q_last + 1)[:, None], np.arange(kv_first, kv_last + 1)[None, :]
    pairs = mask.for_head(head).allows(q, kv)
    truth = Coverage.ALL if pairs.all() else Coverage.SOME if pairs.any() else Coverage.NONE
    assert code in (truth, Coverage.UNKNOWN)
    if q_first // 4 == q_last // 4 and kv_first // 3 == kv_last // 3:
        assert code == truth
