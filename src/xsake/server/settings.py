"""Settings of the server, validated before it listens."""

import ipaddress
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from xsake.errors import ArgumentError

LOOPBACK = "127.0.0.1"
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{32,512}")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server."""

    folders: tuple[Path, ...]  # scanned for runs, plans, rows and certificates
    host: str = LOOPBACK
    port: int = 8765  # 0 picks a free one
    token: str | None = None  # required in every request; None: loopback only
    hosts: tuple[str, ...] = ()  # additional host names, such as that of a proxy
    showcase: Path | None = None  # folder of the built showcase; None: the built-in page
    max_clients: int = 32  # of live updates
    cache: Path | None = None  # folder of run indexes; None: a temporary one
    requests_per_second: float = 50.0  # per address, separately with and without the token
    max_requests: int = 64  # concurrent, live updates excluded
    max_waiting: int = 256  # connections without a complete request; then the oldest is closed
    max_waiting_per_address: int = 128  # trusted proxies excluded
    header_seconds: float = 10.0  # for the headers, from the connection or previous response
    trusted_proxies: tuple[str, ...] = ()  # whose X-Forwarded-For and -Proto are trusted
    poll_seconds: float = 0.5  # between two polls of runs
    stale_seconds: float = 60.0  # a run without updates for longer is stale

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.token is None:
            raise ArgumentError(
                "public-without-token", "access without a token is limited to loopback",
                got=f"host {self.host}",
                expected="a token, or a loopback address",
                fix=f"set --token-file, or --host {LOOPBACK}",
            )  # fmt: skip
        if self.token is None and self.trusted_proxies:
            raise ArgumentError(
                "proxy-without-token", "a proxy without a token gives access to other machines",
                got=f"trusted proxies {', '.join(self.trusted_proxies)}", expected="a token",
                fix="use --token-file instead of --no-token",
            )  # fmt: skip
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise ArgumentError(
                "server-token", "invalid token", got=f"{len(self.token)} characters",
                expected="at least 32 letters, digits, or one of . _ ~ -",
                fix="create one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )  # fmt: skip
        for proxy in self.trusted_proxies:
            _parse_network(proxy)
        for folder in self.folders:
            if not folder.is_dir():
                raise ArgumentError("served-folder", "the folder does not exist", got=folder)

    @property
    def names(self) -> frozenset[str]:
        """Accepted values of the Host header, without a port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        local = ("localhost", LOOPBACK, "[::1]")
        return frozenset(name.lower() for name in (*local, host, *self.hosts))

    def is_proxy(self, address: str) -> bool:
        """Whether an address belongs to a trusted proxy."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in _parse_network(proxy) for proxy in self.trusted_proxies)


def _parse_network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        network = ipaddress.ip_network(name)
        if network.prefixlen == 0:
            raise ValueError("every address would be trusted")
    except ValueError as error:
        expected = "an address or a network of your proxies, such as 10.0.0.7 or 10.0.0.0/24"
        raise ArgumentError(
            "proxy", f"invalid proxy: {error}", got=name, expected=expected
        ) from error
    return network


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a random token of 256 bits."""
    return secrets.token_urlsafe(32)
