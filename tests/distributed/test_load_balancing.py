"""Block assignment: every block once, equal counts, nearly equal work, bounded lists."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.distributed.load_balancing import (
    EMPTY,
    assign_by_work,
    assign_by_work_jax,
    assign_zigzag,
    check_num_blocks,
    context_work,
    shard_capacity,
    shard_items,
    zigzag_block,
    zigzag_shard,
)
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.layout.csr import Items
from xsake.masks import Causal


def ragged(heads=4, blocks=32, seed=0) -> BlockLayout:
    """Heads with budgets from 10% to 90% and more blocks at early keys."""
    rng = np.random.default_rng(seed)
    budget = np.linspace(0.1, 0.9, heads)[:, None, None]
    density = np.linspace(1.3, 0.3, blocks)
    chosen = (rng.random((heads, blocks, blocks)) < budget * density) | np.eye(blocks, dtype=bool)
    return BlockLayout.from_block_mask(chosen, block_q=16, block_kv=16, mask=Causal())


WORK = st.lists(st.integers(0, 50), min_size=1, max_size=24)
BY_TRACED_WORK = jax.jit(lambda work: assign_by_work_jax(work, 4))


@hypothesis.given(WORK, st.integers(1, 8))
def test_every_block_is_assigned_once_and_in_equal_numbers(work, shards):
    work = np.array(work)
    for order in (assign_by_work(work, shards), assign_zigzag(work.size, shards)):
        assert order.shape == (shards, -(-work.size // shards)) and order.dtype == np.int32
        assert sorted(order[order != EMPTY]) == list(range(work.size))


@hypothesis.given(st.lists(st.integers(0, 50), min_size=11, max_size=11))
def test_traced_assignments_differ_by_less_than_the_heaviest_block(work):
    order = np.asarray(BY_TRACED_WORK(jnp.asarray(work)))
    assert order.shape == (4, 3) and sorted(order[order != EMPTY]) == list(range(11))
    padded = np.array([*work, 0])  # EMPTY is the last one
    assert np.ptp(padded[order].sum(1)) <= max(work)


def test_zigzag_order_and_its_inverse_agree():
    blocks = np.arange(37)
    shard = zigzag_shard(np, blocks, 5)
    np.testing.assert_array_equal(zigzag_block(np, shard, blocks // 5, 5), blocks)
    for index, assigned in enumerate(assign_zigzag(37, 5)):
        assert (shard[assigned[assigned != EMPTY]] == index).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_shard_has_the_lists_of_its_blocks_within_its_capacity(seed):
    layout, shards = ragged(heads=3, blocks=11, seed=seed), 4
    items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    counts = np.diff(layout.row_starts).reshape(3, 11)
    order = np.asarray(BY_TRACED_WORK(jnp.asarray(counts.sum(0))))
    capacity = shard_capacity(layout.items, 3, (11, 11), shards, "work")
    for blocks in order:
        lists = shard_items(np, items, np.arange(3), 11, blocks, capacity)
        assert lists.row_starts[-1] <= capacity
        for row in range(3 * blocks.size):
            head, block = row // blocks.size, blocks[row % blocks.size]
            listed = lists.kv_block[lists.row_starts[row] : lists.row_starts[row + 1]]
            ends = layout.row_starts[head * 11 + block : head * 11 + block + 2]
            expected = [] if block == EMPTY else layout.kv_block[ends[0] : ends[1]]
            np.testing.assert_array_equal(listed, expected)


@pytest.mark.parametrize("shards", [4, 8])
def test_assignment_by_work_balances_causal_and_ragged_lists(shards):
    causal = context_work(BlockLayout.from_mask(Causal(), q_tokens=64 * 128), shards)
    assert causal.excess_before > 1.7 and causal.excess_after < 1.005
    assert causal.ring_excess_before > 1.7 and causal.ring_excess_after < 1.005
    layout = ragged(blocks=64)
    sparse = context_work(layout, shards)
    assert sparse.excess_before > 1.5 and sparse.excess_after < 1.01
    assert sparse.ring_excess_before > 2 and sparse.ring_excess_after < 1.15
    assert sparse.before.sum() == sparse.after.sum() == layout.items
    print(f"\ncausal: {causal}\nragged: {sparse}")


def test_zigzag_balances_causal_lists():
    causal = context_work(BlockLayout.from_mask(Causal(), q_tokens=64 * 128), 8, "zigzag")
    assert causal.excess_after == 1.0
    empty = BlockLayout.from_block_mask(np.zeros((4, 4), bool), block_q=8, block_kv=8)
    assert context_work(empty, 2).excess_after == context_work(empty, 2).ring_excess_after == 1


def test_fewer_blocks_than_shards_raise():
    check_num_blocks(8, 8)
    with pytest.raises(ArgumentError, match="7 query blocks, 8 shards"):
        check_num_blocks(7, 8)
