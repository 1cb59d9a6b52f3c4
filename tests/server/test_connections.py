"""Connections that send nothing, or little by little, are closed and lock out no one."""

import contextlib
import socket
import time

import pytest

from tests.server.sample import TOKEN, inside, served, write_run
from xsake.errors import ArgumentError
from xsake.server.security import COOKIE, session_cookie
from xsake.server.settings import ServerSettings

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: "


@contextlib.contextmanager
def crowd(server, count, text=b"", address="127.0.0.1"):
    """Connections that stay open, each with the begin of a request."""
    host, _, port = server.place.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as stack:
        lines = []
        for _ in range(count):
            line = stack.enter_context(
                socket.create_connection((host, int(port)), 10, source_address=(address, 0))
            )
            with contextlib.suppress(ConnectionError):
                line.sendall(text)
            lines.append(line)
        yield lines


def timed(server, path, **options):
    begin = time.monotonic()
    status = server.ask(path, **options)[0]
    return status, time.monotonic() - begin


def is_closed(line):
    line.settimeout(0)
    try:
        return line.recv(16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crowded") / "work"
    write_run(folder / "run", 100)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as made:
        yield made


@pytest.mark.parametrize("text", [b"", HALF, b"\r\n"], ids=["idle", "slow headers", "newlines"])
@pytest.mark.parametrize("addresses", [1, 5])
def test_500_connections_that_send_no_request_lock_out_no_one(server, text, addresses):
    cookie = {"Cookie": f"{COOKIE}={session_cookie(TOKEN)}"}
    with contextlib.ExitStack() as stack:
        for number in range(addresses):
            stack.enter_context(crowd(server, 500 // addresses, text, f"127.0.0.{1 + number}"))
        requests = [(path, {}) for path in ("/health", "/ready", "/api/v1/runs", "/page/app.js")]
        for path, given in [*requests, ("/api/v1/runs", {"token": False, "headers": cookie})]:
            # Twice, for busy machines: a client that is locked out stays locked out.
            answers = [timed(server, path, **given) for _ in range(2)]
            assert {status for status, _ in answers} == {200}, (path, answers)
            assert min(seconds for _, seconds in answers) < 1.0, (path, answers)


def test_slow_senders_run_out_of_time_wherever_they_stop(folder):
    settings = ServerSettings((folder,), token=TOKEN, port=0, header_seconds=1.0)
    whole = f"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with inside(settings) as server, crowd(server, 5) as lines:
        idle, slow, again, body, living = lines
        slow.sendall(HALF)
        again.sendall(whole.encode())
        assert again.recv(65536).startswith(b"HTTP/1.1 200")
        again.sendall(HALF)  # the second request of a connection
        body.sendall(
            b"POST /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4096\r\n\r\n"
        )
        assert body.recv(65536).startswith(b"HTTP/1.1 4")
        number = server.run()["id"]
        living.sendall(whole.replace("/runs", f"/runs/{number}/events").encode())
        assert b"200 OK" in living.recv(65536)
        end = time.monotonic() + 1.8
        while time.monotonic() < end:  # a byte now and then does not help
            for line in (slow, again, body):
                with contextlib.suppress(ConnectionError):
                    line.sendall(b"a")
            time.sleep(0.1)
        assert [is_closed(line) for line in (idle, slow, again, body)] == [True] * 4
        write_run(folder / "run", 110, begin=100)
        living.settimeout(30)
        assert living.recv(65536)  # who is being answered has all the time


def test_the_oldest_of_too_many_makes_room(folder):
    settings = ServerSettings((folder,), port=0, max_waiting=20, max_waiting_per_address=8)
    with inside(settings) as server, crowd(server, 12) as lines:
        server.until(lambda: sum(map(is_closed, lines)) >= 4, "the oldest are closed")
        closed = [is_closed(line) for line in lines]
        assert all(closed[:4]) and not any(closed[6:])


def test_others_without_the_token_do_not_use_up_the_requests_of_a_user(folder):
    settings = ServerSettings((folder,), token=TOKEN, port=0, requests_per_second=2.0)
    with inside(settings) as server:
        statuses = [server.ask("/api/v1/runs", token=False)[0] for _ in range(60)]
        assert statuses.count(429) >= 30 and set(statuses) <= {401, 429}
        assert server.ask("/api/v1/runs")[0] == 200
        assert server.ask("/health", token=False)[0] == 200  # probes of the server are not limited
        server.until(lambda: server.ask("/api/v1/runs", token=False)[0] == 401, "a check again")


def test_too_many_answers_at_once_are_refused_but_health_is_not(folder):
    settings = ServerSettings((folder,), port=0, max_clients=2, max_requests=0)
    with inside(settings) as server, crowd(server, 2) as lines:
        number = server.run()["id"]
        text = f"GET /api/v1/runs/{number}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for line in lines:
            line.sendall(text.encode())
            assert b"200 OK" in line.recv(4096)
        assert server.ask("/api/v1/runs")[0] == 503
        assert server.ask("/health")[0] == 200 and server.ask("/ready")[0] == 200


def forwarded(server, address, scheme="https"):
    return {"X-Forwarded-For": address, "X-Forwarded-Proto": scheme, "Origin": server.place}


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_trusted_proxy_names_its_clients_and_their_scheme(folder, is_trusted):
    proxies = ("127.0.0.1",) if is_trusted else ("192.0.2.0/24",)
    settings = ServerSettings(
        (folder,), token=TOKEN, port=0, requests_per_second=2.0, trusted_proxies=proxies
    )
    with inside(settings) as server:
        headers = forwarded(server, "198.51.100.7")
        cookie = server.ask("/api/v1/session", method="POST", headers=headers)[1]["Set-Cookie"]
        assert ("Secure" in cookie) == is_trusted
        statuses = [server.ask("/api/v1/runs", headers=headers)[0] for _ in range(30)]
        assert 429 in statuses
        other = server.ask("/api/v1/runs", headers=forwarded(server, "198.51.100.8"))[0]
        assert other == (200 if is_trusted else 429)


def test_proxies_that_would_be_anyone_or_have_no_token_are_refused(folder):
    for proxy in ("*", "0.0.0.0/0", "::/0", "proxy.example", "10.0.0.1/8", ""):
        with pytest.raises(ArgumentError, match="invalid proxy"):
            ServerSettings((folder,), token=TOKEN, trusted_proxies=(proxy,))
    with pytest.raises(ArgumentError, match="XSK-102.proxy-without-token"):
        ServerSettings((folder,), trusted_proxies=("127.0.0.1",))
