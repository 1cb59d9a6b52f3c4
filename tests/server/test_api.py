"""The dashboard as its users see it: a real server, real requests, a run that goes on."""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import time

import pytest
from typer.testing import CliRunner

from benchmarks.observability.serving import PROGRAM
from tests.server.sample import probe, sample, served, values, write_run
from xsake.cli import app
from xsake.observability import METRICS
from xsake.server.api import Curves

ROOT_PARTS = ("benchmarks/results/causal.jsonl", "certificates/tpu_v5e.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "work"
    write_run(folder / "runs" / "first", 1500)
    here = os.path.dirname(__file__)
    for part in ROOT_PARTS:
        target = folder / part
        target.parent.mkdir(parents=True)
        shutil.copy(os.path.join(here, "..", "..", part), target)
    (folder / "plan.json").write_text('{"budget": 0.5, "deep": {"a": [1, NaN]}}')
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as made:
        yield made


def test_a_run_is_listed_without_telling_where_it_is(server, folder):
    run = server.run()
    assert run["name"] == "made-up" and run["folder"] == "first"
    assert run["state"] == "running" and run["step"] == 1499 and run["steps"] == 10_000
    details = server.json(f"/runs/{run['id']}")
    assert details["latest"]["loss"] == pytest.approx(values(1499)["loss"])
    assert details["skipped_total"] == 30 and "entropy/1/3" in details["series"]
    assert str(folder) not in json.dumps([run, details])
    assert run["last_update_time"] > 0


def test_series_come_in_as_many_points_as_were_asked_for(server):
    path = f"/runs/{server.run()['id']}/series?name=loss&name=nonsense"
    few = server.json(f"{path}&points=10")
    assert 5 < len(few["steps"]) <= 10 and set(few["series"]) == {"loss", "nonsense"}
    assert set(few["series"]["nonsense"]["mean"]) == {None}
    Curves.model_validate(few)
    near = server.json(f"{path}&begin=100&end=110")
    assert near["resolution"] == 1 and near["steps"] == list(range(100, 110))
    assert near["series"]["loss"]["mean"][3] == pytest.approx(values(103)["loss"], rel=1e-6)


def test_heads_are_told_as_they_were_told_last(server):
    number = server.run()["id"]
    found = server.json(f"/runs/{number}/heads/entropy")
    assert found["values"] == probe(1499)["entropy"] and found["step"] == 1499
    assert server.ask(f"/api/v1/runs/{number}/heads/kl")[0] == 404
    rows = server.json("/metrics")
    assert [row["name"] for row in rows] == list(METRICS)
    assert rows[0].keys() == {"name", "unit", "meaning", "axes", "source"}


def test_documents_are_served_as_they_are(server):
    [plan] = server.json("/plans")
    assert server.json(f"/plans/{plan['id']}") == {"budget": 0.5, "deep": {"a": [1, None]}}
    [certificate] = server.json("/certificates")
    assert certificate["name"] == "tpu_v5e"
    assert "target" in json.dumps(server.json(f"/certificates/{certificate['id']}"))
    [rows] = server.json("/benchmarks")
    found = server.json(f"/benchmarks/{rows['id']}?count=2")
    assert len(found["rows"]) == 2 and not found["is_last"]


def test_the_page_and_its_files_are_served_with_a_strict_policy(server):
    status, headers, body = server.ask("/", token=False)
    assert status == 200 and b"/page/app.js" in body and b"<script>" not in body
    policy = headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and "Server" not in headers
    for name in ("app.js", "draw.js", "style.css", "icon.svg"):
        assert server.ask(f"/page/{name}", token=False)[0] == 200
    assert server.ask("/page/nothing.js")[0] == 404
    assert server.ask("/health", token=False)[0] == 200


@contextlib.contextmanager
def stream(server, number, token=True):
    """Server-sent events, as they come."""
    host = server.place.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    headers = {"Authorization": f"Bearer {server.token}"} if token else {}
    connection.request("GET", f"/api/v1/runs/{number}/events", headers=headers)
    answer = connection.getresponse()
    try:
        yield answer
    finally:
        connection.close()


def next_update(answer):
    while True:
        line = answer.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))


