"""Looks at folders and runs again and again, from one thread, and tells the hub what is new."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from xsake.server.hub import Hub
from xsake.server.registry import Kind, Thing, look
from xsake.server.runs import Run
from xsake.server.settings import Settings

_LOOK_SECONDS = 5.0  # between two looks for new runs
_CLIENT_SECONDS = 0.01  # more for each client: telling hundreds takes time of the runs
_LOG = logging.getLogger(__name__)


class Watcher:
    """Everything that the server knows.

    Args:
        settings: of the server.
        hub: whom to tell.
    """

    def __init__(self, settings: Settings, hub: Hub):
        self._settings, self._hub = settings, hub
        self.things: dict[Kind, dict[str, Thing]] = look(settings.folders)
        self.runs: dict[str, Run] = {}
        self._adopt()
        self._looked = time.monotonic()
        self._states: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_ready = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look; the hub is told in this loop."""
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10)
        for run in self.runs.values():
            run.close()

    @property
    def pause(self) -> float:
        """Seconds between two looks at runs: more when many clients follow them."""
        return max(self._settings.poll_seconds, _CLIENT_SECONDS * len(self._hub))

    def _adopt(self) -> None:
        known = self.things["run"]
        for number in [number for number in self.runs if number not in known]:
            self.runs.pop(number).close()
        for number, thing in known.items():
            if number not in self.runs:
                self.runs[number] = Run(thing, self._settings.stale_seconds)

    def _run(self) -> None:
        while not self._stopped.is_set():
            if time.monotonic() - self._looked >= _LOOK_SECONDS:
                self.things = look(self._settings.folders)
                self._adopt()
                self._looked = time.monotonic()
            is_busy = False
            for run in list(self.runs.values()):
                is_busy |= self._advance(run)
            self.is_ready = True
            # A long file leaves time for requests between its portions.
            self._stopped.wait(0.001 if is_busy else self.pause)

    def _advance(self, run: Run) -> bool:
        """Read on in one run; whether there is more."""
        try:
            lines = run.advance()
        except OSError as error:
            _LOG.debug("run %s cannot be read: %s", run.id, error.strerror)
            return False
        state = run.state
        if lines or self._states.get(run.id) != state:
            self._states[run.id] = state
            self._tell(run.id, "update", {"summary": run.summary(), "lines": lines})
        return not run.is_caught_up

    def _tell(self, *told: Any) -> None:
        publish: Callable[..., None] = self._hub.publish
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(publish, *told)
