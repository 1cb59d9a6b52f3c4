"""Hands: what shards are dealt together is the whole layout, before a program and inside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.distributed.deal import EMPTY
from xsake.distributed.hands import Hand, hand_now, hands_before
from xsake.layout import BlockLayout
from xsake.masks import Causal

AXIS = "context"


def layout_of(batch=2, heads=4, blocks=10) -> BlockLayout:
    rng = np.random.default_rng(1)
    budget = np.linspace(0.2, 0.9, heads)[:, None, None]
    chosen = rng.random((batch, heads, blocks, blocks)) < budget
    return BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8, mask=Causal())


def grids(hand: Hand, planes: int, kv_blocks: int, q_blocks: int) -> np.ndarray:
    """The blocks that all shards list, [planes, Nq, Nk], from hands stacked by shard."""
    listed = np.zeros((planes, q_blocks, kv_blocks), int)
    for shard in range(hand.own.shape[0]):
        starts, kv_block = (np.asarray(x[shard]) for x in hand.items[:2])
        own = np.asarray(hand.own[shard])
        for row in range(planes * own.size):
            plane, block = row // own.size, own[row % own.size]
            found = kv_block[starts[row] : starts[row + 1]]
            assert block != EMPTY or found.size == 0
            listed[plane, block, found] += 1
    return listed


@pytest.mark.parametrize("deal", ["work", "stripes"])
@pytest.mark.parametrize("shards", [3, 4])
def test_hands_dealt_before_the_program_make_up_the_layout(shards, deal):
    layout = layout_of()
    hands = hands_before(layout, (2, 2), shards, deal)
    assert hands.own.shape == (2, 2, shards, -(-10 // shards))
    whole = layout.to_block_mask()
    for batch in range(2):
        for part in range(2):
            hand = jax.tree.map(lambda x, i=(batch, part): x[i], hands)
            expected = whole[batch, 2 * part : 2 * part + 2]
            np.testing.assert_array_equal(grids(hand, 2, 10, 10), expected)
            if deal == "work":
                loads = hand.items.row_starts[:, -1]
                assert np.ptp(loads) <= expected.sum((0, 2)).max()


@pytest.mark.parametrize("deal", ["work", "stripes"])
def test_hands_dealt_inside_a_program_make_up_the_layout(deal):
    layout, shards = layout_of(), 4
    deal_now = lambda _: hand_now(layout.traced(), shards, deal, AXIS)
    hand = jax.jit(jax.vmap(deal_now, axis_name=AXIS))(jnp.arange(shards))
    expected = layout.to_block_mask().reshape(8, 10, 10)
    np.testing.assert_array_equal(grids(hand, 8, 10, 10), expected)
    if deal == "work":
        assert hand.items.kv_block.shape[1] < layout.traced().capacity


def test_hands_of_one_layout_are_dealt_once():
    layout = layout_of()
    assert hands_before(layout, (1, 2), 2, "work") is hands_before(layout, (1, 2), 2, "work")
