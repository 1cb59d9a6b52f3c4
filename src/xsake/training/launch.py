"""Launcher: run the processes of a run on this host and restart all of them when one fails."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from xsake.errors import ArgumentError, UnsupportedError
from xsake.training.preemption import EXIT_RESTART
from xsake.training.processes import BIND, COORDINATOR, EXIT_FATAL, LOOPBACK, PROCESS, PROCESSES

_POLL_SECONDS = 0.05
_END_SECONDS = 2.0  # for the last lines of output
_MAX_LINE_BYTES = 2**16
# Ends a process group if the launcher is killed: its input ends with the launcher.
_REAPER = """
import os, signal, sys, time
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
sys.stdin.read()
group, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
try:
    os.killpg(group, signal.SIGTERM)
    while time.monotonic() < end:
        time.sleep(0.1)
        os.killpg(group, 0)
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


@dataclass(frozen=True)
class RestartPolicy:
    """Limits and timeouts of restarts.

    Args:
        max_restarts: number of failures after which the next one ends the launch.
        backoff_seconds: maximum wait before the first restart; it doubles with each restart.
        max_backoff_seconds: maximum wait before any restart.
        grace_seconds: time for processes to save and exit after a signal.
        failure_grace_seconds: the same for the remaining processes after a failure.
        reset_failures_after: an attempt of at least this many seconds resets the failure count;
            None: never.
    """

    max_restarts: int = 3
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    grace_seconds: float = 30.0
    failure_grace_seconds: float = 5.0
    reset_failures_after: float | None = None

    def __post_init__(self) -> None:
        if min(value for value in vars(self).values() if value is not None) < 0:
            raise ArgumentError(
                "restart-limits", "limits of restarts must not be negative", got=self
            )

    def wait_seconds(self, restart: int) -> float:
        """Return the wait before the n-th consecutive restart, half of it random."""
        longest = min(self.max_backoff_seconds, self.backoff_seconds * 2.0 ** min(restart - 1, 64))
        return longest * random.uniform(0.5, 1.0)


