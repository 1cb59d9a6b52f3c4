"""Digests of token files, compared in the background when a file is first used.

Windows are read in a random order, so the first batches touch nearly every file of a split. To
wait for all digests would delay each start by the time to read the whole data; not to wait at all
would train on damaged tokens first. So a batch waits for the files that it needs, but all batches
together wait for a bounded time. After that, files are compared while training continues, and a
damaged one ends the run at its next batch.
"""

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence

WAIT_SECONDS = 30.0
_MAX_THREADS = 4


class Verifier:
    """Compares files with their digests, each once, when they are first used.

    Args:
        check: raises if the file of a number is damaged.
        wait_seconds: how long `use` may wait in all.
    """

    def __init__(self, check: Callable[[int], None], *, wait_seconds: float = WAIT_SECONDS):
        self._check, self._left = check, wait_seconds
        self._jobs: dict[int, concurrent.futures.Future[None]] = {}
        self._failure: BaseException | None = None
        self._guard = threading.Lock()
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "verify data")

    def use(self, numbers: Sequence[int]) -> None:
        """Begin to compare files that are not known yet, and wait for them while there is time.

        Raises what is wrong with any file that was ever used.

        Args:
            numbers: of the files that are about to be read.
        """
        with self._guard:
            for number in numbers:
                if number not in self._jobs:
                    self._jobs[number] = self._pool.submit(self._run, number)
            waiting = [self._jobs[number] for number in numbers]
        if self._left > 0 and not all(job.done() for job in waiting):
            began = time.monotonic()
            concurrent.futures.wait(waiting, timeout=self._left)
            self._left -= time.monotonic() - began
        if self._failure is not None:
            raise self._failure

    def close(self) -> int:
        """Compare no more files; return how many were used and not compared."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return sum(job.cancelled() for job in self._jobs.values())

    def _run(self, number: int) -> None:
        try:
            self._check(number)
        except Exception as error:  # noqa: BLE001 - raised by the thread that uses the file
            self._failure = self._failure or error
