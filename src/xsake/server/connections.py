"""How the server listens: connections that send nothing, or little by little, are closed.

uvicorn has no timeout for the headers of a request, and its limit of connections counts those that
wait, so idle ones would lock all others out. Here only requests that are being answered count
towards a limit (see `guard`); of the connections that wait for a request, the oldest makes room.
"""

import resource
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from xsake.server.app import Dashboard
from xsake.server.settings import Settings

_STALLED_SECONDS = 60.0  # without a byte of an answer being taken
_MAX_HEADERS = 16384  # bytes
_BACKLOG = 2048  # connections that the kernel holds until they are accepted: more wait a second
_MIN_FILES = 4096  # open at once: all of them may be accepted before the oldest are closed


class WaitingRoom:
    """Connections that have not sent a whole request yet, the oldest first.

    Args:
        max_waiting: connections of all addresses.
        max_waiting_per_address: of one address, trusted proxies aside.
        trusted: addresses of proxies, behind which many people have one address.
    """

    def __init__(self, max_waiting: int, max_waiting_per_address: int, trusted: Any):
        self._max, self._max_per_address = max_waiting, max_waiting_per_address
        self._trusted = trusted
        self._waiting: dict[H11Protocol, str] = {}
        self._by_address: Counter[str] = Counter()
        self.num_closed = 0

    def enter(self, connection: H11Protocol, address: str) -> None:
        """Let a connection wait; if there are too many, the oldest is closed."""
        self._waiting[connection] = address
        self._by_address[address] += 1
        is_crowd = self._by_address[address] > self._max_per_address
        if is_crowd and address not in self._trusted:
            self._close(next(x for x, other in self._waiting.items() if other == address))
        elif len(self._waiting) > self._max:
            self._close(next(iter(self._waiting)))

    def leave(self, connection: H11Protocol) -> None:
        """A connection has sent a request, or is closed."""
        address = self._waiting.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _close(self, connection: H11Protocol) -> None:
        self.leave(connection)
        self.num_closed += 1
        connection.transport.abort()


def make_config(dashboard: Dashboard, settings: Settings) -> uvicorn.Config:
    """Return the configuration of a uvicorn server.

    Args:
        dashboard: that answers.
        settings: of the server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_FILES:  # -1: there are no limits
        wished = _MIN_FILES if hard < 0 else min(_MIN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wished, hard))
    room = WaitingRoom(settings.max_waiting, settings.max_waiting_per_address, settings.proxies)

    class Protocol(BoundedProtocol):
        waiting_room, header_seconds = room, settings.header_seconds

    return uvicorn.Config(
        dashboard, host=settings.host, port=settings.port, log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=3, backlog=_BACKLOG,
        h11_max_incomplete_event_size=_MAX_HEADERS, ws="none", http=Protocol,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )  # fmt: skip


class BoundedProtocol(H11Protocol):
    """A connection of uvicorn with limits on how long it may wait for a request or a reader."""

    waiting_room: WaitingRoom
    header_seconds: float
    _header_timer: Any = None  # of the event loop, whichever it is
    _stalled_timer: Any = None

    def connection_made(self, transport: Any) -> None:
        """Expect a request from now on."""
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._stop_expecting()
        self.resume_writing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Use what was received; the time for headers ends when all of them are there."""
        super().handle_events()
        if self._is_answering:
            self._stop_expecting()

    def on_response_complete(self) -> None:
        """Expect the rest of a body that was not needed, and the next request."""
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_answering:
            self._expect_request()

    def pause_writing(self) -> None:
        """The client does not take an answer; live updates may be slow, they are counted."""
        super().pause_writing()
        is_stream = self.scope is not None and self.scope["path"].endswith("/events")
        if self._stalled_timer is None and not is_stream:
            self._stalled_timer = self.loop.call_later(_STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client takes the answer again."""
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        self._stop_expecting()
        self.waiting_room.enter(self, self.client[0] if self.client else "")
        self._header_timer = self.loop.call_later(self.header_seconds, self._give_up)

    def _stop_expecting(self) -> None:
        self.waiting_room.leave(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self.waiting_room.num_closed += 1
        self.transport.abort()
