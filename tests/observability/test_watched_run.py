"""A real run whose trackers hang, raise or have no room: no step is lost, and the file is whole."""

import threading
import time

import pytest

from benchmarks.faults.runs import prepare
from xsake.observability import read_metrics
from xsake.observability.profiler import find_traces
from xsake.training import metrics_logger


class Bad:
    """A tracker that does one thing wrong, from its first line on."""

    def __init__(self, act):
        self._act = act

    def log(self, step, values):
        self._act()

    def finish(self):
        self._act()


@pytest.mark.timeout(600)
@pytest.mark.slow  # quicker: trackers that hang or raise, without a run
def test_bad_trackers_lose_no_step_and_a_probe_and_a_trace_are_made(tmp_path, monkeypatch, caplog):
    release = threading.Event()

    def no_room():
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x" * 4096)

    def raises():
        raise RuntimeError("out of order")

    acts = {"hangs": release.wait, "raises": raises, "no room": no_room}
    bad = {name: (lambda act=act: Bad(act)) for name, act in acts.items()}
    monkeypatch.setattr(metrics_logger, "make_trackers", lambda names, subject: bad)
    ground = prepare(tmp_path, is_inside=True)
    run = ground.run("run", "run.steps=12", "attention.probe_interval=5")
    try:
        begin = time.monotonic()
        run.train("--profile", "steps=3:5")
        whole = time.monotonic() - begin
    finally:
        release.set()
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(12))
    assert [line["step"] for line in lines if "entropy" in line] == [4, 9]
    assert len(find_traces(run.folder)) == 1
    assert "hangs did not finish in time" in caplog.text and "raises is disabled" in caplog.text
    assert "No space left" in caplog.text and whole < 500
