"""The launcher with tiny processes: restarts, exit codes, output, and no orphans."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import typer
from typer.testing import CliRunner

from xsake.cli.launch import run_launch
from xsake.errors import ArgumentError, UnsupportedError
from xsake.training.launch import RestartPolicy, launch

ATTEMPT = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["XSAKE_PROCESS"])
attempt = len(list(folder.glob(f"attempt*.{rank}")))
(folder / f"attempt{attempt}.{rank}").write_text(os.environ["XSAKE_COORDINATOR"])
# None may fail before all have started: one killed earlier would count this attempt twice.
while len(list(folder.glob(f"attempt{attempt}.*"))) < int(os.environ["XSAKE_PROCESSES"]):
    time.sleep(0.01)
"""


class Run:
    """Exit code, output and waits of a launch."""

    def __init__(self, tmp_path, code, *, processes=1, **policy):
        self.out, self.err = io.StringIO(), io.StringIO()
        began = time.monotonic()
        policy = RestartPolicy(**{"backoff_seconds": 0.0} | policy)
        command = [sys.executable, "-I", "-S", "-c", ATTEMPT + code, str(tmp_path)]
        with contextlib.redirect_stdout(self.out), contextlib.redirect_stderr(self.err):
            self.code = launch(command, processes=processes, policy=policy)
        assert time.monotonic() - began < 60
        self.lines, self.log = self.out.getvalue().splitlines(), self.err.getvalue()
        self.num_restarts = len(re.findall("restarting all in", self.log))


def is_gone(process, seconds=10.0):
    """Whether a process that is not our child ends in time; a zombie has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_every_process_gets_its_variables_and_its_lines_get_its_number(tmp_path):
    run = Run(
        tmp_path,
        'print(rank, os.environ["XSAKE_PROCESSES"], os.environ["XSAKE_BIND"])\n'
        'print("careful", file=sys.stderr)\nsys.stdout.write("no end of line")',
        processes=3,
    )
    assert run.code == 0 and not run.num_restarts
    expected = [[f"[{rank}] {rank} 3 127.0.0.1", f"[{rank}] no end of line"] for rank in range(3)]
    assert sorted(run.lines) == sorted(sum(expected, []))
    assert sorted(run.log.splitlines()) == [f"[{rank}] careful" for rank in range(3)]
    (address,) = {(tmp_path / f"attempt0.{rank}").read_text() for rank in range(3)}
    assert address.startswith("127.0.0.1:")


def test_long_binary_output_passes_completely_and_a_closed_output_is_ignored(tmp_path):
    code = 'sys.stdout.buffer.write(b"\\xff" * 200_000 + b"\\nend\\n")'
    run = Run(tmp_path, code)
    assert run.code == 0
    assert run.out.getvalue().count("\ufffd") == 200_000
    assert run.lines[-1] == "[0] end"
    out = io.StringIO()
    out.close()
    command = [sys.executable, "-I", "-S", "-c", 'print("x" * 10**6)']
    with contextlib.redirect_stdout(out):
        assert launch(command) == 0


def test_all_are_restarted_when_one_fails(tmp_path):
    code = "if attempt == 0 and rank == 1: sys.exit(3)\nif attempt == 0: time.sleep(90)\nprint(1)"
    run = Run(tmp_path, code, processes=2)
    assert run.code == 0
    assert sorted(run.lines) == ["[0] 1", "[1] 1"]
    assert "[launch] process 1 failed with code 3" in run.log
    ports = [(tmp_path / f"attempt{attempt}.0").read_text() for attempt in (0, 1)]
    assert ports[0] != ports[1]


@pytest.mark.parametrize(
    ("code", "options", "expected", "num_restarts", "words"),
    [
        ("sys.exit(2)", {"processes": 2}, 2, 0, "a restart would fail again, giving up"),
        ("sys.exit(10 + attempt)", {"max_restarts": 2}, 12, 2, "failures: 3, max restarts: 2"),
        ("sys.exit(5)", {"max_restarts": 0}, 5, 0, "giving up"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)", {"max_restarts": 0}, 137, 0,
            "process 0 was killed by signal 9, Killed",
        ),
        # Code 75 is not a failure, unless another process fails or does not follow.
        (
            "sys.exit(75 if attempt < 5 else 0)", {"processes": 2, "max_restarts": 0}, 0, 5,
            "requests a restart, code 75",
        ),
        (
            "time.sleep(rank)\nsys.exit(75 if rank == 0 else 4)",
            {"processes": 2, "max_restarts": 0}, 4, 0, "process 1 failed with code 4",
        ),
        (
            "if attempt: sys.exit(0)\nif rank == 0: sys.exit(75)\ntime.sleep(90)",
            {"processes": 2, "max_restarts": 0, "grace_seconds": 0.5}, 0, 1,
            "killing processes that did not exit in time: process 1",
        ),
        # A long attempt resets the failure count.
        (
            "sys.exit(attempt < 3)", {"max_restarts": 1, "reset_failures_after": 0.0}, 0, 3,
            "failures so far: 1",
        ),
    ],
)  # fmt: skip
def test_exit_codes_and_restarts(tmp_path, code, options, expected, num_restarts, words):
    run = Run(tmp_path, code, **options)
    assert (run.code, run.num_restarts) == (expected, num_restarts), run.log
    assert words in run.log


STOPS = """
def stop(number, frame):
    print("saved", number, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
if rank == 0:
    time.sleep(0.2)
    os.kill(os.getppid(), signal.%s)
time.sleep(90)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_lets_all_save_and_restarts_none(tmp_path, name):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = Run(tmp_path, STOPS % name, processes=2)
    assert run.code == 75
    number = int(getattr(signal, name))
    assert sorted(run.lines) == [f"[0] saved {number}", f"[1] saved {number}"]
    assert len(list(tmp_path.glob("attempt*"))) == 2
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


IGNORES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(90)
"""
INTERRUPTS = """
signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
for _ in range(90): time.sleep(1)
"""


@pytest.mark.parametrize(("code", "grace"), [(IGNORES, 0.5), (INTERRUPTS, 90.0)])
def test_a_process_is_killed_after_the_grace_or_a_second_interrupt(tmp_path, code, grace):
    assert Run(tmp_path, code, grace_seconds=grace).code == 137


def test_a_stop_during_the_wait_ends_the_launch():
    """The restart would come after a minute."""
    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.monotonic()
    policy = RestartPolicy(backoff_seconds=120.0, max_backoff_seconds=120.0)
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.exit(6)"]
    assert launch(command, policy=policy) == 6
    assert time.monotonic() - began < 50


def test_children_of_a_process_end_with_the_attempt(tmp_path):
    code = """
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(90)
print(child)
"""
    run = Run(tmp_path, code, processes=2)
    assert run.code == 0
    children = [int(line.split()[1]) for line in run.lines]
    assert len(children) == 2
    assert all(is_gone(child) for child in children)


def test_a_killed_launcher_leaves_no_process():
    rank = """
import os, signal, time
child = os.fork()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child: print(os.getpid(), child, flush=True)
for _ in range(90): time.sleep(1)
"""
    program = """
import sys
from xsake.training.launch import RestartPolicy, launch
command = [sys.executable, "-I", "-S", "-c", sys.argv[1]]
launch(command, processes=2, policy=RestartPolicy(grace_seconds=1))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, rank], stdout=subprocess.PIPE, text=True
    ) as launcher:
        lines = [launcher.stdout.readline() for _ in range(2)]
        launcher.kill()
    processes = [int(number) for line in lines for number in line.split()[1:]]
    assert len(processes) == 4
    assert all(is_gone(process, 20.0) for process in processes)


