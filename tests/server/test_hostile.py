"""Requests that mean no good are refused, every one of them, and the server lives on."""

import contextlib
import itertools
import json
import os
import socket
import time

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.server.sample import TOKEN, inside, write_run
from xsake.server.settings import ServerSettings

KNOWN = f"Authorization: Bearer {TOKEN}"
SECRET = "the words of a secret file"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    folder = root / "work"
    write_run(folder / "run", 200)
    (root / "secret.json").write_text(json.dumps({"secret": SECRET}))
    (root / "hidden").mkdir()
    write_run(root / "hidden" / "run", 5, name="hidden")
    (folder / "plan_link.json").symlink_to(root / "secret.json")
    (folder / "linked").symlink_to(root / "hidden")
    (folder / "plan_deep.json").write_text("[" * 100_000)
    (folder / "plan_deep_object.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    (folder / "plan_list.json").write_text("[1, 2]")
    (folder / "plan_binary.json").write_bytes(bytes(range(256)))
    (folder / "plan_numbers.json").write_text('{"a": ' + "9" * 5000 + "}")
    with (folder / "plan_huge.json").open("wb") as file:
        file.truncate(2**26)
    os.mkfifo(folder / "plan_pipe.json")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with inside(ServerSettings((folder,), token=TOKEN, requests_per_second=1e5, port=0)) as made:
        yield made


def raw(server, text, *, is_odd=False):
    """The status line and all else that a request gets, sent as it is.

    What is no request at all may also be met with silence, or a connection that is cut.
    """
    host, _, port = server.place.removeprefix("http://").partition(":")
    found = b""
    met = contextlib.suppress(*([ConnectionError] if is_odd else []))
    with socket.create_connection((host, int(port)), timeout=60) as line, met:
        line.sendall(text.encode("latin-1"))
        if is_odd:
            line.shutdown(socket.SHUT_WR)
        while len(found) < 2**20 and (part := line.recv(65536)):
            found += part
    return found


def request(path="/api/v1/runs", *headers, method="GET", host="127.0.0.1", known=KNOWN):
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else [])]
    lines += [known] if known else []
    return "\r\n".join([*lines, *headers, "Connection: close", "", ""])


STEPS = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "%252e%252e/", "....//", ".%00./",
         "%c0%ae%c0%ae/", "%ef%bc%8e%ef%bc%8e/", "/", "./", ";/../")  # fmt: skip
TARGETS = ("etc/passwd", "secret.json", "work/run/metrics.jsonl", "proc/self/environ")
PLACES = ("/", "/page/", "/api/v1/plans/", "/api/v1/runs/0000000000000000/")
TRAVERSALS = [
    place + step * 3 + target for place, step, target in itertools.product(PLACES, STEPS, TARGETS)
]
NUMBERS = ("0", "A" * 16, "0" * 15, "0" * 17, "g" * 16, "0" * 16, "run", "plan_link", "*", "%",
           "0'--", "0000000000000000.json", "%30" * 16, "0000000000000000%00", "-1",
           "%0d%0aX:1")  # fmt: skip
UNKNOWN = [
    f"/api/v1/{kind}/{number}"
    for kind, number in itertools.product(("runs", "plans", "certificates", "benchmarks"), NUMBERS)
]
HOSTS = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:80", "",
         "127.0.0.1@evil.example", "127.0.0.1:80:80", "127.0.0.1 evil", "127.0.0.2", "0.0.0.0",
         "[::2]", "2130706433", "0x7f.1", "localhost:99999999", "127.0.0.1/..", None)  # fmt: skip
ORIGINS = ("null", "http://evil.example", "https://127.0.0.1.evil.example", "http://127.0.0.1:1",
           "http://localhost", "file://", "http://127.0.0.1@evil.example", "*", "")  # fmt: skip
METHODS = ("PUT", "DELETE", "PATCH", "POST", "OPTIONS", "TRACE", "CONNECT", "BREW", "get",
           "PROPFIND")  # fmt: skip
TOKENS = (None, "Authorization: Bearer", "Authorization: Bearer ", f"Authorization: bearer {TOKEN}",
          f"Authorization: Bearer {TOKEN[:-1]}", f"Authorization: Bearer {TOKEN}x",
          f"Authorization: Basic {TOKEN}", f"Authorization: {TOKEN}",
          f"Cookie: xsake_session={TOKEN}",
          "Cookie: xsake_session=", f"Cookie: xsake_session={'0' * 64}", f"X-Token: {TOKEN}",
          f"Authorization: Bearer x\r\nAuthorization: Bearer {TOKEN}",
          'Cookie: xsake_session="\\', f"Proxy-Authorization: Bearer {TOKEN}")  # fmt: skip
QUERIES = ("points=1000000000", "points=-1", "points=1", "points=1e3", "points=NaN", "begin=-1",
           f"begin={2**64}", f"end={10**40}", "begin=x", "points=", "&".join(["name=a"] * 65),
           "name=" + "a" * 500, "begin=1;end=2", "begin=0x10")  # fmt: skip
