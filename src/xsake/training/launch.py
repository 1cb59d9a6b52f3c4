"""Launcher: run the processes of a run on this host and restart all of them when one fails."""

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
from xsake.training.processes import BIND, COORDINATOR, EXIT_FATAL, LOOPBACK, PROCESS, PROCESSES
from xsake.training.stopping import EXIT_RESTART

_POLL_SECONDS = 0.05
_END_SECONDS = 2.0  # for the last lines of output
_MAX_LINE_BYTES = 2**16
# Ends the processes if the launcher is killed. Reads process groups as lines, "+" when one starts
# and "-" when it has ended; the end of the input is the end of the launcher.
_REAPER = """
import os, signal, sys, time
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
def send(number):
    for group in list(groups):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            groups.discard(group)
send(signal.SIGTERM)
end = time.monotonic() + float(sys.argv[1])
while groups and time.monotonic() < end:
    time.sleep(0.1)
    send(0)
send(signal.SIGKILL)
"""


@runtime_checkable
class OutputSink(Protocol):
    """Text stream such as `sys.stdout`."""

    def write(self, text: str, /) -> object:
        """Write some text."""

    def flush(self) -> object:
        """Flush the buffer."""


@dataclass(frozen=True)
class Backoff:
    """Exponential wait before restarts, with jitter.

    Args:
        first_seconds: maximum wait before the first restart.
        max_seconds: maximum wait before any restart.
        jitter: random share of the wait.
    """

    first_seconds: float = 1.0
    max_seconds: float = 60.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        is_ordered = 0 <= self.first_seconds <= self.max_seconds
        if not (is_ordered and 0 <= self.jitter <= 1):
            raise ArgumentError(
                "invalid backoff",
                got=self,
                expected="0 <= first_seconds <= most_seconds, and a jitter from 0 to 1",
            )

    def seconds(self, restart: int, chance: float) -> float:
        """Return the wait before a restart.

        Args:
            restart: number of consecutive restarts, including this one.
            chance: random number from 0 to 1.

        Example:
            >>> [Backoff(1.0, 60.0, 0.0).seconds(restart, 0.3) for restart in (1, 2, 3, 9)]
            [1.0, 2.0, 4.0, 60.0]
        """
        doublings = min(restart - 1, 64)
        longest = min(self.max_seconds, self.first_seconds * 2.0**doublings)
        return longest * (1 - self.jitter * chance)


@dataclass(frozen=True)
class RestartPolicy:
    """Limits and timeouts of restarts.

    Args:
        max_restarts: number of failures after which the next one ends the launch.
        backoff: wait before a restart.
        grace_seconds: time for processes to save and exit after a signal.
        failure_grace_seconds: the same for the remaining processes after a failure.
        reset_failures_after: an attempt of at least this many seconds resets the failure count;
            None: never.
    """

    max_restarts: int = 3
    backoff: Backoff = Backoff()
    grace_seconds: float = 30.0
    failure_grace_seconds: float = 5.0
    reset_failures_after: float | None = None

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or min(self.grace_seconds, self.failure_grace_seconds) < 0:
            raise ArgumentError("limits of restarts must not be negative", got=self)


@dataclass(frozen=True)
class LaunchIO:
    """Streams, environment, clock and random numbers of the launcher; replaced in tests.

    Args:
        out: for the processes' stdout.
        err: for the processes' stderr and the launcher's messages.
        variables: base environment of the processes.
        wait: sleeps for some seconds, or until the event is set.
        chance: returns random numbers from 0 to 1.
    """

    out: OutputSink
    err: OutputSink
    variables: Mapping[str, str]
    wait: Callable[[threading.Event, float], object] = threading.Event.wait
    chance: Callable[[], float] = random.random


