"""Settings of the server, validated before it listens."""

import ipaddress
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from xsake.errors import ArgumentError

LOOPBACK = "127.0.0.1"
_LOCAL_NAMES = ("localhost", LOOPBACK, "[::1]")
_MIN_TOKEN_LENGTH = 32  # characters


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server.

    Args:
        folders: scanned for runs, plans, rows and certificates.
        host: address to listen on.
        port: 0 picks a free one.
        token: required in every request; None disables authentication (loopback only).
        hosts: additional host names, such as that of a proxy.
        showcase: folder of the built showcase; None: the built-in page.
        max_clients: clients of live updates.
        cache: folder of run indexes; None: a temporary one.
        requests_per_second: rate limit per address; requests with and without the token are
            counted separately.
        max_requests: concurrent requests, live updates excluded.
        max_waiting: connections without a complete request; beyond it the oldest is closed.
        max_waiting_per_address: the same per address, trusted proxies excluded.
        header_seconds: timeout for the headers of a request, from the start of the connection or
            the end of the previous response.
        trusted_proxies: addresses and networks whose X-Forwarded-For and -Proto are trusted.
        poll_seconds: interval between polls of runs.
        stale_seconds: a run without updates for longer is stale.
    """

    folders: tuple[Path, ...]
    host: str = LOOPBACK
    port: int = 8765
    token: str | None = None
    hosts: tuple[str, ...] = ()
    showcase: Path | None = None
    max_clients: int = 32
    cache: Path | None = None
    requests_per_second: float = 50.0
    max_requests: int = 64
    max_waiting: int = 256
    max_waiting_per_address: int = 128
    header_seconds: float = 10.0
    trusted_proxies: tuple[str, ...] = ()
    poll_seconds: float = 0.5
    stale_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.token is None:
            raise ArgumentError(
                "access without a token is limited to loopback",
                got=f"host {self.host}",
                expected="a token, or a loopback address",
                fix=f"set --token-file, or --host {LOOPBACK}",
            )
        if self.token is None and self.trusted_proxies:
            raise ArgumentError(
                "a proxy without a token gives access to other machines",
                got=f"trusted proxies {', '.join(self.trusted_proxies)}",
                expected="a token",
                fix="use --token-file instead of --no-token",
            )
        if self.token is not None:
            validate_token(self.token)
        for proxy in self.trusted_proxies:
            parse_network(proxy)
        for folder in self.folders:
            if not folder.is_dir():
                raise ArgumentError("the folder does not exist", got=folder)

    @property
    def names(self) -> frozenset[str]:
        """Accepted values of the Host header, without a port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(name.lower() for name in (*_LOCAL_NAMES, host, *self.hosts))

    @property
    def proxies(self) -> "Networks":
        """Addresses of trusted proxies."""
        return Networks(self.trusted_proxies)


class Networks:
    """A set of IP addresses and networks.

    Args:
        names: such as 10.0.0.7 or 10.0.0.0/8.
    """

    def __init__(self, names: tuple[str, ...]):
        self._networks = [parse_network(name) for name in names]

    def __contains__(self, address: str) -> bool:
        if not self._networks:
            return False
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)


def parse_network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse an address or network; raise ArgumentError if it is invalid or includes everything."""
    try:
        network = ipaddress.ip_network(name)
    except ValueError as error:
        raise ArgumentError(
            "invalid proxy address", got=name, expected="such as 10.0.0.7 or 10.0.0.0/24"
        ) from error
    if network.prefixlen == 0:
        raise ArgumentError(
            "every address would be trusted", got=name, expected="the addresses of your proxies"
        )
    return network


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a random token of 256 bits."""
    return secrets.token_urlsafe(32)


def validate_token(token: str) -> None:
    """Raise ArgumentError unless a token is long enough and valid in a header."""
    if not re.fullmatch(rf"[A-Za-z0-9._~-]{{{_MIN_TOKEN_LENGTH},512}}", token):
        raise ArgumentError(
            "invalid token",
            got=f"{len(token)} characters",
            expected=f"at least {_MIN_TOKEN_LENGTH} letters, digits, or one of . _ ~ -",
            fix="create one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
