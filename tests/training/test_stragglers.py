"""Who is slow is flagged, who is not is not, in simulated runs with the jitter of real ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsake.training import reliability
from xsake.training.reliability import StragglerDetector, compare_processes


def simulate(processes, steps, seed, *, sleeper=None):
    """The rounds of a run: own times and waits of synchronous steps, in seconds.

    Own times are a few per cent of a step, differ between processes, jitter, and now and then
    one takes ten times as long; so does the common part, say for a checkpoint.
    """
    draw = np.random.default_rng(seed)
    habits = draw.uniform(0.02, 0.08, processes)
    last, rounds = None, []
    for _ in range(steps // reliability.INTERVAL):
        shape = (reliability.INTERVAL, processes)
        own = habits * draw.lognormal(0, 0.3, shape) * np.where(draw.random(shape) < 0.01, 10, 1)
        device = draw.lognormal(0, 0.05, shape[0]) * np.where(draw.random(shape[0]) < 0.01, 5, 1)
        if sleeper is not None:
            own[:, sleeper] += 2.0  # a step takes three times as long
        whole = own.max(axis=1) + device
        waiting = whole[:, None] - own
        last = compare_processes(own.mean(axis=0), waiting.mean(axis=0), last)
        rounds.append(last)
    return rounds


@given(processes=st.integers(2, 32), seed=st.integers(0, 2**32))
def test_a_thousand_clean_steps_flag_nobody(processes, seed):
    rounds = simulate(processes, 1000, seed)
    assert len(rounds) == 20
    assert not any(found.flagged for found in rounds)


@given(processes=st.integers(2, 32), seed=st.integers(0, 2**32), data=st.data())
def test_a_sleeper_is_flagged_alone_within_150_steps(processes, seed, data):
    sleeper = data.draw(st.integers(0, processes - 1))
    rounds = simulate(processes, 150, seed, sleeper=sleeper)
    assert [found.flagged for found in rounds] == [(), (), (sleeper,)]
    assert f"process {sleeper} takes" in str(rounds[-1])
    assert "3 times in a row" in str(rounds[-1])


@pytest.mark.parametrize(
    ("own", "waiting", "flagged"),
    [
        ([0.1, 2.1], [3.0, 1.0], (1,)),  # both steps take 3.1 s
        ([1.0, 1.0, 2.0, 2.0], [0.0] * 4, (2, 3)),
        ([0.0, 0.0], [0.0, 0.0], ()),
    ],
)
def test_slow_processes_are_flagged_by_their_own_time(own, waiting, flagged):
    assert compare_processes(np.array(own), np.array(waiting), rounds=1).flagged == flagged


def test_one_good_round_makes_up_for_slow_ones():
    still, slow, good = np.zeros(3), np.array([1.0, 1.0, 2.0]), np.ones(3)
    last = None
    for own in (slow, slow, good, slow, slow):
        last = compare_processes(own, still, last)
        assert not last.flagged
    assert compare_processes(slow, still, last).flagged == (2,)


def test_a_watch_speaks_every_so_many_steps(monkeypatch):
    def with_a_fast_neighbour(mine):
        assert mine.dtype == np.float32
        return np.stack([mine, np.array([0.0, mine.sum()], np.float32)])

    monkeypatch.setattr(reliability, "gather", with_a_fast_neighbour)
    watch = StragglerDetector(interval=4, rounds=2)
    found = [watch.add(3.0, 1.0) for _ in range(8)]
    assert [step for step, spoken in enumerate(found, 1) if spoken] == [4, 8]
    assert found[3].flagged == ()
    assert found[7].flagged == (0,)
    assert found[7].seconds == pytest.approx((4.0, 1.0))


def test_a_process_that_is_alone_is_never_slow():
    watch = StragglerDetector(interval=1, rounds=1)
    assert watch.add(5.0, 1.0).flagged == ()
