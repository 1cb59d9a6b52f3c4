"""How the dashboard is served, checked before anything listens."""

import ipaddress
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from xsake.errors import ArgumentError

LOOPBACK = "127.0.0.1"
_LOCAL_NAMES = ("localhost", LOOPBACK, "[::1]")
_LEAST_TOKEN = 32  # characters


@dataclass(frozen=True)
class Settings:
    """How the dashboard is served.

    Args:
        folders: that runs, plans, rows and certificates are looked for in.
        host: address to listen on.
        port: 0 takes a free one.
        token: that every request must know; None: none is asked for, on the loopback only.
        hosts: further names that the server may be called by, such as that of a proxy.
        showcase: folder of the built showcase; None: the built-in page.
        clients: that live updates go to at once.
        cache: folder for the indexes of runs; None: a temporary one.
        requests_per_second: of one address, those with the token apart from those without; more
            are refused.
        max_requests: that are answered at once, live updates aside.
        max_waiting: connections that have not sent a whole request; more close the oldest.
        max_waiting_per_address: the same for one address that is not a trusted proxy.
        header_seconds: that a connection has for the headers of a request, from its begin or from
            the answer before.
        trusted_proxies: addresses and networks whose X-Forwarded-For and -Proto are believed.
        poll_seconds: how often runs are looked at.
        stale_seconds: a run that is silent for so long is stale.
    """

    folders: tuple[Path, ...]
    host: str = LOOPBACK
    port: int = 8765
    token: str | None = None
    hosts: tuple[str, ...] = ()
    showcase: Path | None = None
    clients: int = 32
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
                "other machines could read everything without a token",
                got=f"host {self.host}",
                expected="a token, or an address of this machine alone",
                fix=f"give --token-file, or leave --host at {LOOPBACK}",
            )
        if self.token is None and self.trusted_proxies:
            raise ArgumentError(
                "a proxy would let other machines read everything without a token",
                got=f"trusted proxies {', '.join(self.trusted_proxies)}",
                expected="a token",
                fix="give --token-file instead of --no-token",
            )
        if self.token is not None:
            require_token(self.token)
        for proxy in self.trusted_proxies:
            require_network(proxy)
        for folder in self.folders:
            if not folder.is_dir():
                raise ArgumentError("there is no such folder", got=folder)

    @property
    def names(self) -> frozenset[str]:
        """What a request may call the server, without a port."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(name.lower() for name in (*_LOCAL_NAMES, own, *self.hosts))

    @property
    def proxies(self) -> "Networks":
        """Addresses of trusted proxies."""
        return Networks(self.trusted_proxies)


class Networks:
    """A set of addresses, given as addresses and networks.

    Args:
        names: such as 10.0.0.7 or 10.0.0.0/8.
    """

    def __init__(self, names: tuple[str, ...]):
        self._networks = [require_network(name) for name in names]

    def __contains__(self, address: str) -> bool:
        if not self._networks:
            return False
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self._networks)


def require_network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return an address or network; raises ArgumentError if it is neither, or is everybody."""
    try:
        network = ipaddress.ip_network(name)
    except ValueError as error:
        raise ArgumentError(
            "the proxy is not an address", got=name, expected="such as 10.0.0.7 or 10.0.0.0/24"
        ) from error
    if network.prefixlen == 0:
        raise ArgumentError(
            "every address would be trusted", got=name, expected="the addresses of your proxies"
        )
    return network


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """256 bits that nobody can guess."""
    return secrets.token_urlsafe(32)


def require_token(token: str) -> None:
    """Raise unless a token is long enough and fits a header."""
    if not re.fullmatch(rf"[A-Za-z0-9._~-]{{{_LEAST_TOKEN},512}}", token):
        raise ArgumentError(
            "the token cannot be used",
            got=f"{len(token)} characters",
            expected=f"at least {_LEAST_TOKEN} letters, digits, or one of . _ ~ -",
            fix="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
