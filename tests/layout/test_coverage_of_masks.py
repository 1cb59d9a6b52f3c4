"""The layout of a mask covers it exactly: nothing lost, nothing listed in vain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.expansion import (
    any_masks,
    block_grids,
    block_sizes,
    cut,
    headless_masks,
    lengths,
    listed_items,
    pairs_of_layout,
    pairs_of_mask,
)
from xsake.errors import LayoutError
from xsake.layout import BlockLayout, build
from xsake.masks import Causal, Explicit, FromFunction, Full, PerHead, Random, Sinks, Window, base

# While tests run, beartype checks lists by random samples, also when strategies build masks.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


def assert_covers(layout, allowed):
    """`allowed[heads, Tq, Tk]` is what the layout should mean."""
    listed = {(h, i, j): partial for b, h, i, j, partial in listed_items(layout) if b == 0}
    for h in range(layout.heads):
        for i, j, tokens in cut(allowed[h], layout):
            sticks_out = (j + 1) * layout.block_kv > layout.kv_tokens
            if tokens.any():
                assert listed[h, i, j] == (sticks_out or not tokens.all())
            else:
                assert (h, i, j) not in listed


@given(any_masks, lengths, lengths, block_sizes, block_sizes)
def test_a_layout_covers_its_mask_exactly(mask, q_tokens, kv_tokens, block_q, block_kv):
    layout = BlockLayout.from_mask(
        mask, q_tokens=q_tokens, kv_tokens=kv_tokens, block_q=block_q, block_kv=block_kv
    )
    allowed = pairs_of_mask(mask, layout.heads, q_tokens, kv_tokens)
    assert layout.heads == (mask.heads or 1)
    assert layout.is_static
    assert_covers(layout, allowed)
    np.testing.assert_array_equal(pairs_of_layout(layout)[0], allowed)
    layout.validate()


@given(block_grids(), st.none() | headless_masks)
def test_chosen_blocks_keep_what_the_mask_allows(choice, mask):
    chosen, sizes = choice
    layout = BlockLayout.from_block_mask(chosen, mask=mask, **sizes)
    wide = np.repeat(np.repeat(chosen, sizes["block_q"], 2), sizes["block_kv"], 3)
    wide = wide[:, :, : sizes["q_tokens"], : sizes["kv_tokens"]]
    allowed = pairs_of_mask(
        Full() if mask is None else mask, 1, sizes["q_tokens"], sizes["kv_tokens"]
    )
    np.testing.assert_array_equal(pairs_of_layout(layout), wide & allowed)
    listed = {item[:4] for item in listed_items(layout)}
    for b, h in np.ndindex(chosen.shape[:2]):
        for i, j, tokens in cut((wide & allowed)[b, h], layout):
            assert ((b, h, i, j) in listed) == tokens.any()
    np.testing.assert_array_equal(
        layout.to_block_mask(), np.array(sorted_grid(listed, chosen.shape))
    )


def sorted_grid(listed, shape):
    grid = np.zeros(shape, bool)
    for place in listed:
        grid[place] = True
    return grid


@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal() & (Window(5, 0) | Sinks(3)),
        ~Random(0.5, seed=3, cell=8),
        FromFunction(lambda q, kv: (q + kv) % 3 == 0),
        PerHead([Causal(), Window(9, 2)]),
    ],
    ids=["no mask", "structured", "random", "function", "per head"],
)
def test_traced_choices_mean_the_same_as_static_ones(mask):
    sizes = {"q_tokens": 29, "kv_tokens": 37, "block_q": 8, "block_kv": 8}
    build = jax.jit(lambda grid: BlockLayout.from_block_mask(grid, mask=mask, **sizes))
    rng = np.random.default_rng(0)
    for density in (0.0, 0.4, 1.0):
        chosen = rng.random((2, 2, 4, 5)) < density
        static = BlockLayout.from_block_mask(chosen, mask=mask, **sizes)
        traced = build(chosen).validate()
        assert not traced.is_static
        assert traced.capacity == chosen.size
        np.testing.assert_array_equal(pairs_of_layout(traced), pairs_of_layout(static))
        assert listed_items(traced) == listed_items(static)
    assert build._cache_size() == 1


def test_a_shared_choice_takes_the_heads_of_its_mask():
    mask = PerHead([Causal(), Full(), Causal() & Window(7, 0)])
    chosen = np.ones((4, 4), bool)
    static = BlockLayout.from_block_mask(chosen, block_q=8, block_kv=8, mask=mask)
    build = jax.jit(lambda c: BlockLayout.from_block_mask(c, block_q=8, block_kv=8, mask=mask))
    traced = build(chosen)
    whole = BlockLayout.from_mask(mask, q_tokens=32, block_q=8, block_kv=8)
    assert listed_items(static) == listed_items(traced) == listed_items(whole)


def test_masks_with_other_heads_than_the_grid_are_rejected():
    with pytest.raises(LayoutError, match="XSK-301.build-heads"):
        BlockLayout.from_block_mask(
            np.ones((3, 2, 2), bool), block_q=8, block_kv=8, mask=PerHead([Causal(), Full()])
        )


def test_block_counts_that_contradict_the_lengths_are_refused():
    with pytest.raises(LayoutError, match="query blocks"):
        BlockLayout.from_block_mask(np.ones((4, 4), bool), q_tokens=8, block_q=8, block_kv=8)
    with pytest.raises(LayoutError, match="kv blocks"):
        BlockLayout.from_block_mask(np.ones((4, 4), bool), kv_tokens=33, block_q=8, block_kv=8)
    with pytest.raises(LayoutError, match="invalid q_tokens"):
        BlockLayout.from_mask(Causal(), q_tokens=0)


def test_equal_heads_are_built_once_and_layouts_are_cached():
    asked = []

    def rule(q, kv):
        asked.append(np.broadcast(q, kv).size)
        return kv <= q

    mask = PerHead([FromFunction(rule)] * 8)
    layout = BlockLayout.from_mask(mask, q_tokens=64, block_q=16, block_kv=16)
    assert sum(asked) <= 64 * 64
    assert layout.heads == 8
    assert BlockLayout.from_mask(mask, q_tokens=64, block_q=16, block_kv=16) is layout
    with pytest.raises(ValueError, match="read-only"):
        layout.kv_block[0] = 1


def test_tokens_are_only_looked_at_in_bounded_chunks(monkeypatch):
    monkeypatch.setattr(base, "CHUNK_TOKENS", 50)
    monkeypatch.setattr(build, "CHUNK_BLOCKS", 3)
    largest = []

    def rule(q, kv):
        largest.append(np.broadcast(q, kv).size)
        return (q + kv) % 3 == 0

    layout = BlockLayout.from_mask(FromFunction(rule), q_tokens=37, block_q=8, block_kv=16)
    assert max(largest) <= 50
    allowed = pairs_of_mask(FromFunction(rule), 1, 37, 37)
    assert_covers(layout, allowed)


def test_rules_written_in_jax_numpy_can_be_covered_while_tracing():
    rule = FromFunction(lambda q, kv: jnp.abs(q - kv) < 3)

    @jax.jit
    def items(x):
        return x + BlockLayout.from_mask(rule, q_tokens=32, block_q=8, block_kv=8).items

    assert items(0) == 10


def test_structured_masks_of_many_tokens_ask_for_no_tokens():
    layout = BlockLayout.from_mask(Causal() & (Window(255, 0) | Sinks(4)), q_tokens=2**17)
    blocks = 2**17 // 128
    assert layout.items == 3 * (blocks - 3) + 6 + (blocks - 3)


def test_explicit_tables_are_cut_at_their_edges():
    table = np.ones((20, 20), bool)
    layout = BlockLayout.from_mask(Explicit(table), q_tokens=32, block_q=8, block_kv=8)
    np.testing.assert_array_equal(pairs_of_layout(layout)[0, 0], np.pad(table, ((0, 12), (0, 12))))
