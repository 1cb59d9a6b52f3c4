"""Reads folders and runs again and again, from one thread, and publishes what is new."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from xsake.server.cache import Cache
from xsake.server.hub import Hub
from xsake.server.registry import Found, Kind, Thing, search
from xsake.server.runs import Run
from xsake.server.settings import Settings

_SEARCH_SECONDS = 5.0  # between two searches for new runs
_MAX_SEARCH_SHARE = 0.05  # of the time: many folders are searched more rarely
_CLIENT_SECONDS = 0.01  # more for each client: updates of hundreds take time of the runs
_PORTION_SECONDS = 0.25  # of a round for runs that are not read to their end
_RESTART_SECONDS = 1.0  # before a thread that has ended is started again
MAX_ROUND_SECONDS = 30.0  # without a finished round: what is shown may be old
_LOG = logging.getLogger(__name__)


class Watcher:
    """Everything that the server knows of folders and runs.

    Args:
        settings: of the server.
        hub: for live updates.
    """

    def __init__(self, settings: Settings, hub: Hub):
        self._settings, self._hub = settings, hub
        self._cache = Cache(settings.cache)
        self.runs: dict[str, Run] = {}
        self._search()
        self._states: dict[str, str] = {}
        self._turns: dict[str, float] = {}
        self._unread: set[str] = set(self.runs)  # of those that were there at the start
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_failures = 0  # rounds that ended with an error, and threads that ended
        self.last_round: float | None = None  # by the monotonic clock

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to read; updates are published in this loop."""
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    async def supervise(self) -> None:
        """Start the thread again whenever it has ended; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_RESTART_SECONDS)
            if self._thread is None or self._thread.is_alive() or self._stopped.is_set():
                continue
            self.num_failures += 1
            _LOG.error("the watcher has ended; it is started again")
            self.start(asyncio.get_running_loop())

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10)
        for run in self.runs.values():
            run.close()
        self._cache.close()

    @property
    def things(self) -> dict[Kind, dict[str, Thing]]:
        """Runs and documents by kind and id."""
        return self.found.things

    @property
    def problem(self) -> str | None:
        """Why what is shown may be missing or old; None if it is neither."""
        if not self.is_started:
            return "not every run has been read yet"
        seconds = time.monotonic() - (self.last_round or 0.0)
        if seconds > MAX_ROUND_SECONDS:
            is_alive = self._thread is not None and self._thread.is_alive()
            state = "hangs" if is_alive else "has ended"
            return f"the watcher {state}: its last round was {seconds:.0f} s ago"
        return None

    @property
    def is_started(self) -> bool:
        """Whether every run has been read once."""
        return self.last_round is not None and not self._unread & self.runs.keys()

    @property
    def pause(self) -> float:
        """Seconds between two rounds: more when many clients follow runs."""
        return max(self._settings.poll_seconds, _CLIENT_SECONDS * len(self._hub))

    def _search(self) -> None:
        begin = time.monotonic()
        self.found: Found = search(self._settings.folders)
        known = self.things["run"]
        for number in [number for number in self.runs if number not in known]:
            self.runs.pop(number).close()
        for number, thing in known.items():
            if number not in self.runs:
                folder = self._cache.index_folder(number)
                self.runs[number] = Run(thing, self._settings.stale_seconds, folder)
        end = time.monotonic()
        self._search_at = end + max(_SEARCH_SECONDS, (end - begin) / _MAX_SEARCH_SHARE)

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause = self.pause
            try:
                # A long file leaves time for requests between its portions.
                pause = 0.001 if self._round() else pause
                self.last_round = time.monotonic()
            except Exception:  # noqa: BLE001 (it is logged, counted, and stale in /ready)
                self.num_failures += 1
                _LOG.exception("a round of the watcher has failed; the next one follows")
            self._stopped.wait(pause)

    def _round(self) -> bool:
        """Read on in all runs; whether some are not read to their end.

        Runs that are come first, so that long files of others do not make them late.
        """
        if time.monotonic() >= self._search_at:
            self._search()
        runs = list(self.runs.values())
        for run in runs:
            if run.is_caught_up:
                self._advance(run)
        # The next round begins with the runs that this one does not come to.
        behind = [run for run in runs if not run.is_caught_up]
        behind.sort(key=lambda run: self._turns.get(run.id, -math.inf))
        end = time.monotonic() + _PORTION_SECONDS
        for run in behind:
            if time.monotonic() > end:
                break
            self._turns[run.id] = time.monotonic()
            self._advance(run)
        return any(not run.is_caught_up and run.problem is None for run in runs)

    def _advance(self, run: Run) -> None:
        """Read on in one run, and publish what is new."""
        lines = run.advance()
        self._unread.discard(run.id)
        state = run.state
        if lines or self._states.get(run.id) != state:
            self._states[run.id] = state
            self._publish(run.id, "update", {"summary": run.summary(), "lines": lines})

    def _publish(self, *event: Any) -> None:
        publish: Callable[..., None] = self._hub.publish
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(publish, *event)
