"""Partitions and block assignment: every item once, equal counts, nearly equal work."""

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
    partition_equal,
    partition_snake,
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


def test_zigzag_balances_causal_lists():
    causal = context_work(BlockLayout.from_mask(Causal(), q_tokens=64 * 128), 8, "zigzag")
    assert causal.excess_after == 1.0
    empty = BlockLayout.from_block_mask(np.zeros((4, 4), bool), block_q=8, block_kv=8)
    assert context_work(empty, 2).excess_after == context_work(empty, 2).ring_excess_after == 1


def test_fewer_blocks_than_shards_raise():
    check_num_blocks(8, 8)
    with pytest.raises(ArgumentError, match="7 query blocks, 8 shards"):
        check_num_blocks(7, 8)


# Partitions of equal size.


@st.composite
def problems(draw):
    parts, each = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    work = draw(st.lists(st.integers(0, 1000), min_size=parts * each, max_size=parts * each))
    return np.array(work), parts


# One shape, so that it is compiled once.
SNAKE_OF_THREE = jax.jit(lambda work: partition_snake(work, 3))


def loads(work, parts):
    return work[np.asarray(parts)].sum(axis=1)


@hypothesis.given(problems())
def test_every_item_is_in_one_part_and_the_maximum_is_bounded(problem):
    work, parts = problem
    result = partition_equal(work, parts)
    assert sorted(result.reshape(-1)) == list(range(work.size))
    assert (np.diff(result, axis=1) > 0).all()
    busiest = loads(work, result).max()
    assert busiest >= max(work.sum() / parts, work.max())
    assert busiest <= work.sum() / parts + work.max()


@hypothesis.given(st.lists(st.integers(0, 1000), min_size=15, max_size=15))
def test_snake_partitions_keep_their_bound(work):
    work = np.array(work)
    result = np.asarray(SNAKE_OF_THREE(jnp.asarray(work)))
    assert sorted(result.reshape(-1)) == list(range(work.size))
    assert (np.diff(result, axis=1) > 0).all()
    assert np.ptp(loads(work, result)) <= np.ptp(work)


def test_small_cases_reach_the_optimum():
    rng = np.random.default_rng(0)
    for _ in range(20):
        work = rng.integers(0, 100, 8)
        ways = [x for x in range(256) if x.bit_count() == 4]
        sums = [sum(int(w) for i, w in enumerate(work) if x >> i & 1) for x in ways]
        best = min(max(x, work.sum() - x) for x in sums)
        result = loads(work, partition_equal(work, 2)).max()
        assert result == best or result <= work.sum() / 2 * 1.001


@pytest.mark.parametrize(
    ("work", "message"),
    [([1, 2, 3], "3 items, 2 parts"), ([], "0 items"), ([1, -2], "-2"), ([1, np.nan], "finite")],
)
def test_invalid_work_raises(work, message):
    with pytest.raises(ArgumentError, match=message):
        partition_equal(np.array(work, float), 2)
