"""What stands before every request: who may ask, in which words, how often; and what is answered.

It refuses by what it does not know, so that nothing behind it has to be careful with addresses.
"""

import hmac
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Any

from xsake.server.settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SESSION = "/api/v1/session"
IS_KNOWN = "xsake.is_known"  # in the scope: whether the token was shown, where none has to be
COOKIE = "xsake_session"
OPEN_PATHS = frozenset({"/health", "/ready"})  # no token, no limit: they cost and reveal nothing
_PAGE = ("/", "/page/")  # the login page has to load before anybody can log in
_PATH = re.compile(rb"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?")
_HOST = re.compile(r"(\[[0-9a-f:]{2,39}\]|[a-z0-9.-]{1,253})(:[0-9]{1,5})?")
_MOST_PATH, _MOST_QUERY, _MOST_BODY, _MOST_HEADERS = 512, 4096, 4096, 64
_MOST_ADDRESSES, _BURST = 1024, 6.0  # seconds' worth of requests at once

HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    b"cache-control": b"no-store",
}


def policy(script_hashes: tuple[str, ...] = ()) -> bytes:
    """The content security policy; inline scripts only by their hashes."""
    scripts = " ".join(("'self'", *(f"'sha256-{found}'" for found in script_hashes)))
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self'"
        f"{' ' + repr('unsafe-inline') if script_hashes else ''}; img-src 'self' data:; "
        "object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ).encode()


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: what is guarded.
        settings: of the server.
        content_policy: see `policy`.
    """

    def __init__(self, app: Any, settings: Settings, content_policy: bytes):
        self._app, self._settings = app, settings
        self._headers = {**HEADERS, b"content-security-policy": content_policy}
        self._buckets: dict[tuple[str, bool], tuple[float, float]] = {}
        self._max_requests = settings.max_requests + settings.clients
        self.refused = self.answered = self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        found = self._refusal(scope)
        if found is not None:
            self.refused += 1
            return await self._refuse(send, *found)
        self.answered += 1
        self.num_active += 1
        try:
            await self._app(scope, _bounded(receive), self._with_headers(send))
        finally:
            self.num_active -= 1
        return None

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request is not answered; None if it is."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        checks = (self._crowd, self._rate, self._words, self._host, self._origin, self._who)
        for check in checks:
            found = check(scope, headers)
            if found is not None:
                return found
        return None

    def _crowd(self, scope: Scope, headers: Any) -> tuple[int, str] | None:
        if scope["path"] in OPEN_PATHS or self.num_active < self._max_requests:
            return None
        return 503, "too many requests are being answered"

    def _rate(self, scope: Scope, headers: Any) -> tuple[int, str] | None:
        """Who has the token is not slowed by others of the same address who have it not."""
        if scope["path"] in OPEN_PATHS:
            return None
        address = (scope.get("client") or ("?",))[0], self._is_known(headers)
        now = time.monotonic()
        per_second = self._settings.requests_per_second
        most = per_second * _BURST
        left, before = self._buckets.pop(address, (most, now))
        left = min(most, left + (now - before) * per_second)
        is_refused = left < 1
        self._buckets[address] = left - (not is_refused), now
        while len(self._buckets) > _MOST_ADDRESSES:
            self._buckets.pop(next(iter(self._buckets)))
        return (429, "too many requests") if is_refused else None

    def _words(self, scope: Scope, headers: Any) -> tuple[int, str] | None:
        raw, method = scope.get("raw_path") or scope["path"].encode(), scope["method"]
        raw = raw.partition(b"?")[0]
        if len(raw) > _MOST_PATH or len(scope["query_string"]) > _MOST_QUERY:
            return 414, "the address is too long"
        if sum(map(len, headers.values())) > _MOST_HEADERS:
            return 431, "too many headers"
        if not _PATH.fullmatch(raw) or b".." in raw:
            return 400, "the address has characters that no address of ours has"
        if method not in ("GET", "HEAD") and not (method == "POST" and raw == SESSION.encode()):
            return 405, "everything here is for reading"
        sizes = headers.get(b"content-length", [b"0"])
        if len(sizes) > 1 or not re.fullmatch(rb"[0-9]{1,18}", sizes[0]):
            return 400, "the length of the body is not clear"
        if int(sizes[0]) > (_MOST_BODY if method == "POST" else 0):
            return 413, "the body is too large"
        if b"transfer-encoding" in headers:
            return 411, "the length of the body must be told"
        return None

    def _host(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> tuple[int, str] | None:
        """A page of others, whose name leads here, cannot read what it is not for."""
        hosts = headers.get(b"host", [])
        name = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        found = _HOST.fullmatch(name)
        if found is None or found[1] not in self._settings.names:
            return 421, "this server is not called so"
        return None

    def _origin(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> tuple[int, str] | None:
        host = headers[b"host"][0].decode("latin-1").lower()
        origins = headers.get(b"origin", [])
        own = (f"http://{host}", f"https://{host}")
        if any(origin.decode("latin-1").lower() not in own for origin in origins):
            return 403, "another site may not ask this"
        site = headers.get(b"sec-fetch-site", [b"none"])[-1]
        is_page = scope["path"] == "/" and scope["method"] == "GET"
        if site not in (b"same-origin", b"none") and not is_page:
            return 403, "another site may not ask this"
        if scope["method"] == "POST" and not origins and b"authorization" not in headers:
            return 403, "who asks must say from where"
        return None

    def _who(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> tuple[int, str] | None:
        token, path = self._settings.token, scope["path"]
        if token is None or path in OPEN_PATHS or path.startswith(_PAGE[1]):
            scope[IS_KNOWN] = token is None
            return None
        scope[IS_KNOWN] = is_known = self._is_known(headers)
        return None if is_known or path == _PAGE[0] else (401, "the token is missing or wrong")

    def _is_known(self, headers: dict[bytes, list[bytes]]) -> bool:
        """Whether a request has the token, or where there is none."""
        token = self._settings.token
        if token is None:
            return True
        if given := headers.get(b"authorization", []):
            expected = f"Bearer {token}".encode()
            return len(given) == 1 and hmac.compare_digest(given[0], expected)
        cookie = _cookie(headers.get(b"cookie", []))
        return hmac.compare_digest(cookie, session_of(token).encode())

    async def _refuse(self, send: Send, status: int, why: str) -> None:
        body = b'{"detail":"' + why.encode() + b'"}'
        headers = [*self._headers.items(), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(body)).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="xsake"'))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _with_headers(self, send: Send) -> Send:
        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message.get("headers", []) if pair[0] != b"server"]
                named = {name for name, _ in given}
                added = [pair for pair in self._headers.items() if pair[0] not in named]
                message = {**message, "headers": [*given, *added]}
            await send(message)

        return sending


def session_of(token: str) -> str:
    """What a cookie holds: proof of the token, not the token."""
    return hmac.new(token.encode(), b"xsake session", sha256).hexdigest()


def _cookie(values: list[bytes]) -> bytes:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load("; ".join(value.decode("latin-1") for value in values)[:4096])
    except CookieError:
        return b""
    return jar[COOKIE].value.encode("latin-1", "replace") if COOKIE in jar else b""


def _bounded(receive: Receive) -> Receive:
    """A body that is longer than it said is cut off."""
    seen = 0

    async def receiving() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= _MOST_BODY else {"type": "http.disconnect"}

    return receiving
