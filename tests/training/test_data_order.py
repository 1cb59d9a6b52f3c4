"""The order of windows: a permutation in every epoch, the same for ever, and no pattern in it."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from xsake.training.data.order import permute, positions_to_windows

sizes = st.integers(1, 2000)
seeds = st.integers(-(2**70), 2**70)


@hypothesis.given(sizes, seeds, st.integers(0, 2**40))
def test_every_epoch_has_every_window_once(size, seed, epoch):
    found = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(np.sort(found), np.arange(size))


@hypothesis.given(sizes, seeds, st.integers(0, 2**40), st.data())
def test_a_place_gets_its_window_whatever_is_asked_with_it(size, seed, epoch, data):
    chosen = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), np.int64)
    whole = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(permute(chosen, size=size, seed=seed, epoch=epoch), whole[chosen])


def test_the_order_is_the_one_that_old_checkpoints_were_made_with():
    """If this fails, resumed runs would read other batches than they promised."""
    first = positions_to_windows(np.arange(24), windows=12, seed=0)
    assert first.tolist() == [
        5, 2, 7, 1, 8, 10, 11, 3, 6, 0, 9, 4,
        3, 0, 5, 4, 8, 6, 11, 7, 10, 1, 2, 9,
    ]  # fmt: skip
    large = permute(np.arange(4), size=10**12, seed=7, epoch=3)
    assert large.tolist() == [47242565694, 732575120442, 682130162110, 715430300086]


def test_seeds_and_epochs_give_unrelated_orders():
    size = 1000
    orders = {
        (seed, epoch): permute(np.arange(size), size=size, seed=seed, epoch=epoch)
        for seed in range(4)
        for epoch in range(4)
    }
    names = list(orders)
    for place, one in enumerate(names):
        for other in names[:place]:  # seed 1 of epoch 0 beside seed 0 of epoch 1, too
            assert (orders[one] == orders[other]).sum() < 12, (one, other)


def test_every_window_is_as_likely_at_every_place():
    size, trials = 6, 600
    found = np.array([
        permute(np.arange(size), size=size, seed=seed, epoch=0) for seed in range(trials)
    ])  # fmt: skip
    for place in range(size):
        counts = np.bincount(found[:, place], minlength=size)
        expected = trials / size
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected), (place, counts)


def test_neighbours_do_not_stay_neighbours():
    size = 5000
    order = permute(np.arange(size), size=size, seed=0, epoch=0)
    assert (np.abs(np.diff(order)) <= 2).sum() < 15
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06


def test_places_far_out_take_no_memory_and_no_time():
    places = np.array([2**61, 2**61 + 1], np.int64)
    found = positions_to_windows(places, windows=2**40 + 1, seed=0)
    assert (found >= 0).all() and (found <= 2**40).all() and found[0] != found[1]


def test_a_run_of_places_crosses_epochs():
    windows = 7
    run = positions_to_windows(np.arange(5, 23), windows=windows, seed=3)
    whole = np.concatenate([
        permute(np.arange(windows), size=windows, seed=3, epoch=epoch) for epoch in range(4)
    ])  # fmt: skip
    np.testing.assert_array_equal(run, whole[5:23])
