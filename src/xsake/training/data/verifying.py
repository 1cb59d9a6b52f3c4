"""Verification of token files in the background on first use.

Windows are read in random order, so the first batches touch nearly every file of a split. Waiting
for all digests would delay each start by the time to read all data; not waiting would train on
damaged tokens. So a batch waits for the files it needs, but all batches together wait for a
bounded time. Afterwards files are verified while training continues, and a damaged one ends the
run at its next batch.
"""

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence

WAIT_SECONDS = 30.0
_MAX_THREADS = 4


class Verifier:
    """Verification of files, each once, on first use.

    Args:
        check: raises if the file of a number is damaged.
        wait_seconds: total time that `use` may wait.
    """

    def __init__(self, check: Callable[[int], None], *, wait_seconds: float = WAIT_SECONDS):
        self._check, self._left = check, wait_seconds
        self._jobs: dict[int, concurrent.futures.Future[None]] = {}
        self._failure: BaseException | None = None
        self._guard = threading.Lock()
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "verify data")

    def use(self, numbers: Sequence[int]) -> None:
        """Start to verify new files, and wait for them while time is left.

        Raises the error of any file used so far.

        Args:
            numbers: of the files to read.
        """
        with self._guard:
            for number in numbers:
                if number not in self._jobs:
                    self._jobs[number] = self._pool.submit(self._run, number)
            waiting = [self._jobs[number] for number in numbers]
        if self._left > 0 and not all(job.done() for job in waiting):
            started = time.monotonic()
            concurrent.futures.wait(waiting, timeout=self._left)
            self._left -= time.monotonic() - started
        if self._failure is not None:
            raise self._failure

    def close(self) -> int:
        """Stop verifying; return the number of files that were used but not verified."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return sum(job.cancelled() for job in self._jobs.values())

    def _run(self, number: int) -> None:
        try:
            self._check(number)
        except Exception as error:  # noqa: BLE001 - raised by the thread that uses the file
            self._failure = self._failure or error
