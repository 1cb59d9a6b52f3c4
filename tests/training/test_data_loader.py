"""Batches: every window once per epoch, the same for any processes, and exact after a stop."""

import itertools
import json
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.training import data_sample
from xsake.errors import ArgumentError, MissingExtraError
from xsake.training.data import Batch, TokenLoader
from xsake.training.data.order import positions_to_windows

CONTEXT, TOKENS = 8, 8 * 13 + 5  # 13 windows, and a rest that fills none
WINDOWS = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return data_sample.save_data(tmp_path_factory.mktemp("data") / "d", TOKENS, validation=40)


def open_loader(folder, **changes):
    return TokenLoader(
        folder, **{"context": CONTEXT, "batch": 4, "seed": 5, "prefetch": 0} | changes
    )


def read(loader, count):
    return list(itertools.islice(loader, count))


def assert_equal(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.windows, theirs.windows)


def test_a_batch_has_the_tokens_of_its_windows(folder):
    for batch in read(open_loader(folder), 9):
        assert isinstance(batch, Batch)
        assert batch.tokens.dtype == np.int32 and batch.tokens.shape == (4, CONTEXT + 1)
        assert batch.windows.dtype == np.int64 and batch.windows.shape == (4,)
        # In this data a token is its place in the stream, and shards end inside windows.
        expected = batch.windows[:, None] * CONTEXT + np.arange(CONTEXT + 1)
        np.testing.assert_array_equal(batch.tokens, expected)


@hypothesis.given(batch=st.integers(1, 30), seed=st.integers(0, 100), epochs=st.integers(1, 3))
def test_every_window_is_read_once_in_every_epoch(folder, batch, seed, epochs):
    steps = -(-epochs * WINDOWS // batch)
    run = read(open_loader(folder, batch=batch, seed=seed), steps)
    windows = np.concatenate([one.windows for one in run])[: epochs * WINDOWS]
    for epoch in windows.reshape(epochs, WINDOWS):
        assert sorted(epoch) == list(range(WINDOWS))


@pytest.mark.parametrize("processes", [2, 4])
def test_batches_are_the_same_for_any_number_of_processes(folder, processes):
    alone = read(open_loader(folder, batch=8), 7)
    shares = [
        read(open_loader(folder, batch=8, process=process, processes=processes), 7)
        for process in range(processes)
    ]
    assert all(len(share[0].windows) == 8 // processes for share in shares)
    together = [
        Batch(*(np.concatenate(parts) for parts in zip(*step, strict=True)))
        for step in zip(*shares, strict=True)
    ]
    assert_equal(together, alone)


@hypothesis.given(
    stop=st.integers(0, 12),
    batch=st.sampled_from([1, 4, 13, 20]),
    ahead=st.sampled_from([0, 1, 3]),
    processes=st.sampled_from([1, 2, 4]),
)
def test_a_run_that_stops_reads_what_a_straight_run_reads(folder, stop, batch, ahead, processes):
    """At every step, edges of epochs included, also if other processes go on."""
    hypothesis.assume(batch % processes == 0)
    straight = read(open_loader(folder, batch=batch), stop + 5)
    stopped = open_loader(folder, batch=batch, prefetch=ahead)
    before = read(stopped, stop)
    state = json.loads(json.dumps(stopped.state()))
    stopped.close()
    assert_equal(before, straight[:stop])
    rows = batch // processes
    for process in range(processes):
        share = {"process": process, "processes": processes}
        again = open_loader(folder, batch=batch, prefetch=ahead, **share)
        again.restore(state)
        assert again.state() == state
        mine = slice(process * rows, (process + 1) * rows)
        expected = [Batch(one.tokens[mine], one.windows[mine]) for one in straight[stop:]]
        assert_equal(read(again, 5), expected)
        again.close()


def test_reading_ahead_changes_neither_order_nor_state(folder):
    plain, ahead = open_loader(folder), open_loader(folder, prefetch=3)
    for step in range(10):
        assert plain.state() == ahead.state() and ahead.state()["step"] == step
        assert_equal([next(plain)], [next(ahead)])
    ahead.close()


def test_a_loader_can_go_back(folder):
    loader = open_loader(folder, prefetch=2)
    start = loader.state()
    first = read(loader, 6)
    loader.restore(start)
    assert_equal(read(loader, 6), first)
    loader.close()


def test_epochs_are_counted(folder):
    loader = open_loader(folder)
    seen = []
    for _ in range(8):
        seen.append(loader.epoch)
        next(loader)
    assert seen == [0, 0, 0, 0, 1, 1, 1, 2]  # windows 0, 4, 8, 12, 16, ... of 13


def test_seeds_and_epochs_give_other_orders(folder):
    orders = {
        seed: np.concatenate([one.windows for one in read(open_loader(folder, seed=seed), 7)])
        for seed in (1, 2)
    }
    assert (orders[1] != orders[2]).any()
    assert (orders[1][:13] != orders[1][13:26]).any()
    np.testing.assert_array_equal(
        orders[1], positions_to_windows(np.arange(28), windows=WINDOWS, seed=1)
    )


def test_the_splits_are_read_apart(folder):
    batch = next(open_loader(folder, split="validation"))
    assert batch.tokens.max() < 40 and batch.windows.max() < 4


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_batch_that_fails_is_still_the_next_one(folder, ahead, error, monkeypatch):
    straight = read(open_loader(folder), 6)
    loader = open_loader(folder, prefetch=ahead)
    intact, failing = loader.windows.read, set(straight[2].windows.tolist())

    def read_once(numbers):
        if set(numbers.tolist()) == failing:
            failing.clear()
            raise error
        return intact(numbers)

    monkeypatch.setattr(loader.windows, "read", read_once)
    assert_equal(read(loader, 2), straight[:2])
    with pytest.raises(type(error)):
        next(loader)
    assert loader.state()["step"] == 2
    assert_equal(read(loader, 4), straight[2:])
    loader.close()


def test_no_batch_comes_after_close(folder):
    loader = open_loader(folder, prefetch=2)
    next(loader)
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"batch": 5, "processes": 2},
            "(?s)not divisible by the number of processes.*5 windows for 2 processes",
        ),
        ({"batch": 0}, "not divisible by the number of processes"),
        ({"processes": 0}, "not divisible by the number of processes"),
        ({"process": 2, "processes": 2}, "(?s)process index is out of range.*0 to 1"),
        ({"process": -1}, "process index is out of range"),
        ({"context": 0}, "context is not positive"),
        (
            {"context": TOKENS},
            f"(?s)less than one window.*{TOKENS} tokens in train.*context of {TOKENS}",
        ),
        (
            {"vocabulary": 1000},
            "(?s)larger than that of the model.*131,072 tokens.*vocabulary of 1,000",
        ),
        ({"prefetch": -1}, "prefetch is negative"),
    ],
)
def test_what_cannot_be_read_is_refused(folder, changes, words):
    with pytest.raises(ArgumentError, match=words):
        open_loader(folder, **changes)


