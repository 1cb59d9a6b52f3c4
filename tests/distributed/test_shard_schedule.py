"""Shard schedules: together they list the whole layout, static or traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.distributed.load_balancing import EMPTY
from xsake.distributed.shard_schedule import (
    ShardSchedule,
    build_local_schedule,
    build_static_schedules,
)
from xsake.layout import BlockLayout
from xsake.masks import Causal

AXIS = "context"


def layout_of(batch=2, heads=4, blocks=10) -> BlockLayout:
    rng = np.random.default_rng(1)
    budget = np.linspace(0.2, 0.9, heads)[:, None, None]
    chosen = rng.random((batch, heads, blocks, blocks)) < budget
    return BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8, mask=Causal())


def grids(schedule: ShardSchedule, planes: int, kv_blocks: int, q_blocks: int) -> np.ndarray:
    """Blocks listed by all shards, [planes, Nq, Nk]; schedules are stacked by shard."""
    listed = np.zeros((planes, q_blocks, kv_blocks), int)
    for shard in range(schedule.assigned.shape[0]):
        starts, kv_block = (np.asarray(x[shard]) for x in schedule.items[:2])
        blocks = np.asarray(schedule.assigned[shard])
        for row in range(planes * blocks.size):
            plane, block = row // blocks.size, blocks[row % blocks.size]
            listed_kv = kv_block[starts[row] : starts[row + 1]]
            assert block != EMPTY or listed_kv.size == 0
            listed[plane, block, listed_kv] += 1
    return listed


@pytest.mark.parametrize("assignment", ["work", "zigzag"])
@pytest.mark.parametrize("shards", [3, 4])
def test_static_schedules_cover_the_layout(shards, assignment):
    layout = layout_of()
    schedules = build_static_schedules(layout, (2, 2), shards, assignment)
    assert schedules.assigned.shape == (2, 2, shards, -(-10 // shards))
    whole = layout.to_block_mask()
    for batch in range(2):
        for part in range(2):
            schedule = jax.tree.map(lambda x, i=(batch, part): x[i], schedules)
            expected = whole[batch, 2 * part : 2 * part + 2]
            np.testing.assert_array_equal(grids(schedule, 2, 10, 10), expected)
            if assignment == "work":
                loads = schedule.items.row_starts[:, -1]
                assert np.ptp(loads) <= expected.sum((0, 2)).max()


@pytest.mark.parametrize("assignment", ["work", "zigzag"])
def test_traced_schedules_cover_the_layout(assignment):
    layout, shards = layout_of(), 4
    build = lambda _: build_local_schedule(layout.traced(), shards, assignment, AXIS)
    schedule = jax.jit(jax.vmap(build, axis_name=AXIS))(jnp.arange(shards))
    expected = layout.to_block_mask().reshape(8, 10, 10)
    np.testing.assert_array_equal(grids(schedule, 8, 10, 10), expected)
    if assignment == "work":
        assert schedule.items.kv_block.shape[1] < layout.traced().capacity


def test_schedules_of_a_layout_are_cached():
    arguments = layout_of(), (1, 2), 2, "work"
    assert build_static_schedules(*arguments) is build_static_schedules(*arguments)
