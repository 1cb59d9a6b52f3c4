"""Trackers that are slow, broken or hang, and those that work: a run never waits for any."""

import contextlib
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from xsake.errors import ArgumentError
from xsake.observability import AsyncTrackers
from xsake.observability.trackers import TRACKERS, RunInfo, make_trackers


class Kept:
    """A tracker that keeps everything."""

    def __init__(self):
        self.lines, self.is_finished = [], False

    def log(self, step, values):
        self.lines.append((step, dict(values)))

    def finish(self):
        self.is_finished = True


class Raises(Kept):
    """Fails at every line."""

    def log(self, step, values):
        super().log(step, values)
        raise OSError(28, "No space left on device")


class Hangs(Kept):
    """Never comes back."""

    def __init__(self, release):
        super().__init__()
        self.release = release

    def log(self, step, values):
        self.release.wait()


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def test_every_tracker_gets_every_line_and_the_end():
    both = Kept(), Kept()
    fan = AsyncTrackers({"a": lambda: both[0], "b": lambda: both[1]}, seconds=0.0)
    for step in range(100):
        fan.log(step, {"loss": float(step), "windows": [1, 2]})
    fan.finish()
    for tracker in both:
        assert tracker.lines == [(step, {"loss": float(step)}) for step in range(100)]
        assert tracker.is_finished
    assert fan.dropped == {"a": 0, "b": 0}


def test_lines_are_handed_over_in_bursts_and_the_newest_of_a_kind_is_enough():
    kept = Kept()
    fan = AsyncTrackers({"kept": lambda: kept})
    fan.log(0, {"loss": 1.0})
    _until(lambda: len(kept.lines) == 1)
    fan.log(1, {"loss": 1.0})
    time.sleep(0.05)
    assert len(kept.lines) == 1  # not at once
    _until(lambda: len(kept.lines) == 2)
    for step in range(2, 9):
        fan.log(step, {"loss": 1.0, "is_skipped": step == 3})
    fan.log(5, {"entropy": [[0.5]]})
    begin = time.monotonic()
    fan.finish()
    assert time.monotonic() - begin < 0.9  # the end is
    # Of what waits: the step that was refused, the newest one, and the only probe.
    assert [step for step, _ in kept.lines] == [0, 1, 3, 8, 5]
    assert fan.dropped == {"kept": 0}


def _until(is_so):
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_fails_is_disabled_and_the_others_are_not(caplog):
    def missing():
        raise ImportError("no such library")

    broken, kept = Raises(), Kept()
    trackers = {"broken": lambda: broken, "missing": missing, "kept": lambda: kept}
    fan = AsyncTrackers(trackers, seconds=0.0)
    for step in range(50):
        fan.log(step, {"loss": 1.0})
    fan.finish()
    assert len(broken.lines) == 3 and not broken.is_finished
    assert len(kept.lines) == 50
    assert "is disabled: OSError" in caplog.text and "no such library" in caplog.text


def test_one_that_hangs_costs_no_time_and_is_left_behind(caplog, release):
    kept = Kept()
    fan = AsyncTrackers(
        {"hangs": lambda: Hangs(release), "kept": lambda: kept}, seconds=0.0, capacity=64
    )
    begin = time.monotonic()
    for step in range(1000):
        fan.log(step, {"loss": 1.0})
        if step % 50 == 0:
            time.sleep(0.001)  # the others have time to take theirs
    assert time.monotonic() - begin < 5  # a busy machine, types checked
    begin = time.monotonic()
    fan.finish(seconds=0.5)
    assert time.monotonic() - begin < 3
    assert fan.dropped["hangs"] >= 1000 - 64 - 2
    assert "did not finish in time" in caplog.text and "too slow" in caplog.text
    assert kept.is_finished and kept.lines[-1][0] == 999


@pytest.fixture
def subject(tmp_path):
    return RunInfo("tests", "run", "0123456789abcdef", tmp_path / "trackers", settings='{"a": 1}')


def log_all(name, subject, caplog):
    caplog.set_level(logging.WARNING)
    fan = AsyncTrackers(make_trackers([name], subject), seconds=0.0)
    for step in range(5):
        fan.log(step, {"loss": 2.5 - step, "entropy": [[0.5, 0.25]]})
    fan.finish(seconds=120.0)  # a busy machine takes long to start what wandb starts
    assert fan.dropped == {name: 0}, caplog.text
    assert not caplog.records


def test_wandb_offline_writes_a_run_that_can_be_read(subject, caplog):
    pytest.importorskip("wandb")
    log_all("wandb", subject, caplog)
    [file] = subject.folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # a process of wandb's own writes it, some time after
    while b"entropy/0/1" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    data = file.read_bytes()
    assert b"entropy/0/1" in data and b"training_step" in data


def test_tensorboard_writes_events_that_can_be_read(subject, caplog):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    log_all("tensorboard", subject, caplog)
    [file] = (subject.folder / "tensorboard").iterdir()
    data, found, place = file.read_bytes(), [], 0
    while place < len(data):  # records: length, its sum, the event, its sum
        size = int.from_bytes(data[place : place + 8], "little")
        event = event_pb2.Event.FromString(data[place + 12 : place + 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        place += size + 16
    assert (4, "loss", -1.5) in found and (0, "entropy/0/1", 0.25) in found
    assert len(found) == 15


TRACKIO = """
import pathlib, sys
from xsake.observability import AsyncTrackers
from xsake.observability.trackers import RunInfo, make_trackers
subject = RunInfo("tests", "run", "0", pathlib.Path(sys.argv[1]))
fan = AsyncTrackers(make_trackers(["trackio"], subject), seconds=0.0)
for step in range(5):
    fan.log(step, {"loss": 2.5 - step, "entropy": [[0.5, 0.25]]})
fan.finish(120.0)
assert fan.dropped == {"trackio": 0}
"""


def test_trackio_keeps_a_run_that_can_be_read(tmp_path):
    pytest.importorskip("trackio")
    # In a process of its own: trackio reads where it keeps things when it is imported.
    surroundings = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRACKIO, str(tmp_path)]
    subprocess.run(command, env=surroundings, check=True, capture_output=True)
    [file] = tmp_path.glob("tests*.db")
    with contextlib.closing(sqlite3.connect(file)) as database:
        assert database.execute("select count(*) from metrics").fetchone() == (5,)


def test_a_tracker_that_nobody_knows_is_refused(subject):
    with pytest.raises(ArgumentError, match="XSK-102.tracker"):
        make_trackers(["mlflow"], subject)
    assert set(make_trackers(TRACKERS, subject)) == set(TRACKERS)
