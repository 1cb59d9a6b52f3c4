"""The guard: updates that would do harm are not made, and leave no trace but their number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.test_config import config
from xsake.model import DenseAttention
from xsake.training.reliability import (
    GuardState,
    init_guard,
    select_tree,
    should_update,
    update_guard,
)
from xsake.training.sections import GuardSection
from xsake.training.state import abstract_state, build_optimizer, define_model, digest
from xsake.training.step import make_step

RUN = config("model.decoder.layers=1", "data.context=16", "guard.window=4", "data.batch=2")
GOOD = (np.arange(17)[None] * np.array([[1], [3]]) % 90).astype(np.int32)
POISON = np.where(np.arange(17) == 5, RUN.model.decoder.vocab_size + 7, GOOD).astype(np.int32)

scalar = lambda x: jnp.asarray(x, jnp.float32)


@pytest.fixture(scope="module")
def step():
    definition = define_model(RUN)
    return make_step(RUN, definition, build_optimizer(RUN, definition), DenseAttention())


def drawn_state(run):
    """A state whose weights NumPy has drawn, which compiles nothing."""
    rng = np.random.default_rng(0)
    shapes = abstract_state(run)
    draw = lambda x: rng.normal(size=x.shape) * 0.1 if x.ndim > 2 else np.ones(x.shape)
    weights = jax.tree.map(draw, shapes.parameters)
    weights["embedding"] = rng.normal(size=weights["embedding"].shape) * 0.1
    zeros = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
    weights = jax.tree.map(lambda x: jnp.asarray(x.astype(np.float32)), weights)
    return dataclasses.replace(zeros, parameters=weights)


@pytest.fixture(scope="module")
def first():
    return drawn_state(RUN)


@pytest.fixture
def state(first):
    return jax.tree.map(jnp.copy, first)


def traces(state) -> tuple[str, str]:
    return digest(state.parameters), digest(state.optimizer)


def test_a_poisoned_batch_changes_nothing(step, state):
    state, _ = step(state, GOOD)
    before, norms, count = traces(state), digest(state.guard.norms), int(state.optimizer[1].count)
    state, told = step(state, POISON)
    assert not np.isfinite(told.loss) and bool(told.is_skipped) and int(told.consecutive_skips) == 1
    assert traces(state) == before and digest(state.guard.norms) == norms
    assert int(state.optimizer[1].count) == count == 1
    assert int(state.step) == 2  # the batch was read
    assert (int(state.guard.accepted), int(state.guard.total)) == (1, 1)


def test_skips_in_a_row_are_counted_until_an_update_is_made(step, state):
    told = []
    for batch in (POISON, POISON, POISON, GOOD, POISON):
        state, metrics = step(state, batch)
        told.append((bool(metrics.is_skipped), int(metrics.consecutive_skips)))
    assert told == [(True, 1), (True, 2), (True, 3), (False, 0), (True, 1)]
    assert int(state.guard.total) == 4 and int(state.guard.accepted) == 1


def test_skipped_batches_do_not_use_up_the_schedule(step, state):
    other = jax.tree.map(jnp.copy, state)
    for batch in (POISON, GOOD):
        state, after_poison = step(state, batch)
    other, straight = step(other, GOOD)
    assert float(after_poison.learning_rate) == float(straight.learning_rate)
    assert traces(state) == traces(other)


def test_a_spike_is_skipped_once_the_window_is_full(step, state):
    def known(accepted: int):
        guard = GuardState(
            jnp.full(4, 0.01, jnp.float32), *(jnp.asarray(x, jnp.int32) for x in (accepted, 0, 0))
        )
        return dataclasses.replace(jax.tree.map(jnp.copy, state), guard=guard)

    before = traces(state)
    after, told = step(known(4), GOOD)
    assert np.isfinite(told.loss) and float(told.gradient_norm) > 50 * 0.01
    assert bool(told.is_skipped) and traces(after) == before
    after, told = step(known(3), GOOD)
    assert not bool(told.is_skipped) and traces(after) != before
    np.testing.assert_allclose(after.guard.norms, [0.01, 0.01, 0.01, told.gradient_norm])


@given(
    norms=st.lists(st.floats(0.125, 8, width=32), min_size=3, max_size=9),
    next_norm=st.floats(0, 64, width=32),
    threshold=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_the_limit_is_mean_and_deviations_of_the_last_accepted_norms(norms, next_norm, threshold):
    section = GuardSection(window=3, zscore_threshold=threshold)
    anything = GuardSection(window=3, zscore_threshold=1e6)
    guard = init_guard(section)
    for norm in norms:
        guard = update_guard(anything, guard, scalar(norm), jnp.asarray(True))
        guard = update_guard(anything, guard, scalar(jnp.nan), jnp.asarray(False))
    last = np.array(norms[-3:], np.float64)
    assert np.isfinite(guard.norms).all() and sorted(guard.norms.tolist()) == sorted(last)
    limit = last.mean() + threshold * max(last.std(), 0.05 * last.mean())
    if abs(next_norm - limit) > 1e-4 * limit:
        found = should_update(section, guard, scalar(1.0), scalar(next_norm))
        assert bool(found) == (next_norm < limit)
    assert (int(guard.accepted), int(guard.total)) == (len(norms), len(norms))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["loss", "norm"])
def test_numbers_that_are_not_finite_are_refused_unless_it_is_off(bad, place):
    numbers = {"loss": scalar(1.0), "norm": scalar(1.0)} | {place: scalar(bad)}
    for enabled in (True, False):
        section = GuardSection(window=2, enabled=enabled)
        assert bool(should_update(section, init_guard(section), **numbers)) != enabled


def refused(section: GuardSection, norms) -> list[int]:
    """Which of a run's norms are refused."""
    guard, found = init_guard(section), []
    for place, norm in enumerate(norms):
        is_made = should_update(section, guard, scalar(1.0), scalar(norm))
        guard = update_guard(section, guard, scalar(norm), is_made)
        found += [] if bool(is_made) else [place]
    return found


USUAL = np.random.default_rng(0).normal(1.0, 0.1, 32).clip(0.5)
SPIKES = np.where(np.isin(np.arange(32), [20, 21, 30]), 50, 1)


@pytest.mark.parametrize(
    ("window", "norms", "expected"),
    [
        (2, [2.0] * 7, []),
        (16, [*USUAL, *(20 * USUAL)], [32, 33]),  # gradients that stay large become usual
        (16, [*USUAL, *(3 * USUAL), 60.0, *(3 * USUAL)], [32, 33, 64]),
        (16, USUAL * SPIKES, [20, 21, 30]),  # spikes that come and go stay spikes
        (2, [1.0, 1.0, 50.0, np.nan, np.nan], [2, 3, 4]),
    ],
    ids=["constant", "larger", "larger twice", "spikes", "among nan"],
)
def test_norms_of_a_run_are_refused_while_they_are_unusual(window, norms, expected):
    assert refused(GuardSection(window=window), norms) == expected


def test_what_is_kept_is_kept_bit_for_bit():
    old = {"a": jnp.array([-0.0, np.nan, 1e-45, np.inf], jnp.float32), "b": jnp.arange(3)}
    new = jax.tree.map(lambda x: x + 1, old)
    assert digest(select_tree(jnp.asarray(False), new, old)) == digest(old)
    assert digest(select_tree(jnp.asarray(True), new, old)) == digest(new)
