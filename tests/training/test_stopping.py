"""Signals become stops, a second Ctrl-C ends at once, and a step that hangs says where.

What several processes agree on is in test_processes.py.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from xsake.errors import ArgumentError, UnsupportedError
from xsake.training import stopping
from xsake.training.stopping import PreemptionHandler


def last_step(stop, seconds=10.0):
    """Takes quick steps until one is the last; its number."""
    end, step = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        time.sleep(0.01)
        step += 1
        if stop.should_stop(step):
            return step
    return None


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_a_step(name):
    told = []
    with PreemptionHandler(on_signal=told.append) as stop:
        assert not stop.should_stop(1)
        assert not stop.should_stop(2)
        os.kill(os.getpid(), name)
        assert last_step(stop) is not None
        assert stop.should_stop(99)  # and it stays so
    assert told == [name.name]


def test_a_signal_before_the_first_step_is_not_forgotten():
    with PreemptionHandler() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert stop.should_stop(1)


def test_many_sigterms_are_one_request():
    with PreemptionHandler() as stop:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
        assert last_step(stop) is not None


def test_other_signals_keep_their_handlers():
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append("own"))
    try:
        with PreemptionHandler() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert last_step(stop, 0.2) is None
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == ["own"]


def test_everything_is_as_before_afterwards():
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers, threads = [signal.getsignal(name) for name in names], threading.active_count()
    for _ in range(3):
        with PreemptionHandler() as stop:
            stop.should_stop(1)
    assert [signal.getsignal(name) for name in names] == handlers
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_sigusr1_writes_what_every_thread_does(tmp_path):
    path, is_over = tmp_path / "run" / "stacks.txt", threading.Event()
    other = threading.Thread(target=is_over.wait, name="other")
    other.start()
    with PreemptionHandler(stack_file=path):
        os.kill(os.getpid(), signal.SIGUSR1)
    is_over.set()
    other.join()
    assert "test_sigusr1_writes_what_every_thread_does" in path.read_text()
    assert path.read_text().count("hread 0x") >= 2


def test_a_slow_step_writes_stacks_and_a_quick_one_does_not(tmp_path):
    path = tmp_path / "stacks.txt"
    with PreemptionHandler(step_timeout_s=0.5, stack_file=path) as stop:
        assert not stop.should_stop(1)
        time.sleep(0.01)
        assert not stop.should_stop(2)
        assert path.read_text() == ""
        _hang_for_long()
        assert not stop.should_stop(3)
    text = path.read_text()
    assert "_hang_for_long" in text
    assert "Stacks above: step 3, which took 0." in text


def _hang_for_long():
    time.sleep(0.8)


def test_what_is_no_step_may_take_its_time(tmp_path):
    path = tmp_path / "stacks.txt"
    with PreemptionHandler(step_timeout_s=0.3, stack_file=path) as stop:
        time.sleep(0.5)  # the first step compiles
        assert not stop.should_stop(1)
        with stop.without_timeout():
            time.sleep(0.5)
        assert not stop.should_stop(2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert last_step(stop) is not None
        time.sleep(0.5)  # saves
    assert path.read_text() == ""


HANGS = """
import sys
from pathlib import Path
import jax, numpy as np
from xsake.training.stopping import PreemptionHandler

one = np.float32(1)
endless = jax.jit(lambda x: jax.lax.while_loop(lambda y: y < 2, lambda y: -y, x))
step = endless.lower(one).compile()
with PreemptionHandler(
    step_timeout_s=1.0, stack_file=Path(sys.argv[1]), is_fatal=sys.argv[2] == "fatal",
    on_signal=lambda name: print("heard", name, flush=True),
) as stop:
    stop.should_stop(1)
    print("hanging", flush=True)
    step(one).block_until_ready()
"""


def test_a_second_interrupt_ends_even_a_step_that_hangs(tmp_path):
    path = tmp_path / "stacks.txt"
    command = [sys.executable, "-c", HANGS, str(path), "patient"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "hanging\n"
            end = time.monotonic() + 60
            while "<module>" not in path.read_text() and time.monotonic() < end:
                time.sleep(0.1)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "heard SIGINT\n"
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=30) == stopping.EXIT_INTERRUPTED
        finally:
            child.kill()
    text = path.read_text()
    assert text.count("Timeout (0:00:01)!") == 1
    assert 'File "<string>", line 16 in <module>' in text


@pytest.mark.slow
def test_a_step_that_hangs_can_be_made_to_end_the_process(tmp_path):
    path = tmp_path / "stacks.txt"
    command = [sys.executable, "-c", HANGS, str(path), "fatal"]
    assert subprocess.run(command, check=False, timeout=100).returncode == 1
    assert 'File "<string>", line 16 in <module>' in path.read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_timeout_s": 0.0}, "must be positive"),
        ({"step_timeout_s": 1.0}, "needs a file for stacks"),
    ],
)
def test_a_watchdog_that_could_not_work_is_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        PreemptionHandler(**wrong)


def test_stacks_that_cannot_be_written_are_refused_and_nothing_changes(tmp_path):
    (tmp_path / "file").touch()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(ArgumentError, match="cannot write the file for stacks"),
        PreemptionHandler(stack_file=tmp_path / "file" / "stacks.txt"),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) == handler


def test_signals_need_the_main_thread():
    caught = []

    def enter():
        try:
            with PreemptionHandler():
                pass
        except UnsupportedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
