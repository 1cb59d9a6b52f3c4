"""Metrics and alarms of a run: whole lines whatever the disk does, and an alarm that ends."""

import pathlib
import resource

import pytest

from xsake.training.checkpoints import CheckpointStore, SaveFailure
from xsake.training.progress import MetricsFile, SaveAlarm, read_metrics


def test_a_run_that_goes_back_drops_what_it_does_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(5):
        metrics.add(step, loss=float(step))
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    MetricsFile(path).go_back_to(3)
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").add(0, loss=float("nan"))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": None}]


def test_a_disk_without_room_delays_lines_and_loses_none(tmp_path):
    """A real limit of the system, in the middle of a line."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.add(0, loss=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.warns(RuntimeWarning, match="cannot be written for now") as told:
            for step in (1, 2, 3):
                metrics.add(step, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(told) == 1
    assert [line["step"] for line in read_metrics(path)] == [0]
    metrics.add(4, loss=1.0)
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3, 4]


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MetricsFile(None).add(0, loss=1.0)
    assert not list(pathlib.Path().iterdir())


def test_an_alarm_rings_until_a_later_step_is_saved(tmp_path):
    store, alarm = CheckpointStore(tmp_path), SaveAlarm()
    (tmp_path / "10").mkdir()
    assert alarm.count(store) == 0
    for step in (20, 30):
        alarm.ring(SaveFailure(step, "no room", OSError("no room"), is_committed=False))
    assert alarm.count(store) == 2
    (tmp_path / "40").mkdir()
    assert alarm.count(store) == 0
    store.close()
