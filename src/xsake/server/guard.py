"""ASGI security middleware: authentication, host and origin checks, rate limit, headers.

Requests are rejected unless they match an allow list, so that handlers need no path checks.
"""

import hmac
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Any

from xsake.server.settings import ServerSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SESSION = "/api/v1/session"
IS_AUTHENTICATED = "xsake.is_authenticated"  # key in the ASGI scope
COOKIE = "xsake_session"
OPEN_PATHS = frozenset({"/health", "/ready"})  # no token and no rate limit
_PAGE = ("/", "/page/")  # the login page loads without a token
_PATH = re.compile(rb"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?")
_HOST = re.compile(r"(\[[0-9a-f:]{2,39}\]|[a-z0-9.-]{1,253})(:[0-9]{1,5})?")
_MAX_PATH, _MAX_QUERY, _MAX_BODY, _MAX_HEADERS = 512, 4096, 4096, 64
_MAX_ADDRESSES, _BURST = 1024, 6.0  # burst in seconds of the rate

HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    b"cache-control": b"no-store",
}


def content_security_policy(script_hashes: tuple[str, ...] = ()) -> bytes:
    """Return the Content-Security-Policy header; inline scripts are allowed by hash."""
    scripts = " ".join(("'self'", *(f"'sha256-{digest}'" for digest in script_hashes)))
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self'"
        f"{' ' + repr('unsafe-inline') if script_hashes else ''}; img-src 'self' data:; "
        "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ).encode()


