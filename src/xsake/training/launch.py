"""Runs the processes of a run on this machine, starts them all again when one dies, leaves none."""

import collections
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, runtime_checkable

from xsake.errors import ArgumentError, UnsupportedError
from xsake.training.processes import BIND, CANNOT_RUN, COORDINATOR, LOOPBACK, PROCESS, PROCESSES
from xsake.training.stopping import RESTART_ME

_POLL_SECONDS = 0.05
_END_SECONDS = 2.0  # for the last lines of output, after which nobody is left to write any
_MOST_LINE_BYTES = 2**16
# Outlives us by some seconds if we are killed, and takes the processes along. Their groups come
# as lines, "+" when one starts and "-" when it is over; the end of the lines is the end of us.
_WATCHMAN = """
import os, signal, sys, time
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
def tell(number):
    for group in list(groups):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            groups.discard(group)
tell(signal.SIGTERM)
end = time.monotonic() + float(sys.argv[1])
while groups and time.monotonic() < end:
    time.sleep(0.1)
    tell(0)
tell(signal.SIGKILL)
"""


@runtime_checkable
class Sink(Protocol):
    """Takes lines, as `sys.stdout` does."""

    def write(self, text: str, /) -> object:
        """Take some text."""

    def flush(self) -> object:
        """Pass on what was taken."""


@dataclass(frozen=True)
class Backoff:
    """How long to wait before a restart: longer each time, and not at the same time everywhere.

    Args:
        first_seconds: before the first restart, at most.
        most_seconds: before any restart.
        jitter: share of the wait that is drawn by chance.
    """

    first_seconds: float = 1.0
    most_seconds: float = 60.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        is_ordered = 0 <= self.first_seconds <= self.most_seconds
        if not (is_ordered and 0 <= self.jitter <= 1):
            raise ArgumentError(
                "such waits before restarts make no sense",
                got=self,
                expected="0 <= first_seconds <= most_seconds, and a jitter from 0 to 1",
            )

    def seconds(self, restart: int, chance: float) -> float:
        """The wait before a restart.

        Args:
            restart: how many there were in a row, this one included.
            chance: drawn from 0 to 1.

        Example:
            >>> [Backoff(1.0, 60.0, 0.0).seconds(restart, 0.3) for restart in (1, 2, 3, 9)]
            [1.0, 2.0, 4.0, 60.0]
        """
        doublings = min(restart - 1, 64)
        longest = min(self.most_seconds, self.first_seconds * 2.0**doublings)
        return longest * (1 - self.jitter * chance)


@dataclass(frozen=True)
class Rules:
    """When to start again, and when to give up.

    Args:
        most_restarts: after so many failures in all, the next one is the last.
        backoff: how long to wait before a restart.
        grace_seconds: how long processes may take to save and end when they are asked to.
        failure_grace_seconds: the same for those that are left when another has failed.
        healthy_seconds: a life that lasted so long makes up for all failures before it; None:
            nothing does.
    """

    most_restarts: int = 3
    backoff: Backoff = Backoff()
    grace_seconds: float = 30.0
    failure_grace_seconds: float = 5.0
    healthy_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.most_restarts < 0 or min(self.grace_seconds, self.failure_grace_seconds) < 0:
            raise ArgumentError("rules of restarts cannot be negative", got=self)


@dataclass(frozen=True)
class Surroundings:
    """What the launcher needs of the world; tests bring their own.

    Args:
        out: where lines of the processes' stdout go.
        err: where lines of their stderr and our own words go.
        variables: the environment, to which ours are added.
        wait: sleeps for some seconds, or less if the event is set.
        chance: draws from 0 to 1.
    """

    out: Sink
    err: Sink
    variables: Mapping[str, str]
    wait: Callable[[threading.Event, float], object] = threading.Event.wait
    chance: Callable[[], float] = random.random