def launch(
    command: Sequence[str], *, processes: int = 1, policy: RestartPolicy | None = None
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

    Returns:
        0 on success, otherwise the code of the first process that failed in the last attempt, as a
        shell reports it: 128 + signal number for a killed process.
    """
    if not command or processes < 1:
        got = f"{list(command)}, {processes=}"
        raise ArgumentError("no-command", "nothing to launch", got=got, expected="a command")
    if threading.current_thread() is not threading.main_thread():
        raise UnsupportedError(
            "launch-thread", "signal handlers need the main thread", fix="call launch there"
        )
    launcher = _Launcher(list(command), processes, policy or RestartPolicy())
    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.signal(name, launcher.handle_signal) for name in names}
    try:
        return launcher.run()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class _Launcher:
    def __init__(self, command: Sequence[str], processes: int, policy: RestartPolicy):
        self.command, self.processes, self.policy = command, processes, policy
        self._signals: list[int] = []
        self._has_signal, self._printer = threading.Event(), threading.Lock()
        self._closed: set[object] = set()

    def handle_signal(self, number: int, frame: object) -> None:
        """Queue a signal for the loop."""
        self._signals.append(number)
        self._has_signal.set()

    def run(self) -> int:
        """Run attempts until success or the limit of failures."""
        policy, failures, restarts = self.policy, 0, 0
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
            failures, restarts = failures + (code != EXIT_RESTART), restarts + 1
            if failures > policy.max_restarts:
                self._log(f"giving up: failures: {failures}, max restarts: {policy.max_restarts}")
                return code
            seconds = policy.wait_seconds(restarts)
            self._log(f"restarting all in {seconds:.1f} s, failures so far: {failures}")
            if self._has_signal.wait(seconds):
                return code

    def _run_attempt(self) -> int:
        """Run all processes once, in one group, and return the exit code; none is left."""
        ranks: list[subprocess.Popen[bytes]] = []
        readers: list[threading.Thread] = []
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))  # a free port; the next attempt uses another one
            address = f"{LOOPBACK}:{probe.getsockname()[1]}"
        with contextlib.ExitStack() as cleanup:
            try:
                for process in range(self.processes):
                    rank = self._start(process, address, group=ranks[0].pid if ranks else 0)
                    ranks.append(rank)
                    if process == 0:
                        cleanup.enter_context(self._reaper(rank.pid))
                    for pair in ((rank.stdout, sys.stdout), (rank.stderr, sys.stderr)):
                        arguments = (process, *pair)
                        readers.append(threading.Thread(target=self._forward_lines, args=arguments))
                        readers[-1].daemon = True
                        readers[-1].start()
                return self._watch(ranks)
            finally:
                _kill_group(ranks)
                for reader in readers:
                    reader.join(_END_SECONDS)

    def _start(self, process: int, address: str, *, group: int) -> subprocess.Popen[bytes]:
        cluster = {COORDINATOR: address, PROCESSES: str(self.processes), PROCESS: str(process)}
        # Python buffers output to a pipe by default.
        variables = {"PYTHONUNBUFFERED": "1", **os.environ, **cluster, BIND: LOOPBACK}
        try:
            return subprocess.Popen(
                self.command, env=variables, process_group=group,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            what, got = "the command cannot be started", f"{self.command[0]}: {error.strerror}"
            raise ArgumentError("command-start", what, got=got, expected="a program") from error

    @contextlib.contextmanager
    def _reaper(self, group: int) -> Iterator[None]:
        """Start a process that ends a group if the launcher is killed."""
        command = [sys.executable, "-I", "-S", "-c", _REAPER, str(group)]
        with subprocess.Popen(
            [*command, str(self.policy.grace_seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as reaper:  # fmt: skip
            try:
                yield
            finally:
                reaper.kill()

    def _watch(self, ranks: Sequence[subprocess.Popen[bytes]]) -> int:
        """Wait until all processes have exited; end the others after a failure or a signal."""
        failure, is_restart_requested, was_killed = 0, False, False
        deadline, num_forwarded = float("inf"), 0
        living = dict(enumerate(ranks))
        while living:
            # One failure causes others: log all that are seen in the same poll.
            had_failure = failure
            for process, rank in [*living.items()]:
                if (code := rank.poll()) is None:
                    continue
                del living[process]
                if code == 0 or was_killed or had_failure:
                    continue
                self._log(f"process {process} {_describe_exit(code)}")
                if code == EXIT_RESTART:
                    is_restart_requested = True
                    deadline = min(deadline, time.monotonic() + self.policy.grace_seconds)
                    continue
                failure = failure or (code if code > 0 else 128 - code)
            if failure and not had_failure and not num_forwarded:
                _send(living, signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + self.policy.failure_grace_seconds)
            for number in self._signals[num_forwarded:]:
                num_forwarded += 1
                _send(living, number)
                is_impatient = self._signals.count(signal.SIGINT) > 1
                grace = 0.0 if is_impatient else self.policy.grace_seconds
                deadline = min(deadline, time.monotonic() + grace)
            if living and time.monotonic() >= deadline:
                numbers = ", ".join(map(str, living))
                self._log(f"killing processes that did not exit in time: process {numbers}")
                was_killed, deadline = True, float("inf")
                _send(living, signal.SIGKILL)
            time.sleep(_POLL_SECONDS if living else 0)
        killed = 128 + signal.SIGKILL if was_killed else 0
        return failure or (EXIT_RESTART if is_restart_requested else killed)

    def _forward_lines(self, process: int, stream: IO[bytes], sink: Any) -> None:
        with stream:
            while line := stream.readline(_MAX_LINE_BYTES):
                self._print(sink, f"[{process}] {line.decode(errors='replace')}")

    def _log(self, text: str) -> None:
        self._print(sys.stderr, f"[launch] {text}")

    def _print(self, sink: Any, line: str) -> None:
        """Write whole lines; a closed sink is ignored, so that processes can keep writing."""
        with self._printer, contextlib.suppress(OSError, ValueError):
            if sink not in self._closed:
                self._closed.add(sink)
                sink.write(line if line.endswith("\n") else line + "\n")
                sink.flush()
                self._closed.remove(sink)


def _send(living: Mapping[int, subprocess.Popen[bytes]], number: int) -> None:
    for rank in living.values():
        rank.send_signal(number)


def _kill_group(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill all processes of an attempt and their children."""
    for rank in ranks[:1]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _describe_exit(code: int) -> str:
    if code == EXIT_RESTART:
        return f"requests a restart, code {code}"
    if code < 0:
        return f"was killed by signal {-code}, {signal.strsignal(-code)}"
    return f"failed with code {code}"
