"""The launcher with processes that do next to nothing: restarts, codes, output, and no orphans."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from xsake.cli.launch import run_launch
from xsake.errors import ArgumentError, UnsupportedError
from xsake.training.launch import Backoff, LaunchIO, RestartPolicy, launch

LIVES = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["XSAKE_PROCESS"])
life = len(list(folder.glob(f"life*.{rank}")))
(folder / f"life{life}.{rank}").write_text(os.environ["XSAKE_COORDINATOR"])
# None may fail before all have started: one killed earlier would count this life twice.
while len(list(folder.glob(f"life{life}.*"))) < int(os.environ["XSAKE_PROCESSES"]):
    time.sleep(0.01)
"""


class Run:
    """What a launch did: its exit code, its output and the pauses it would have made."""

    def __init__(self, tmp_path, code, *, processes=1, **rules):
        self.out, self.err, self.pauses = io.StringIO(), io.StringIO(), []
        self.began = time.monotonic()
        self.code = launch(
            [sys.executable, "-I", "-S", "-c", LIVES + code, str(tmp_path)],
            processes=processes,
            policy=RestartPolicy(**rules),
            io=LaunchIO(
                self.out,
                self.err,
                os.environ,
                wait=lambda event, seconds: self.pauses.append(seconds),
                chance=lambda: 1.0,
            ),
        )
        self.seconds = time.monotonic() - self.began

    @property
    def lines(self):
        return self.out.getvalue().splitlines()

    @property
    def complaints(self):
        return self.err.getvalue()


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


def test_every_process_gets_its_place_and_its_lines_get_its_number(tmp_path):
    run = Run(
        tmp_path,
        'print(rank, os.environ["XSAKE_PROCESSES"], os.environ["XSAKE_BIND"])\n'
        'print("careful", file=sys.stderr)\nsys.stdout.write("no end of line")',
        processes=3,
    )
    assert run.code == 0
    told = [[f"[{rank}] {rank} 3 127.0.0.1", f"[{rank}] no end of line"] for rank in range(3)]
    assert sorted(run.lines) == sorted(sum(told, []))
    assert sorted(run.complaints.splitlines()) == [f"[{rank}] careful" for rank in range(3)]
    places = {(tmp_path / f"life0.{rank}").read_text() for rank in range(3)}
    assert len(places) == 1
    assert places.pop().startswith("127.0.0.1:")
    assert not run.pauses


def test_long_output_that_is_no_text_passes_whole(tmp_path):
    run = Run(tmp_path, 'sys.stdout.buffer.write(b"\\xff" * 200_000 + b"\\nend\\n")')
    assert run.code == 0
    assert run.out.getvalue().count("\ufffd") == 200_000
    assert run.lines[-1] == "[0] end"


def test_a_closed_output_does_not_stop_the_processes(tmp_path):
    out = io.StringIO()
    out.close()
    command = [sys.executable, "-I", "-S", "-c", 'print("x" * 10**6)']
    surroundings = LaunchIO(out, io.StringIO(), os.environ)
    assert launch(command, io=surroundings) == 0


def test_all_are_started_again_when_one_fails(tmp_path):
    run = Run(
        tmp_path,
        "if life == 0 and rank == 1: sys.exit(3)\nif life == 0: time.sleep(60)\nprint('done')",
        processes=2,
    )
    assert run.code == 0
    assert sorted(run.lines) == ["[0] done", "[1] done"]
    assert "[launch] process 1 failed with code 3" in run.complaints
    ports = [(tmp_path / f"life{life}.0").read_text() for life in (0, 1)]
    assert ports[0] != ports[1]
    assert run.seconds < 30


def test_a_command_that_would_be_refused_again_is_not_started_again(tmp_path):
    run = Run(tmp_path, "sys.exit(2)", processes=2, max_restarts=3)
    assert run.code == 2
    assert not run.pauses and len(list(tmp_path.glob("life*.0"))) == 1
    assert "a restart would fail again, giving up" in run.complaints


def test_after_the_last_restart_the_code_of_the_failure_is_told(tmp_path):
    run = Run(tmp_path, "sys.exit(10 + life)", max_restarts=2)
    assert run.code == 12
    assert run.pauses == [0.5, 1.0]
    assert "giving up: failures: 3, max restarts: 2" in run.complaints


def test_no_restart_is_made_if_none_is_allowed(tmp_path):
    assert Run(tmp_path, "sys.exit(5)", max_restarts=0).code == 5


def test_a_killed_process_has_the_code_that_a_shell_would_tell(tmp_path):
    run = Run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", max_restarts=0)
    assert run.code == 137
    assert "process 0 was killed by signal 9, Killed" in run.complaints


def test_code_75_restarts_as_often_as_it_comes_and_counts_as_no_failure(tmp_path):
    run = Run(tmp_path, "sys.exit(75 if life < 5 else 0)", processes=2, max_restarts=0)
    assert run.code == 0
    assert len(list(tmp_path.glob("life*"))) == 12
    assert run.pauses == [0.5, 1.0, 2.0, 4.0, 8.0]  # in case it goes on forever


def test_a_failure_beside_code_75_is_a_failure(tmp_path):
    run = Run(tmp_path, "time.sleep(rank)\nsys.exit(75 if rank == 0 else 4)", processes=2,
              max_restarts=0)  # fmt: skip
    assert run.code == 4