def test_a_context_that_just_fits_is_read(folder):
    loader = open_loader(folder, context=TOKENS - 1, vocabulary=2**17)
    np.testing.assert_array_equal(next(loader).tokens[0], np.arange(TOKENS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 6}, "(?s)the seed differs.*seed 6.*seed 5"),
        ({"batch": 8}, "batch differs"),
        ({"context": 9}, "the context differs"),
        ({"split": "validation"}, "split differs"),
        ({"data": "other"}, "the data differs"),
        ({"step": -1}, "invalid state"),
        ({"step": "3"}, "invalid state"),
        ({"step": 2**61}, "invalid state"),
        ({"version": 2}, "invalid state"),
        ({"more": 1}, "invalid state"),
    ],
)
def test_a_state_of_other_batches_is_refused(folder, changes, words):
    loader = open_loader(folder)
    read(loader, 2)
    with pytest.raises(ArgumentError, match=words):
        loader.restore(loader.state() | changes)
    assert loader.state()["step"] == 2


def test_a_step_that_no_run_reaches_is_refused(folder):
    loader = open_loader(folder, batch=2**10)
    with pytest.raises(ArgumentError, match="step of the loader is out of range"):
        loader.restore(loader.state() | {"step": 2**53})
    loader.restore(loader.state() | {"step": 2**40})
    assert next(loader).windows.shape == (2**10,)


def test_the_state_knows_other_data(folder, tmp_path):
    state = open_loader(folder).state()
    other = open_loader(data_sample.save_data(tmp_path / "other", TOKENS + 1))
    with pytest.raises(ArgumentError, match="the data differs"):
        other.restore(state)
    copy = open_loader(data_sample.save_data(tmp_path / "copy", TOKENS))
    copy.restore(state)


def test_without_grain_the_install_command_is_told(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(MissingExtraError, match=r"xsake\[train\]"):
        open_loader(folder)