def test_a_run_that_goes_on_is_followed_live_and_turns_done(server, folder):
    number = server.run()["id"]
    with stream(server, number) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        answer.readline()
        metrics = write_run(folder / "runs" / "first", 1503, begin=1500)
        update = next_update(answer)
        while not update["lines"]:
            update = next_update(answer)
        assert update["summary"]["step"] >= 1500 and update["lines"][-1]["loss"]
        metrics.end_attempt("done")
        while update["summary"]["state"] != "done":
            update = next_update(answer)
    server.until(lambda: server.run()["state"] == "done", "done")
    server.until(lambda: not sample(server, "server_clients"), "no client")


def test_prometheus_reads_runs_by_ids_and_the_server_itself(server):
    status, headers, body = server.ask("/metrics")
    number = server.run()["id"]
    assert status == 200 and "version=0.0.4" in headers["Content-Type"]
    assert sample(server, "loss", run=number) > 0
    entropy = sample(server, "entropy", run=number, layer="1", head="3")
    assert entropy == probe(1499)["entropy"][1][3]
    assert sample(server, "run_info", run=number, name="made-up") == 1
    assert sample(server, "server_peak_memory_bytes") > 1e6
    assert b"NaN" not in body and b"# TYPE xsake_skipped_total counter" in body
    if shutil.which("promtool"):
        command = ["promtool", "check", "metrics"]
        done = subprocess.run(command, input=body, capture_output=True, check=False)
        assert done.returncode in (0, 3), done.stderr  # 3: about names, such as units in plurals
        assert b"error" not in done.stderr, done.stderr


def test_a_page_logs_in_with_a_cookie_that_is_not_the_token(server):
    path, origin = "/api/v1/session", {"Origin": server.place}
    status, headers, _ = server.ask(path, method="POST", headers=origin)
    cookie = headers["Set-Cookie"]
    assert status == 204 and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert server.token not in cookie
    worn = {"Cookie": cookie.partition(";")[0]}
    assert server.ask("/api/v1/runs", token=False, headers=worn)[0] == 200
    assert server.ask("/api/v1/runs", token=False)[0] == 401
    wrong = {"Authorization": "Bearer " + "x" * 43}
    assert server.ask(path, method="POST", token=False, headers=origin | wrong)[0] == 401


def test_new_runs_appear_and_a_silent_one_turns_stale(tmp_path):
    with served(tmp_path, token=None, token_folder=tmp_path) as server:
        assert server.json("/runs") == []
        write_run(tmp_path / "late", 5, name="../<b>")
        run = server.until(lambda: server.json("/runs"), "the run")[0]
        assert run["name"] == "late" and run["state"] == "running"
        old = time.time() - 3600
        os.utime(tmp_path / "late" / "metrics.jsonl", (old, old))
        server.until(lambda: server.run()["state"] == "stale", "stale")


def refusal(tmp_path, *options):
    done = CliRunner().invoke(app, ["serve", str(tmp_path), *options])
    assert done.exit_code == 2
    return done.output


def test_a_public_address_without_a_token_is_refused(tmp_path):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        for options in ((), ("--no-token",)):
            assert "without a token" in refusal(tmp_path, "--host", host, *options)


def test_a_token_that_could_be_guessed_is_refused(tmp_path):
    for token in ("", "short", "x" * 31, "x" * 40 + "\n y", "é" * 40):
        (tmp_path / "token").write_text(token)
        assert "token" in refusal(tmp_path, "--token-file", str(tmp_path / "token"))


def test_a_new_token_is_printed_once_behind_the_fragment(tmp_path):
    command = [*PROGRAM, "serve", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        place, _, token = process.stdout.readline().strip().partition("#token=")
        assert place.startswith("http://127.0.0.1:") and len(token) >= 43
    finally:
        process.terminate()
        assert process.wait(30) is not None
        process.stdout.close()
