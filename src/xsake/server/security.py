"""Security of the server: checks of every request, response headers, and connection limits.

Requests are rejected unless they match an allow list, so that handlers need no path checks. uvicorn
has no timeout for request headers, and its connection limit includes idle connections, so that they
could lock out others. Here only active requests count towards a limit; of the connections without a
complete request, the oldest is closed first.
"""

import hmac
import re
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from xsake.server.settings import ServerSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Rejection = tuple[int, str] | None  # status and message

IS_AUTHENTICATED = "xsake.is_authenticated"  # key in the ASGI scope
COOKIE = "xsake_session"
PATH = re.compile(rb"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?")
_SESSION = b"/api/v1/session"
_OPEN_PATHS = frozenset({"/health", "/ready"})  # no token and no rate limit
_HOST = re.compile(r"(\[[0-9a-f:]{2,39}\]|[a-z0-9.-]{1,253})(:[0-9]{1,5})?")
_MAX_PATH, _MAX_QUERY, _MAX_BODY, _MAX_HEADERS = 512, 4096, 4096, 64
_MAX_ADDRESSES, _BURST = 1024, 6.0  # burst in seconds of the rate
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"cache-control", b"no-store"),
)


class SecurityMiddleware:
    """ASGI middleware around the whole application; inline scripts are allowed by hash."""

    def __init__(self, app: Any, settings: ServerSettings, script_hashes: tuple[str, ...]):
        self._app, self._settings = app, settings
        scripts = " ".join(("'self'", *(f"'sha256-{digest}'" for digest in script_hashes)))
        styles = "'self' 'unsafe-inline'" if script_hashes else "'self'"
        policy = (
            f"default-src 'self'; script-src {scripts}; style-src {styles}; img-src 'self' data:; "
            "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        self._headers = (*_HEADERS, (b"content-security-policy", policy.encode()))
        self._rates: dict[tuple[str, bool], tuple[float, float]] = {}
        self._max_requests = settings.max_requests + settings.max_clients
        self.rejected = self.answered = self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        rejection = self._check(scope, Headers(scope=scope))
        if rejection is not None:
            self.rejected += 1
            status, message = rejection
            login = {"WWW-Authenticate": 'Bearer realm="xsake"'} if status == 401 else None
            response = JSONResponse({"detail": message}, status, login)
            return await response(scope, receive, self._with_headers(send))
        self.answered += 1
        self.num_active += 1
        try:
            await self._app(scope, receive, self._with_headers(send))
        finally:
            self.num_active -= 1
        return None

    def _with_headers(self, send: Send) -> Send:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        return send_with_headers

    def _check(self, scope: Scope, headers: Headers) -> _Rejection:
        is_open = scope["path"] in _OPEN_PATHS
        if not is_open and self.num_active >= self._max_requests:
            return 503, "too many concurrent requests"
        if not is_open and self._is_rate_exceeded(scope, headers):
            return 429, "too many requests"
        return (
            _check_request(scope, headers)
            or _check_site(scope, headers, self._settings.names)
            or self._check_token(scope, headers)
        )

    def _is_rate_exceeded(self, scope: Scope, headers: Headers) -> bool:
        """Take a request from the token bucket of its address; with and without the token."""
        address = (scope.get("client") or ("?",))[0], self._has_token(headers)
        now, per_second = time.monotonic(), self._settings.requests_per_second
        left, before = self._rates.pop(address, (per_second * _BURST, now))
        left = min(per_second * _BURST, left + (now - before) * per_second)
        self._rates[address] = left - (left >= 1), now
        while len(self._rates) > _MAX_ADDRESSES:
            self._rates.pop(next(iter(self._rates)))
        return left < 1

    def _check_token(self, scope: Scope, headers: Headers) -> _Rejection:
        token, path = self._settings.token, scope["path"]
        if token is None or path in _OPEN_PATHS or path.startswith("/page/"):
            scope[IS_AUTHENTICATED] = token is None
            return None
        scope[IS_AUTHENTICATED] = is_authenticated = self._has_token(headers)
        is_allowed = is_authenticated or path == "/"  # the login page loads without a token
        return None if is_allowed else (401, "the token is missing or wrong")

    def _has_token(self, headers: Headers) -> bool:
        """Whether a request has the token, or none is required."""
        token = self._settings.token
        if token is None:
            return True
        given, expected = headers.getlist("authorization"), f"Bearer {token}"
        if not given:
            cookies = cookie_parser("; ".join(headers.getlist("cookie"))[:4096])
            given, expected = [cookies.get(COOKIE, "")], session_cookie(token)
        return len(given) == 1 and hmac.compare_digest(given[0].encode(), expected.encode())


def _check_request(scope: Scope, headers: Headers) -> _Rejection:
    method = scope["method"]
    raw = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    if len(raw) > _MAX_PATH or len(scope["query_string"]) > _MAX_QUERY:
        return 414, "the URL is too long"
    if len(headers.raw) > _MAX_HEADERS:
        return 431, "too many headers"
    if not PATH.fullmatch(raw) or b".." in raw:
        return 400, "invalid characters in the path"
    if method not in ("GET", "HEAD") and not (method == "POST" and raw == _SESSION):
        return 405, "read-only: use GET or HEAD"
    sizes = headers.getlist("content-length") or ["0"]
    if len(sizes) > 1 or not re.fullmatch("[0-9]{1,18}", sizes[0]):
        return 400, "invalid Content-Length"
    if int(sizes[0]) > (_MAX_BODY if method == "POST" else 0):  # h11 reads no more than that
        return 413, "the body is too large"
    if "transfer-encoding" in headers:
        return 411, "Content-Length is required"
    return None


def _check_site(scope: Scope, headers: Headers, names: frozenset[str]) -> _Rejection:
    """Reject unknown host names (DNS rebinding) and requests of other sites."""
    hosts = [value.lower() for value in headers.getlist("host")]
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None or match[1] not in names:
        return 421, "unknown host name"
    origins = [value.lower() for value in headers.getlist("origin")]
    sites = set(headers.getlist("sec-fetch-site"))
    is_page = scope["path"] == "/" and scope["method"] == "GET"
    is_same_site = sites <= {"same-origin", "none"} or is_page
    if not is_same_site or set(origins) - {f"http://{hosts[0]}", f"https://{hosts[0]}"}:
        return 403, "cross-site request"
    if scope["method"] == "POST" and not origins and "authorization" not in headers:
        return 403, "Origin or Authorization header is required"
    return None


def session_cookie(token: str) -> str:
    """Return the value of the session cookie: an HMAC of the token."""
    return hmac.new(token.encode(), b"xsake session", sha256).hexdigest()


_STALLED_SECONDS = 60.0  # without progress of a response
_MAX_HEADER_BYTES = 16384
_BACKLOG = 2048  # connections queued by the kernel
_MIN_FILES = 4096  # open files: all may be accepted before the oldest are closed


def make_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """Return the configuration of a uvicorn server for an ASGI application."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_FILES:  # -1: unlimited
        limit = _MIN_FILES if hard < 0 else min(_MIN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    pending = PendingConnections(settings)

    class Protocol(BoundedProtocol):
        pending_connections, header_seconds = pending, settings.header_seconds

    return uvicorn.Config(
        app, host=settings.host, port=settings.port, log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=3, backlog=_BACKLOG,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES, ws="none", http=Protocol,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )  # fmt: skip


class PendingConnections:
    """Connections without a complete request, oldest first."""

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        self._waiting: dict[H11Protocol, str] = {}
        self._by_address: Counter[str] = Counter()

    def add(self, connection: H11Protocol, address: str) -> None:
        """Add a connection; close the oldest if there are too many."""
        self._waiting[connection] = address
        self._by_address[address] += 1
        is_crowd = self._by_address[address] > self._settings.max_waiting_per_address
        if is_crowd and not self._settings.is_proxy(address):
            self._close(next(x for x, other in self._waiting.items() if other == address))
        elif len(self._waiting) > self._settings.max_waiting:
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
        connection.transport.abort()


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
        self._header_timer = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _stop_expecting(self) -> None:
        self.pending_connections.remove(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