class SecurityMiddleware:
    """ASGI middleware around the whole application.

    Args:
        app: inner application.
        settings: of the server.
        content_policy: from `content_security_policy`.
    """

    def __init__(self, app: Any, settings: ServerSettings, content_policy: bytes):
        self._app, self._settings = app, settings
        self._headers = {**HEADERS, b"content-security-policy": content_policy}
        self._buckets: dict[tuple[str, bool], tuple[float, float]] = {}
        self._max_requests = settings.max_requests + settings.max_clients
        self.rejected = self.answered = self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        error = self._check(scope)
        if error is not None:
            self.rejected += 1
            return await self._reject(send, *error)
        self.answered += 1
        self.num_active += 1
        try:
            await self._app(scope, _limit_body(receive), self._with_headers(send))
        finally:
            self.num_active -= 1
        return None

    def _check(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and message if a request is rejected, else None."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        checks = (
            self._check_load, self._check_rate, self._check_request, self._check_host,
            self._check_origin, self._check_token,
        )  # fmt: skip
        for check in checks:
            error = check(scope, headers)
            if error is not None:
                return error
        return None

    def _check_load(self, scope: Scope, headers: Any) -> tuple[int, str] | None:
        if scope["path"] in OPEN_PATHS or self.num_active < self._max_requests:
            return None
        return 503, "too many concurrent requests"

    def _check_rate(self, scope: Scope, headers: Any) -> tuple[int, str] | None:
        """Limit the rate per address; requests with and without the token have separate buckets."""
        if scope["path"] in OPEN_PATHS:
            return None
        address = (scope.get("client") or ("?",))[0], self._has_token(headers)
        now = time.monotonic()
        per_second = self._settings.requests_per_second
        capacity = per_second * _BURST
        left, before = self._buckets.pop(address, (capacity, now))
        left = min(capacity, left + (now - before) * per_second)
        is_exceeded = left < 1
        self._buckets[address] = left - (not is_exceeded), now
        while len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.pop(next(iter(self._buckets)))
        return (429, "too many requests") if is_exceeded else None

    def _check_request(self, scope: Scope, headers: Any) -> tuple[int, str] | None:
        raw, method = scope.get("raw_path") or scope["path"].encode(), scope["method"]
        raw = raw.partition(b"?")[0]
        if len(raw) > _MAX_PATH or len(scope["query_string"]) > _MAX_QUERY:
            return 414, "the URL is too long"
        if sum(map(len, headers.values())) > _MAX_HEADERS:
            return 431, "too many headers"
        if not _PATH.fullmatch(raw) or b".." in raw:
            return 400, "invalid characters in the path"
        if method not in ("GET", "HEAD") and not (method == "POST" and raw == SESSION.encode()):
            return 405, "read-only: use GET or HEAD"
        sizes = headers.get(b"content-length", [b"0"])
        if len(sizes) > 1 or not re.fullmatch(rb"[0-9]{1,18}", sizes[0]):
            return 400, "invalid Content-Length"
        if int(sizes[0]) > (_MAX_BODY if method == "POST" else 0):
            return 413, "the body is too large"
        if b"transfer-encoding" in headers:
            return 411, "Content-Length is required"
        return None

    def _check_host(
        self, scope: Scope, headers: dict[bytes, list[bytes]]
    ) -> tuple[int, str] | None:
        """Reject unknown host names (DNS rebinding)."""
        hosts = headers.get(b"host", [])
        name = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        match = _HOST.fullmatch(name)
        if match is None or match[1] not in self._settings.names:
            return 421, "unknown host name"
        return None

    def _check_origin(
        self, scope: Scope, headers: dict[bytes, list[bytes]]
    ) -> tuple[int, str] | None:
        host = headers[b"host"][0].decode("latin-1").lower()
        origins = headers.get(b"origin", [])
        allowed = (f"http://{host}", f"https://{host}")
        if any(origin.decode("latin-1").lower() not in allowed for origin in origins):
            return 403, "cross-site request"
        site = headers.get(b"sec-fetch-site", [b"none"])[-1]
        is_page = scope["path"] == "/" and scope["method"] == "GET"
        if site not in (b"same-origin", b"none") and not is_page:
            return 403, "cross-site request"
        if scope["method"] == "POST" and not origins and b"authorization" not in headers:
            return 403, "Origin or Authorization header is required"
        return None

    def _check_token(
        self, scope: Scope, headers: dict[bytes, list[bytes]]
    ) -> tuple[int, str] | None:
        token, path = self._settings.token, scope["path"]
        if token is None or path in OPEN_PATHS or path.startswith(_PAGE[1]):
            scope[IS_AUTHENTICATED] = token is None
            return None
        scope[IS_AUTHENTICATED] = is_authenticated = self._has_token(headers)
        is_allowed = is_authenticated or path == _PAGE[0]
        return None if is_allowed else (401, "the token is missing or wrong")

    def _has_token(self, headers: dict[bytes, list[bytes]]) -> bool:
        """Whether a request has the token, or none is required."""
        token = self._settings.token
        if token is None:
            return True
        if given := headers.get(b"authorization", []):
            expected = f"Bearer {token}".encode()
            return len(given) == 1 and hmac.compare_digest(given[0], expected)
        cookie = _read_cookie(headers.get(b"cookie", []))
        return hmac.compare_digest(cookie, session_cookie(token).encode())

    async def _reject(self, send: Send, status: int, message: str) -> None:
        body = b'{"detail":"' + message.encode() + b'"}'
        headers = [*self._headers.items(), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(body)).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="xsake"'))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _with_headers(self, send: Send) -> Send:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message.get("headers", []) if pair[0] != b"server"]
                named = {name for name, _ in given}
                added = [pair for pair in self._headers.items() if pair[0] not in named]
                message = {**message, "headers": [*given, *added]}
            await send(message)

        return send_with_headers


def session_cookie(token: str) -> str:
    """Return the value of the session cookie: an HMAC of the token."""
    return hmac.new(token.encode(), b"xsake session", sha256).hexdigest()


def _read_cookie(values: list[bytes]) -> bytes:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load("; ".join(value.decode("latin-1") for value in values)[:4096])
    except CookieError:
        return b""
    return jar[COOKIE].value.encode("latin-1", "replace") if COOKIE in jar else b""


def _limit_body(receive: Receive) -> Receive:
    """Disconnect if a body exceeds the limit."""
    size = 0

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        return message if size <= _MAX_BODY else {"type": "http.disconnect"}

    return receive_limited