def launch(
    command: Sequence[str],
    *,
    processes: int = 1,
    rules: Rules | None = None,
    surroundings: Surroundings | None = None,
) -> int:
    """Run a command in so many processes until all of them end well; the exit code.

    Each finds its place in XSAKE_COORDINATOR, XSAKE_PROCESSES and XSAKE_PROCESS. When one fails,
    all are started again, after a pause; code 75 asks for that and does not count as a failure,
    and code 2 ends the launch, as a restart cannot help. SIGINT and SIGTERM are passed on, and a
    process that does not end in time is killed; a second SIGINT kills at once.

    Args:
        command: a program and its arguments; there is no shell.
        processes: how many.
        rules: of restarts.
        surroundings: streams and environment; default: this process's own.

    Returns:
        0 if all ended well, else the code of the first process that failed in the last life, as
        a shell would tell it: 128 and the number of the signal for one that was killed.
    """
    if not command or processes < 1:
        raise ArgumentError(
            "nothing to launch", got=f"{list(command)}, {processes=}", expected="a command"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UnsupportedError(
            "signals come to the main thread only", fix="call launch in the main thread"
        )
    if surroundings is None:
        surroundings = Surroundings(sys.stdout, sys.stderr, os.environ)
    launcher = _Launcher(command, processes, rules or Rules(), surroundings)
    with launcher.listening(), launcher.watched():
        return launcher.run()


class _Launcher:
    def __init__(
        self, command: Sequence[str], processes: int, rules: Rules, surroundings: Surroundings
    ):
        self._command, self._processes = list(command), processes
        self._rules, self._surroundings = rules, surroundings
        self._asked: collections.deque[signal.Signals] = collections.deque()
        self._is_asked = threading.Event()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._watchman: subprocess.Popen[str] | None = None
        self._printer = threading.Lock()
        self._closed: set[Sink] = set()
        self._buried: set[int] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """SIGINT and SIGTERM are kept for the loop to see."""

        def keep(number: int, frame: object) -> None:
            self._asked.append(signal.Signals(number))
            self._is_asked.set()

        before = {name: signal.signal(name, keep) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Another process ends ours should we be killed."""
        grace = str(self._rules.grace_seconds)
        self._watchman = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHMAN, grace],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            yield
        finally:
            assert self._watchman.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._watchman.stdin.close()
            self._watchman.wait()

    def run(self) -> int:
        """Lives, one after the other."""
        rules, failures, restarts = self._rules, 0, 0
        while True:
            began = time.monotonic()
            code = self._live()
            if code == 0 or self._asked:
                return code
            if code == CANNOT_RUN:
                self._say(f"code {code}: the same command would be refused again, giving up")
                return code
            lasted = time.monotonic() - began
            if rules.healthy_seconds is not None and lasted >= rules.healthy_seconds:
                failures = restarts = 0
            failures += code != RESTART_ME
            restarts += 1
            if failures > rules.most_restarts:
                self._say(f"giving up: failures: {failures}, most restarts: {rules.most_restarts}")
                return code
            seconds = rules.backoff.seconds(restarts, self._surroundings.chance())
            self._say(f"starting all again in {seconds:.1f} s, failures so far: {failures}")
            self._surroundings.wait(self._is_asked, seconds)
            if self._asked:
                return code

    def _live(self) -> int:
        """One life of all processes; its exit code. None is left when it returns."""
        readers: list[threading.Thread] = []
        try:
            port = _free_port()
            for process in range(self._processes):
                readers += self._start(process, port)
            return self._watch()
        finally:
            for rank in self._ranks:
                self._bury(rank)
            self._ranks.clear()
            self._buried.clear()
            for reader in readers:
                reader.join(_END_SECONDS)

    def _start(self, process: int, port: int) -> list[threading.Thread]:
        places = {
            COORDINATOR: f"{LOOPBACK}:{port}",
            PROCESSES: str(self._processes),
            PROCESS: str(process),
            BIND: LOOPBACK,
        }
        # Python holds lines back if they go into a pipe, unless it is told otherwise.
        variables = {"PYTHONUNBUFFERED": "1", **self._surroundings.variables, **places}
        try:
            rank = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=variables, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ArgumentError(
                "the command cannot be started",
                got=f"{self._command[0]}: {error.strerror}",
                expected="a program",
            ) from error
        self._ranks.append(rank)
        self._tell_watchman(f"+{rank.pid}")
        assert rank.stdout is not None and rank.stderr is not None
        streams = ((rank.stdout, self._surroundings.out), (rank.stderr, self._surroundings.err))
        readers = [
            threading.Thread(target=self._pass_on, args=(process, *pair), daemon=True)
            for pair in streams
        ]
        for reader in readers:
            reader.start()
        return readers

    def _watch(self) -> int:
        """Wait until all processes have ended, or until those that are left have to."""
        failure, is_restart_wanted, was_killed = 0, False, False
        deadline, told = float("inf"), 0
        living = dict(enumerate(self._ranks))
        while living:
            # Who fails drags others along: all that are found failed at once are told.
            known = failure
            for process, rank in [*living.items()]:
                if (code := rank.poll()) is None:
                    continue
                del living[process]
                self._bury(rank)
                if code == 0 or was_killed or known:
                    continue
                self._say(f"process {process} {_ending(code)}")
                if code == RESTART_ME:
                    is_restart_wanted = True
                    deadline = min(deadline, time.monotonic() + self._rules.grace_seconds)
                    continue
                failure = failure or (code if code > 0 else 128 - code)
            if failure and not known and not told:
                _send(living, signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + self._rules.failure_grace_seconds)
            for name in [*self._asked][told:]:
                told += 1
                _send(living, name)
                is_impatient = self._asked.count(signal.SIGINT) > 1
                grace = 0.0 if is_impatient else self._rules.grace_seconds
                deadline = min(deadline, time.monotonic() + grace)
            if living and time.monotonic() >= deadline:
                numbers = ", ".join(map(str, living))
                self._say(f"killing what did not end in time: process {numbers}")
                was_killed, deadline = True, float("inf")
                for rank in living.values():
                    self._bury(rank)
            time.sleep(_POLL_SECONDS if living else 0)
        killed = 128 + signal.SIGKILL if was_killed else 0
        return failure or (RESTART_ME if is_restart_wanted else killed)

    def _bury(self, rank: subprocess.Popen[bytes]) -> None:
        """End a process and whatever it started; nothing happens to one that is over."""
        if rank.pid in self._buried:
            return
        self._buried.add(rank.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        self._tell_watchman(f"-{rank.pid}")

    def _tell_watchman(self, line: str) -> None:
        assert self._watchman is not None and self._watchman.stdin is not None
        try:
            self._watchman.stdin.write(line + "\n")
            self._watchman.stdin.flush()
        except BrokenPipeError:
            self._say("the process that ends the others if this one is killed is gone")

    def _pass_on(self, process: int, stream: IO[bytes], sink: Sink) -> None:
        with stream:
            while line := stream.readline(_MOST_LINE_BYTES):
                self._print(sink, f"[{process}] {line.decode(errors='replace')}")

    def _say(self, words: str) -> None:
        self._print(self._surroundings.err, f"[launch] {words}")

    def _print(self, sink: Sink, line: str) -> None:
        """Lines stay whole; a sink that is closed takes none, but processes may go on writing."""
        with self._printer:
            if sink in self._closed:
                return
            try:
                sink.write(line if line.endswith("\n") else line + "\n")
                sink.flush()
            except (OSError, ValueError):
                self._closed.add(sink)


def _send(living: Mapping[int, subprocess.Popen[bytes]], name: signal.Signals) -> None:
    for rank in living.values():
        rank.send_signal(name)


def _ending(code: int) -> str:
    if code == RESTART_ME:
        return f"asks for a restart, code {code}"
    if code < 0:
        return f"was ended by signal {-code}, {signal.strsignal(-code)}"
    return f"failed with code {code}"


def _free_port() -> int:
    """A port that is free now; should another take it first, the next life asks for another."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
