"""Poll folders and runs from one thread and publish updates."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from xsake.server.cache import IndexCache
from xsake.server.hub import Broadcaster
from xsake.server.registry import Artifact, ArtifactType, ScanResult, scan
from xsake.server.runs import Run
from xsake.server.settings import ServerSettings

_SCAN_INTERVAL_SECONDS = 5.0  # between two scans for new runs
_MAX_SCAN_SHARE = 0.05  # of the time: large trees are scanned less often
_CLIENT_SECONDS = 0.01  # added per client: updates of many clients cost CPU time
_BACKLOG_SECONDS = 0.25  # per round for runs with unread lines
_RESTART_SECONDS = 1.0  # delay before a dead thread is restarted
MAX_ROUND_SECONDS = 30.0  # without a finished round, data counts as stale
_LOG = logging.getLogger(__name__)


class Poller:
    """Poll folders and runs in a background thread.

    Args:
        settings: of the server.
        broadcaster: for live updates.
    """

    def __init__(self, settings: ServerSettings, broadcaster: Broadcaster):
        self._settings, self._broadcaster = settings, broadcaster
        self._cache = IndexCache(settings.cache)
        self.runs: dict[str, Run] = {}
        self._scan()
        self._states: dict[str, str] = {}
        self._last_read: dict[str, float] = {}
        self._unread: set[str] = set(self.runs)  # of the initial scan
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_failures = 0  # failed rounds and dead threads
        self.last_round: float | None = None  # time.monotonic()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; updates are published in this event loop."""
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    async def supervise(self) -> None:
        """Restart the thread whenever it dies; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_RESTART_SECONDS)
            if self._thread is None or self._thread.is_alive() or self._stopped.is_set():
                continue
            self.num_failures += 1
            _LOG.error("the poller thread died and is restarted")
            self.start(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop the thread and close all runs."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10)
        for run in self.runs.values():
            run.close()
        self._cache.close()

    @property
    def artifacts(self) -> dict[ArtifactType, dict[str, Artifact]]:
        """Runs and documents by type and id."""
        return self.scanned.artifacts

    @property
    def problem(self) -> str | None:
        """Why data may be missing or stale; None if it is current."""
        if not self.is_started:
            return "the first poll of all runs is not finished"
        seconds = time.monotonic() - (self.last_round or 0.0)
        if seconds > MAX_ROUND_SECONDS:
            is_alive = self._thread is not None and self._thread.is_alive()
            state = "hangs" if is_alive else "has died"
            return f"the poller {state}: its last round was {seconds:.0f} s ago"
        return None

    @property
    def is_started(self) -> bool:
        """Whether every run has been read once."""
        return self.last_round is not None and not self._unread & self.runs.keys()

    @property
    def pause(self) -> float:
        """Seconds between two rounds; grows with the number of clients."""
        return max(self._settings.poll_seconds, _CLIENT_SECONDS * len(self._broadcaster))

    def _scan(self) -> None:
        begin = time.monotonic()
        self.scanned: ScanResult = scan(self._settings.folders)
        current = self.artifacts["run"]
        for run_id in [run_id for run_id in self.runs if run_id not in current]:
            self.runs.pop(run_id).close()
        for run_id, artifact in current.items():
            if run_id not in self.runs:
                folder = self._cache.index_folder(run_id)
                self.runs[run_id] = Run(artifact, self._settings.stale_seconds, folder)
        end = time.monotonic()
        self._scan_at = end + max(_SCAN_INTERVAL_SECONDS, (end - begin) / _MAX_SCAN_SHARE)

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause = self.pause
            try:
                # Short pauses while reading a backlog leave time for requests.
                pause = 0.001 if self._poll_once() else pause
                self.last_round = time.monotonic()
            except Exception:  # noqa: BLE001 (logged, counted, and stale in /ready)
                self.num_failures += 1
                _LOG.exception("a polling round failed; retrying")
            self._stopped.wait(pause)

    def _poll_once(self) -> bool:
        """Read new lines of all runs; return whether some have unread lines.

        Caught-up runs come first, so that long files of others do not delay them.
        """
        if time.monotonic() >= self._scan_at:
            self._scan()
        runs = list(self.runs.values())
        for run in runs:
            if run.is_caught_up:
                self._advance(run)
        # The next round starts with the least recently read runs.
        behind = [run for run in runs if not run.is_caught_up]
        behind.sort(key=lambda run: self._last_read.get(run.id, -math.inf))
        end = time.monotonic() + _BACKLOG_SECONDS
        for run in behind:
            if time.monotonic() > end:
                break
            self._last_read[run.id] = time.monotonic()
            self._advance(run)
        return any(not run.is_caught_up and run.problem is None for run in runs)

    def _advance(self, run: Run) -> None:
        """Read new lines of one run and publish them."""
        lines = run.advance()
        self._unread.discard(run.id)
        state = run.state
        if lines or self._states.get(run.id) != state:
            self._states[run.id] = state
            self._publish(run.id, "update", {"summary": run.summary(), "lines": lines})

    def _publish(self, *event: Any) -> None:
        publish: Callable[..., None] = self._broadcaster.publish
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(publish, *event)
