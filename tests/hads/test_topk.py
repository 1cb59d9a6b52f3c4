"""Blocks are chosen exactly as counted, heaviest gain first, inside jit and without a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lanes import gate
from xsake.hads.budget import ForcedBlocks, row_counts, visible_blocks
from xsake.hads.topk import BudgetScope, choose

FORCED = ForcedBlocks()


def masses_of(seed: int, heads: int, n: int, *, spread: float = 2.0, batch: int = 1):
    scores = spread * jax.random.normal(jax.random.key(seed), (batch, heads, n, n))
    return jax.nn.softmax(jnp.where(np.tri(n, dtype=bool), scores, -jnp.inf), -1)


def counts_of(share: float, heads: int, n: int):
    total = max(FORCED.total(n), round(share * visible_blocks(n)))
    return np.stack([row_counts(total, n, FORCED)] * heads)


def greedy(masses: np.ndarray, total: int) -> np.ndarray:
    """Log-mass greedy over all rows, a block at a time."""
    n = masses.shape[-1]
    chosen = np.broadcast_to(FORCED.grid(n), masses.shape).copy()
    visible = np.broadcast_to(np.tri(n, dtype=bool), masses.shape)
    while chosen.sum() < total:
        kept = (masses * chosen).sum(-1, keepdims=True)
        gain = np.where(visible & ~chosen, np.log1p(masses / kept), -1)
        chosen.flat[gain.argmax()] = True
    return chosen


@pytest.mark.parametrize("scope", gate(["HEAD", "LAYER"], BudgetScope))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), share=st.floats(0.05, 1), n=st.sampled_from([4, 9, 16]))
def test_counts_are_met_to_the_block(scope, seed, share, n):
    masses, counts = masses_of(seed, 3, n), counts_of(share, 3, n)
    chosen = np.asarray(choose(masses, counts, forced=FORCED, scope=scope))[0]
    assert (chosen | ~FORCED.grid(n)).all(), "an always-on block is missing"
    assert not (chosen & ~np.tri(n, dtype=bool)).any(), "a hidden block was chosen"
    match scope:
        case BudgetScope.ROW:
            assert (chosen.sum(-1) == counts).all()
        case BudgetScope.HEAD:
            assert (chosen.sum((1, 2)) == counts.sum(1)).all()
        case BudgetScope.LAYER:
            assert chosen.sum() == counts.sum()


def test_equal_masses_are_counted_too():
    masses, counts = jnp.zeros((2, 2, 12, 12)), counts_of(0.5, 2, 12)
    for scope in BudgetScope:
        chosen = choose(masses, counts, forced=FORCED, scope=scope)
        assert chosen.sum((1, 2, 3)).tolist() == [counts.sum()] * 2


def test_rows_take_their_heaviest_blocks():
    masses, counts = np.asarray(masses_of(0, 2, 16)), counts_of(0.5, 2, 16)
    chosen = np.asarray(choose(masses, counts, forced=FORCED, scope=BudgetScope.ROW))
    loose = np.tri(16, dtype=bool) & ~FORCED.grid(16)
    lightest = np.where(chosen & loose, masses, np.inf).min(-1)
    heaviest_left = np.where(~chosen & loose, masses, -np.inf).max(-1)
    assert (lightest > heaviest_left).all()


def test_a_layer_loses_as_little_as_greedy_choice_by_log_mass():
    masses, counts = np.asarray(masses_of(1, 3, 20, spread=3.0)), counts_of(0.35, 3, 20)
    chosen = np.asarray(choose(masses, counts, forced=FORCED, scope=BudgetScope.LAYER))[0]
    best = greedy(masses[0], int(counts.sum()))
    loss = lambda choice: -np.log((masses[0] * choice).sum(-1)).mean()
    assert loss(chosen) <= 1.01 * loss(best)


def test_batch_elements_do_not_compete():
    together = masses_of(2, 2, 16, batch=3)
    counts = counts_of(0.4, 2, 16)
    chosen = choose(together, counts, forced=FORCED)
    for place in range(3):
        alone = choose(together[place : place + 1], counts, forced=FORCED)
        assert (chosen[place] == alone[0]).all()


def test_new_inputs_compile_nothing():
    counts = counts_of(0.4, 2, 16)
    choose(masses_of(3, 2, 16), counts, forced=FORCED)
    before = choose._cache_size()
    choose(masses_of(4, 2, 16), counts_of(0.6, 2, 16), forced=FORCED)
    assert choose._cache_size() == before