def test_who_does_not_follow_code_75_is_killed_and_started_again(tmp_path):
    run = Run(
        tmp_path,
        "if life: sys.exit(0)\nif rank == 0: sys.exit(75)\ntime.sleep(60)",
        processes=2,
        max_restarts=0,
        grace_seconds=0.5,
    )
    assert run.code == 0
    assert "killing processes that did not exit in time: process 1" in run.complaints
    assert run.seconds < 30


def test_a_long_life_makes_up_for_failures_if_the_rules_say_so(tmp_path):
    healthy = Run(tmp_path, "sys.exit(life < 3)", max_restarts=1, reset_failures_after=0.0)
    assert healthy.code == 0
    assert healthy.pauses == [0.5, 0.5, 0.5]


STOPS = """
def stop(number, frame):
    print("saved", number, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
if rank == 0:
    time.sleep(0.2)
    os.kill(os.getppid(), signal.%s)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_lets_all_save_and_starts_nobody_again(tmp_path, name):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = Run(tmp_path, STOPS % name, processes=2)
    assert run.code == 75
    number = int(getattr(signal, name))
    assert sorted(run.lines) == [f"[0] saved {number}", f"[1] saved {number}"]
    assert len(list(tmp_path.glob("life*"))) == 2
    assert run.seconds < 30
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_who_ignores_a_stop_is_killed_after_the_grace(tmp_path):
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    run = Run(tmp_path, code, grace_seconds=0.5)
    assert run.code == 137
    assert run.seconds < 30


def test_a_second_interrupt_kills_at_once(tmp_path):
    code = """
signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
for _ in range(60): time.sleep(1)
"""
    run = Run(tmp_path, code, grace_seconds=60.0)
    assert run.code == 137
    assert run.seconds < 30


def test_a_stop_during_the_pause_ends_the_launch(tmp_path):
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.exit(6)"]

    def wait(event, seconds):
        os.kill(os.getpid(), signal.SIGTERM)
        assert event.wait(10)

    surroundings = LaunchIO(io.StringIO(), io.StringIO(), os.environ, wait=wait)
    assert launch(command, io=surroundings) == 6


def test_what_a_process_leaves_behind_ends_with_it(tmp_path):
    code = """
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
print(child)
"""
    run = Run(tmp_path, code, processes=2)
    assert run.code == 0
    children = [int(line.split()[1]) for line in run.lines]
    assert len(children) == 2
    assert all(is_gone(child) for child in children)
    assert run.seconds < 30


def test_a_killed_launcher_takes_everything_with_it(tmp_path):
    rank = """
import os, signal, time
child = os.fork()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child: print(os.getpid(), child, flush=True)
for _ in range(60): time.sleep(1)
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


def test_a_command_that_does_not_exist_is_no_failure_to_repeat(tmp_path):
    surroundings = LaunchIO(io.StringIO(), io.StringIO(), os.environ)
    with pytest.raises(ArgumentError, match="cannot be started") as caught:
        launch([str(tmp_path / "nothing")], processes=2, io=surroundings)
    assert "nothing" in str(caught.value)


@pytest.mark.parametrize(("command", "processes"), [([], 1), (["true"], 0)])
def test_nothing_cannot_be_launched(command, processes):
    with pytest.raises(ArgumentError, match="nothing to launch"):
        launch(command, processes=processes)


def test_signals_need_the_main_thread():
    caught = []

    def call():
        try:
            launch(["true"])
        except UnsupportedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


@given(
    first=st.floats(0, 100), most=st.floats(0, 1000), jitter=st.floats(0, 1), chance=st.floats(0, 1)
)
def test_pauses_grow_to_their_limit_and_are_never_negative(first, most, jitter, chance):
    backoff = Backoff(first, max(first, most), jitter)
    pauses = [backoff.seconds(restart, chance) for restart in (*range(1, 12), 10_000)]
    assert all(0 <= pause <= backoff.max_seconds for pause in pauses)
    assert pauses == sorted(pauses)
    assert all(
        backoff.seconds(n, 0.0) * (1 - jitter) <= pause for n, pause in enumerate(pauses[:9], 1)
    )


@pytest.mark.parametrize("wrong", [(-1.0, 1.0, 0.5), (2.0, 1.0, 0.5), (1.0, 2.0, 1.5)])
def test_pauses_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ArgumentError, match="invalid backoff"):
        Backoff(*wrong)


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"grace_seconds": -1.0}])
def test_negative_rules_are_refused(wrong):
    with pytest.raises(ArgumentError, match="negative"):
        RestartPolicy(**wrong)


class TestCommand:
    """`xsake launch`, as its user types it."""

    @staticmethod
    def invoke(*words):
        app = typer.Typer()
        app.command(context_settings={"allow_interspersed_args": False})(run_launch)
        return CliRunner().invoke(app, words)

    @pytest.mark.parametrize("mark", [[], ["--"]])
    def test_words_after_the_command_are_its_own(self, mark):
        code = "import sys; print(sys.argv[1:])"
        found = self.invoke("-n", "2", *mark, sys.executable, "-I", "-S", "-c", code, "--processes")
        assert found.exit_code == 0
        assert sorted(found.stdout.splitlines()) == [f"[{n}] ['--processes']" for n in (0, 1)]

    def test_the_exit_code_is_that_of_the_processes(self):
        code = "import sys; sys.exit(7)"
        found = self.invoke("--max-restarts", "0", sys.executable, "-I", "-S", "-c", code)
        assert found.exit_code == 7
        assert "giving up" in found.stderr

    def test_a_command_that_cannot_be_started_is_told(self):
        found = self.invoke("there-is-no-such-program")
        assert found.exit_code == 2
        assert "there-is-no-such-program" in found.stderr