@pytest.mark.parametrize(
    ("command", "processes", "words"),
    [
        ([], 1, "nothing to launch"),
        (["true"], 0, "nothing to launch"),
        (["/no/such/program"], 2, "(?s)cannot be started.*/no/such/program"),
    ],
)
def test_a_command_that_cannot_run_is_an_error(command, processes, words):
    with pytest.raises(ArgumentError, match=words):
        launch(command, processes=processes)


def test_signals_need_the_main_thread():
    errors = []

    def call():
        try:
            launch(["true"])
        except UnsupportedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_waits_double_up_to_a_limit_and_are_partly_random():
    policy = RestartPolicy(backoff_seconds=1.0, max_backoff_seconds=60.0)
    for restart, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 60.0), (10_000, 60.0)):
        waits = [policy.wait_seconds(restart) for _ in range(50)]
        assert all(longest / 2 <= wait <= longest for wait in waits) and len(set(waits)) > 1


@pytest.mark.parametrize(
    "wrong", [{"max_restarts": -1}, {"grace_seconds": -1.0}, {"backoff_seconds": -0.5}]
)
def test_negative_limits_are_errors(wrong):
    with pytest.raises(ArgumentError, match="XSK-102.restart-limits"):
        RestartPolicy(**wrong)


@pytest.mark.parametrize("mark", [[], ["--"]])
def test_the_command_line_passes_arguments_and_exit_codes(mark):
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(run_launch)
    python = [*mark, sys.executable, "-I", "-S", "-c"]
    code = "import sys; print(sys.argv[1:])"
    done = CliRunner().invoke(app, ["-n", "2", *python, code, "--processes"])
    assert done.exit_code == 0
    assert sorted(done.stdout.splitlines()) == [f"[{n}] ['--processes']" for n in (0, 1)]
    done = CliRunner().invoke(app, ["--max-restarts", "0", *python, "import sys; sys.exit(7)"])
    assert done.exit_code == 7 and "giving up" in done.stderr
    done = CliRunner().invoke(app, ["there-is-no-such-program"])
    assert done.exit_code == 2 and "there-is-no-such-program" in done.stderr
