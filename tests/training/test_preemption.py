"""Signals become stops, a second Ctrl-C ends at once, and a step that hangs dumps its stacks.

Agreement of several processes is tested in test_processes.py.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from xsake.errors import ArgumentError, UnsupportedError
from xsake.training import preemption
from xsake.training.preemption import PreemptionHandler


def last_step(stop, seconds=10.0):
    """Take quick steps until one is the last; return its number."""
    end, step = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        time.sleep(0.01)
        step += 1
        if stop.should_stop(step):
            return step
    return None


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_a_step(name):
    names, other = [], []
    before = signal.signal(signal.SIGUSR2, lambda *_: other.append("kept"))
    try:
        with PreemptionHandler(on_signal=names.append) as stop:
            os.kill(os.getpid(), signal.SIGUSR2)  # other signals keep their handlers
            assert last_step(stop, 0.2) is None
            os.kill(os.getpid(), name)
            assert last_step(stop) is not None
            assert stop.should_stop(99)  # and it stays so
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert names == [name.name] and other == ["kept"]


def test_several_sigterms_before_the_first_step_are_one_request():
    with PreemptionHandler() as stop:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert stop.should_stop(1)


def test_handlers_and_threads_are_restored():
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers, threads = [signal.getsignal(name) for name in names], threading.active_count()
    for _ in range(3):
        with PreemptionHandler() as stop:
            stop.should_stop(1)
    assert [signal.getsignal(name) for name in names] == handlers
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_sigusr1_writes_the_stacks_of_all_threads(tmp_path):
    path, is_over = tmp_path / "run" / "stacks.txt", threading.Event()
    other = threading.Thread(target=is_over.wait, name="other")
    other.start()
    with PreemptionHandler(stack_file=path):
        os.kill(os.getpid(), signal.SIGUSR1)
    is_over.set()
    other.join()
    assert "test_sigusr1_writes_the_stacks_of_all_threads" in path.read_text()
    assert path.read_text().count("hread 0x") >= 2


def _hang():
    time.sleep(0.8)


def test_only_a_slow_step_writes_stacks(tmp_path):
    path = tmp_path / "stacks.txt"
    with PreemptionHandler(step_timeout_s=0.5, stack_file=path) as stop:
        _hang()  # the first step compiles
        assert not stop.should_stop(1)
        with stop.without_timeout():
            _hang()
        assert not stop.should_stop(2)
        assert path.read_text() == ""
        _hang()
        assert not stop.should_stop(3)
        text = path.read_text()
        assert "_hang" in text and "Stacks above: step 3, which took 0." in text
        os.kill(os.getpid(), signal.SIGTERM)
        assert last_step(stop) is not None
        _hang()  # saves
    assert path.read_text() == text


HANGS = """
import sys
from pathlib import Path
import jax, numpy as np
from xsake.training.preemption import PreemptionHandler

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
            assert child.wait(timeout=30) == preemption.EXIT_INTERRUPTED
        finally:
            child.kill()
    text = path.read_text()
    assert text.count("Timeout (0:00:01)!") == 1
    assert 'File "<string>", line 16 in <module>' in text


@pytest.mark.slow
def test_a_step_that_hangs_can_end_the_process(tmp_path):
    path = tmp_path / "stacks.txt"
    command = [sys.executable, "-c", HANGS, str(path), "fatal"]
    assert subprocess.run(command, check=False, timeout=100).returncode == 1
    assert 'File "<string>", line 16 in <module>' in path.read_text()


def test_invalid_arguments_are_errors_and_change_nothing(tmp_path):
    with pytest.raises(ArgumentError, match="XSK-102.step-timeout"):
        PreemptionHandler(step_timeout_s=0.0)
    with pytest.raises(ArgumentError, match="needs a file for stacks"):
        PreemptionHandler(step_timeout_s=1.0)
    (tmp_path / "file").touch()
    handler = signal.getsignal(signal.SIGTERM)
    unwritable = PreemptionHandler(stack_file=tmp_path / "file" / "stacks.txt")
    with pytest.raises(ArgumentError, match="XSK-102.stack-file-unwritable"), unwritable:
        pass
    assert signal.getsignal(signal.SIGTERM) == handler
    errors = []

    def enter():
        try:
            with PreemptionHandler():
                pass
        except UnsupportedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]