def launch(
    command: Sequence[str],
    *,
    processes: int = 1,
    policy: RestartPolicy | None = None,
    io: LaunchIO | None = None,
) -> int:
    """Run a command in several processes until all succeed; return the exit code.

    Each process gets XSAKE_COORDINATOR, XSAKE_PROCESSES and XSAKE_PROCESS. When one fails, all are
    restarted after a wait. Exit code 75 requests a restart and does not count as a failure. Exit
    code 2 ends the launch, as a restart cannot help. SIGINT and SIGTERM are forwarded; a process
    that does not exit in time is killed. A second SIGINT kills immediately.

    Args:
        command: a program and its arguments, without a shell.
        processes: number of processes.
        policy: of restarts.
        io: streams and environment; default: those of this process.

    Returns:
        0 on success, otherwise the code of the first process that failed in the last attempt, as a
        shell reports it: 128 + signal number for a killed process.
    """
    if not command or processes < 1:
        raise ArgumentError(
            "nothing to launch", got=f"{list(command)}, {processes=}", expected="a command"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UnsupportedError("signal handlers need the main thread", fix="call launch there")
    if io is None:
        io = LaunchIO(sys.stdout, sys.stderr, os.environ)
    launcher = _Launcher(command, processes, policy or RestartPolicy(), io)
    with launcher.handle_signals(), launcher.reaper():
        return launcher.run()


class _Launcher:
    def __init__(self, command: Sequence[str], processes: int, policy: RestartPolicy, io: LaunchIO):
        self._command, self._processes = list(command), processes
        self._policy, self._io = policy, io
        self._signals: collections.deque[signal.Signals] = collections.deque()
        self._has_signal = threading.Event()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._reaper: subprocess.Popen[str] | None = None
        self._printer = threading.Lock()
        self._closed: set[OutputSink] = set()
        self._killed: set[int] = set()

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Queue SIGINT and SIGTERM for the loop."""

        def keep(number: int, frame: object) -> None:
            self._signals.append(signal.Signals(number))
            self._has_signal.set()

        before = {name: signal.signal(name, keep) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    @contextlib.contextmanager
    def reaper(self) -> Iterator[None]:
        """Start a process that ends the others if the launcher is killed."""
        grace = str(self._policy.grace_seconds)
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REAPER, grace],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            yield
        finally:
            assert self._reaper.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.close()
            self._reaper.wait()

    def run(self) -> int:
        """Run attempts until success or the limit of failures."""
        policy, failures, restarts = self._policy, 0, 0
        while True:
            began = time.monotonic()
            code = self._run_attempt()
            if code == 0 or self._signals:
                return code
            if code == EXIT_FATAL:
                self._log(f"code {code}: a restart would fail again, giving up")
                return code
            lasted = time.monotonic() - began
            if policy.reset_failures_after is not None and lasted >= policy.reset_failures_after:
                failures = restarts = 0
            failures += code != EXIT_RESTART
            restarts += 1
            if failures > policy.max_restarts:
                self._log(f"giving up: failures: {failures}, max restarts: {policy.max_restarts}")
                return code
            seconds = policy.backoff.seconds(restarts, self._io.chance())
            self._log(f"restarting all in {seconds:.1f} s, failures so far: {failures}")
            self._io.wait(self._has_signal, seconds)
            if self._signals:
                return code

    def _run_attempt(self) -> int:
        """Run all processes once and return the exit code; none is left afterwards."""
        readers: list[threading.Thread] = []
        try:
            port = _free_port()
            for process in range(self._processes):
                readers += self._start(process, port)
            return self._watch()
        finally:
            for rank in self._ranks:
                self._kill_group(rank)
            self._ranks.clear()
            self._killed.clear()
            for reader in readers:
                reader.join(_END_SECONDS)

    def _start(self, process: int, port: int) -> list[threading.Thread]:
        cluster = {
            COORDINATOR: f"{LOOPBACK}:{port}",
            PROCESSES: str(self._processes),
            PROCESS: str(process),
            BIND: LOOPBACK,
        }
        # Python buffers output to a pipe by default.
        variables = {"PYTHONUNBUFFERED": "1", **self._io.variables, **cluster}
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
        self._notify_reaper(f"+{rank.pid}")
        assert rank.stdout is not None and rank.stderr is not None
        streams = ((rank.stdout, self._io.out), (rank.stderr, self._io.err))
        readers = [
            threading.Thread(target=self._forward_lines, args=(process, *pair), daemon=True)
            for pair in streams
        ]
        for reader in readers:
            reader.start()
        return readers

    def _watch(self) -> int:
        """Wait until all processes have exited; end the others after a failure or a signal."""
        failure, is_restart_requested, was_killed = 0, False, False
        deadline, num_forwarded = float("inf"), 0
        living = dict(enumerate(self._ranks))
        while living:
            # One failure causes others: log all that are seen in the same poll.
            had_failure = failure
            for process, rank in [*living.items()]:
                if (code := rank.poll()) is None:
                    continue
                del living[process]
                self._kill_group(rank)
                if code == 0 or was_killed or had_failure:
                    continue
                self._log(f"process {process} {_describe_exit(code)}")
                if code == EXIT_RESTART:
                    is_restart_requested = True
                    deadline = min(deadline, time.monotonic() + self._policy.grace_seconds)
                    continue
                failure = failure or (code if code > 0 else 128 - code)
            if failure and not had_failure and not num_forwarded:
                _send(living, signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + self._policy.failure_grace_seconds)
            for name in [*self._signals][num_forwarded:]:
                num_forwarded += 1
                _send(living, name)
                is_impatient = self._signals.count(signal.SIGINT) > 1
                grace = 0.0 if is_impatient else self._policy.grace_seconds
                deadline = min(deadline, time.monotonic() + grace)
            if living and time.monotonic() >= deadline:
                numbers = ", ".join(map(str, living))
                self._log(f"killing processes that did not exit in time: process {numbers}")
                was_killed, deadline = True, float("inf")
                for rank in living.values():
                    self._kill_group(rank)
            time.sleep(_POLL_SECONDS if living else 0)
        killed = 128 + signal.SIGKILL if was_killed else 0
        return failure or (EXIT_RESTART if is_restart_requested else killed)

    def _kill_group(self, rank: subprocess.Popen[bytes]) -> None:
        """Kill a process and its children; does nothing the second time."""
        if rank.pid in self._killed:
            return
        self._killed.add(rank.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        self._notify_reaper(f"-{rank.pid}")

    def _notify_reaper(self, line: str) -> None:
        assert self._reaper is not None and self._reaper.stdin is not None
        try:
            self._reaper.stdin.write(line + "\n")
            self._reaper.stdin.flush()
        except BrokenPipeError:
            self._log("the reaper process has exited: processes survive a killed launcher")

    def _forward_lines(self, process: int, stream: IO[bytes], sink: OutputSink) -> None:
        with stream:
            while line := stream.readline(_MAX_LINE_BYTES):
                self._print(sink, f"[{process}] {line.decode(errors='replace')}")

    def _log(self, text: str) -> None:
        self._print(self._io.err, f"[launch] {text}")

    def _print(self, sink: OutputSink, line: str) -> None:
        """Write whole lines; a closed sink is ignored, so that processes can keep writing."""
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


def _describe_exit(code: int) -> str:
    if code == EXIT_RESTART:
        return f"requests a restart, code {code}"
    if code < 0:
        return f"was killed by signal {-code}, {signal.strsignal(-code)}"
    return f"failed with code {code}"


def _free_port() -> int:
    """Return a port that is free now; the next attempt uses another one if it gets taken."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
