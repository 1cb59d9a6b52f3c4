"""Processes of a run: what they say, how to wait for them, how to end them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.results import FaultError
from xsake.training.processes import PROCESS

PATIENCE = 600.0  # seconds until something counts as never happening; busy machines are slow


@dataclass(frozen=True)
class Ended:
    """A run that is over.

    Args:
        code: its exit code.
        text: what it has said.
    """

    code: int
    text: str


@dataclass(frozen=True)
class Started:
    """A process of a run.

    Args:
        process: itself.
        log: what it says goes there.
        begin: where its own words begin.
    """

    process: subprocess.Popen[bytes]
    log: Path
    begin: int

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_bytes()[self.begin :].decode(errors="replace")

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def until(self, is_so: Callable[[], object], what: str) -> None:
        """Wait for something that the run does; it may not end before."""

        def looked() -> bool:
            if is_so():
                return True
            if self.is_over:
                raise FaultError(f"ended before: {what}\n{self.text[-1500:]}")
            return False

        wait_until(looked, what)

    def ended(self, code: int | None = None) -> float:
        """Wait for its end; how long that took, in seconds.

        Args:
            code: that it must end with; None: whichever.
        """
        begin = time.monotonic()
        found = self.process.wait(PATIENCE)
        if code is not None and found != code:
            raise FaultError(f"exit code {found}, not {code}\n{self.text[-1500:]}")
        return time.monotonic() - begin

    def ranks(self) -> dict[int, int]:
        """Under `xsake launch`: the processes that train, by their numbers."""
        return ranks_of(self.process.pid)

    def all_ranks(self, processes: int, other_than: Mapping[int, int] | None = None):
        """Wait until this many processes train.

        Args:
            processes: how many.
            other_than: those of an earlier life.
        """
        old = set((other_than or {}).values())
        found: dict[int, int] = {}

        def are_there() -> bool:
            found.clear()
            found.update({rank: pid for rank, pid in self.ranks().items() if pid not in old})
            return len(found) == processes

        self.until(are_there, f"{processes} processes")
        return found


def ranks_of(launcher: int) -> dict[int, int]:
    """Children of a launcher that have a place in the run, by their numbers."""
    found = {}
    for thread in Path(f"/proc/{launcher}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, thread.read_text().split()):
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                begin = f"{PROCESS}=".encode()
                for word in words:
                    if word.startswith(begin):
                        found[int(word.removeprefix(begin))] = child
    return found


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_until(is_so: Callable[[], object], what: str, pause: float = 0.005) -> float:
    """Wait for something; how long it took, in seconds."""
    begin = time.monotonic()
    while not is_so():
        if time.monotonic() - begin > PATIENCE:
            raise FaultError(f"never came: {what}")
        time.sleep(pause)
    return time.monotonic() - begin


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal; when, by the clock that never jumps."""
    os.kill(pid, number)
    return time.monotonic()


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill its group after 40 s."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
