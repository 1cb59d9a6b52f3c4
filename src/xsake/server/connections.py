"""Connection limits: idle and slow connections are closed.

uvicorn has no timeout for request headers, and its connection limit includes idle connections, so
that they could lock out others. Here only active requests count towards a limit (see `guard`); of
the connections without a complete request, the oldest is closed first.
"""

import resource
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from xsake.server.app import Dashboard
from xsake.server.settings import ServerSettings

_STALLED_SECONDS = 60.0  # without progress of a response
_MAX_HEADERS = 16384  # bytes
_BACKLOG = 2048  # connections queued by the kernel
_MIN_FILES = 4096  # open files: all may be accepted before the oldest are closed


class PendingConnections:
    """Connections without a complete request, oldest first.

    Args:
        max_waiting: maximum over all addresses.
        max_waiting_per_address: maximum per address, trusted proxies excluded.
        trusted: addresses of proxies, which many clients share.
    """

    def __init__(self, max_waiting: int, max_waiting_per_address: int, trusted: Any):
        self._max, self._max_per_address = max_waiting, max_waiting_per_address
        self._trusted = trusted
        self._waiting: dict[H11Protocol, str] = {}
        self._by_address: Counter[str] = Counter()
        self.num_closed = 0

    def add(self, connection: H11Protocol, address: str) -> None:
        """Add a connection; close the oldest if there are too many."""
        self._waiting[connection] = address
        self._by_address[address] += 1
        is_crowd = self._by_address[address] > self._max_per_address
        if is_crowd and address not in self._trusted:
            self._close(next(x for x, other in self._waiting.items() if other == address))
        elif len(self._waiting) > self._max:
            self._close(next(iter(self._waiting)))

    def remove(self, connection: H11Protocol) -> None:
        """Remove a connection that has sent a request or is closed."""
        address = self._waiting.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _close(self, connection: H11Protocol) -> None:
        self.remove(connection)
        self.num_closed += 1
        connection.transport.abort()


def make_config(dashboard: Dashboard, settings: ServerSettings) -> uvicorn.Config:
    """Return the configuration of a uvicorn server.

    Args:
        dashboard: ASGI application.
        settings: of the server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_FILES:  # -1: unlimited
        limit = _MIN_FILES if hard < 0 else min(_MIN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    pending = PendingConnections(
        settings.max_waiting, settings.max_waiting_per_address, settings.proxies
    )

    class Protocol(BoundedProtocol):
        pending_connections, header_seconds = pending, settings.header_seconds

    return uvicorn.Config(
        dashboard, host=settings.host, port=settings.port, log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=3, backlog=_BACKLOG,
        h11_max_incomplete_event_size=_MAX_HEADERS, ws="none", http=Protocol,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )  # fmt: skip


class BoundedProtocol(H11Protocol):
    """uvicorn connection with timeouts for request headers and stalled responses."""

    pending_connections: PendingConnections
    header_seconds: float
    _header_timer: Any = None  # asyncio.TimerHandle
    _stalled_timer: Any = None

    def connection_made(self, transport: Any) -> None:
        """Start the header timeout."""
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timeouts."""
        self._stop_expecting()
        self.resume_writing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle received data; the header timeout ends with the last header."""
        super().handle_events()
        if self._is_answering:
            self._stop_expecting()

    def on_response_complete(self) -> None:
        """Start the header timeout of the next request."""
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_answering:
            self._expect_request()

    def pause_writing(self) -> None:
        """Start the stall timeout, except for live updates, which drop events instead."""
        super().pause_writing()
        is_stream = self.scope is not None and self.scope["path"].endswith("/events")
        if self._stalled_timer is None and not is_stream:
            self._stalled_timer = self.loop.call_later(_STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the stall timeout."""
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        self._stop_expecting()
        self.pending_connections.add(self, self.client[0] if self.client else "")
        self._header_timer = self.loop.call_later(self.header_seconds, self._on_header_timeout)

    def _stop_expecting(self) -> None:
        self.pending_connections.remove(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self.pending_connections.num_closed += 1
        self.transport.abort()