SIZES = (
    request("/api/v1/runs", "Content-Length: 10000000"),
    request("/api/v1/session", "Content-Length: 10000000", method="POST"),
    request("/api/v1/session", "Content-Length: -5", method="POST"),
    request("/api/v1/session", "Content-Length: 5", "Content-Length: 6", method="POST"),
    request("/api/v1/session", "Content-Length: 0x10", method="POST"),
    request("/api/v1/session", "Transfer-Encoding: chunked", method="POST") + "ffffff\r\n",
    request("/api/v1/session", "Transfer-Encoding: chunked", "Content-Length: 4", method="POST"),
    request("/api/v1/session", "Transfer-Encoding: identity", method="POST"),
    request("/" + "a" * 600),
    request("/" + "a" * 100_000),
    request("/api/v1/runs?" + "a" * 5000),
    request("/api/v1/runs", *(f"X-{i}: 1" for i in range(80))),
    request("/api/v1/runs", "X-Long: " + "a" * 200_000),
    request("/api/v1/runs", "X-Bad: a\0b"),
    request("/api/v1/runs\0"),
    "GET /api/v1/runs\r\n\r\n",
    "GET /api/v1/runs HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "GET http://evil.example/api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01",
    "\r\n\r\n",
    request("/api/v1/runs", "Upgrade: websocket", "Connection: Upgrade", known=None),
)
HOSTILE = [
    *(request(path) for path in TRAVERSALS),
    *(request(path) for path in UNKNOWN),
    *(request(host=host) for host in HOSTS),
    *(request("/metrics", host=host) for host in HOSTS),
    *(request("/", host=host, known=None) for host in HOSTS),
    *(request(path, f"Origin: {origin}") for path in ("/api/v1/runs", "/metrics")
      for origin in ORIGINS),
    *(request("/api/v1/session", f"Origin: {origin}", method="POST") for origin in ORIGINS),
    *(request(path, f"Sec-Fetch-Site: {site}") for path in ("/api/v1/runs", "/metrics")
      for site in ("cross-site", "same-site", "x")),
    *(request(path, method=method) for path in ("/api/v1/runs", "/metrics", "/", "/health")
      for method in METHODS),
    *(request(path, known=known) for path in ("/api/v1/runs", "/metrics", "/api/v1/openapi.json")
      for known in TOKENS),
    request(f"/api/v1/runs?token={TOKEN}", known=None),
    request("/api/v1/session", "Content-Length: 0", method="POST", known=None),
    *SIZES,
]  # fmt: skip


def test_every_hostile_request_is_refused(server):
    assert len(HOSTILE) == len(set(HOSTILE)) >= 400
    for text in HOSTILE:
        is_odd = text in SIZES
        found = raw(server, text, is_odd=is_odd)
        if is_odd and not found:
            continue
        status = found.partition(b"\r\n")[0].split(b" ")
        assert status[0] == b"HTTP/1.1" and 400 <= int(status[1]) < 500, (text[:300], found[:300])
        assert SECRET.encode() not in found and TOKEN.encode() not in found
        assert len(found) < 4000 and b"Traceback" not in found, text[:200]
        assert b"text/html" not in found
    assert server.run()["step"] == 199


def test_odd_questions_about_a_real_run_are_refused(server):
    number = server.run()["id"]
    for query in QUERIES:
        path = f"/api/v1/runs/{number}/series?name=loss&{query}"
        found = raw(server, request(path))
        assert b" 400 " in found.partition(b"\r\n")[0], (query, found[:200])
    for path in ("series", "heads/..", "heads/LOSS", "heads/loss", "heads/entropy/x", "nothing"):
        assert server.ask(f"/api/v1/runs/{number}/{path}")[0] in (400, 404)


def test_files_that_are_links_pipes_bombs_or_too_large_are_not_served(server, folder):
    begin = time.monotonic()
    names = {plan["name"]: plan["id"] for plan in server.json("/plans")}
    assert "plan_link" not in names and "plan_pipe" not in names
    for name, number in names.items():
        status, _, body = server.ask(f"/api/v1/plans/{number}")
        assert status == 404 and SECRET.encode() not in body, name
    assert {"plan_deep", "plan_huge", "plan_list", "plan_numbers"} <= names.keys()
    assert [run["folder"] for run in server.json("/runs")] == ["run"]
    assert time.monotonic() - begin < 60


def test_a_file_that_becomes_a_link_is_not_followed(server, folder):
    path = folder / "run" / "config.json"
    path.symlink_to(folder.parent / "secret.json")
    number = server.run()["id"]
    assert server.json(f"/runs/{number}")["config"] is None
    path.unlink()


def test_the_schema_is_kept_whatever_is_asked(server):
    schema = schemathesis.openapi.from_url(
        f"{server.place}/api/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.endswith("/events"):
            continue  # does not end

        @settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
        @given(case=operation.as_strategy())
        def holds(case):
            nonlocal asked
            asked += 1
            headers = {"Authorization": f"Bearer {TOKEN}", "Origin": server.place}
            case.call_and_validate(headers=headers, checks=[not_a_server_error])

        holds()
    assert asked >= 50
