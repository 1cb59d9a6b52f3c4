"""Odd documents and too many runs never make the server fail, or its memory grow."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.hostile_files import BIG
from tests.server.sample import inside, sample, served, values, write_run
from xsake.server import artifacts
from xsake.server.artifacts import MAX_BYTES
from xsake.server.settings import ServerSettings

PLANS = {
    "surrogate": '{"name": "\\ud800"}',
    "digits": f'{{"number": {BIG}}}',
    "float": '{"number": 1e999}',
    "utf16": '{"a": 1}'.encode("utf-16"),
    "mark": b'\xef\xbb\xbf{"a": 1}',
    "latin": b'{"a": "\xe9"}',
    "nan": '{"a": [1, NaN, -Infinity], "b": "\\ud800"}',
}
ANSWERS = {"utf16": 404, "mark": 404, "latin": 404}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents") / "work"
    write_run(folder / "run", 20)
    (folder / "run" / "config.json").write_text(
        f'{{"huge": {BIG}, "half \\ud800": "half \\ud800", "deep": {"[" * 30}{"]" * 30}, "a": 1}}'
    )
    for name, text in PLANS.items():
        content = text.encode() if isinstance(text, str) else text
        (folder / f"plan_{name}.json").write_bytes(content)
    lines = ['{"a": "\\ud800"}', "", f'{{"b": {BIG}}}', '{"c": NaN}']
    long = json.dumps({"long": "x" * (MAX_BYTES // 3)})
    (folder / "rows.jsonl").write_text("\n".join([*lines, *[long] * 5]))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with inside(ServerSettings((folder,), port=0)) as made:
        yield made


def documents(server, kind):
    return {found["name"]: found["id"] for found in server.json(f"/{kind}")}


@pytest.mark.parametrize("name", PLANS)
def test_odd_documents_are_sent_or_refused(server, name):
    number = documents(server, "plans")[f"plan_{name}"]
    status, headers, body = server.ask(f"/api/v1/plans/{number}")
    assert status == ANSWERS.get(name, 200), body
    assert headers["Content-Type"].startswith("application/json")
    assert isinstance(json.loads(body), dict)
    if name == "nan":
        assert json.loads(body)["a"] == [1, None, None]


def test_odd_rows_are_sent_and_long_ones_in_parts(server):
    number = documents(server, "benchmarks")["rows"]
    found, begin = [], 0
    for _ in range(9):
        page = server.json(f"/benchmarks/{number}?begin={begin}&count=500")
        assert page["rows"] and page["begin"] == begin
        found += page["rows"]
        begin += len(page["rows"])
        if page["is_last"]:
            break
    assert len(found) == 8 and found[2] == {"c": None} and len(found[-1]["long"]) > 1e6


def test_odd_settings_of_a_run_are_shown_as_far_as_they_can_be(server):
    config = server.json(f"/runs/{server.run()['id']}")["config"]
    assert config["huge"] is None and config["a"] == 1


@pytest.mark.slow  # quicker: small documents
def test_large_documents_are_refused_at_once_and_the_largest_have_a_bound(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "plan_large.json").write_text('{"a": [' + "[1]," * (2**23) + "1]}")  # 32 MiB
    (folder / "plan_many.json").write_text('{"a": [' + "{}," * ((MAX_BYTES - 99) // 3) + "1]}")
    with served(folder) as server:
        numbers = documents(server, "plans")
        begin = time.monotonic()
        assert server.ask(f"/api/v1/plans/{numbers['plan_large']}")[0] == 404
        assert time.monotonic() - begin < 5.0
        ask = lambda _: server.ask(f"/api/v1/plans/{numbers['plan_many']}")[0]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == [200] * 6
        assert server.memory()["VmHWM"] < 1000


NUM_RUNS = 1000


@pytest.mark.slow  # quicker: what is beyond a limit is said
def test_a_thousand_runs_are_all_shown_and_no_file_stays_open(tmp_path):
    text = "".join(json.dumps({"step": i, **values(i)}) + "\n" for i in range(20))
    for number in range(NUM_RUNS):
        (tmp_path / "work" / f"run-{number}").mkdir(parents=True)
        (tmp_path / "work" / f"run-{number}" / "metrics.jsonl").write_text(text)
    for number in range(20_001):  # more files than one search used to read
        (tmp_path / "work" / f"other-{number}").touch()
    with served(tmp_path / "work") as server:
        assert len(server.json("/runs")) == NUM_RUNS
        status = server.json("/status")
        assert status["runs"] == NUM_RUNS and status["runs_left_out"] == 0
        assert not status["is_search_cut"]
        assert server.ask("/metrics")[2].count(b"xsake_run_info{") == NUM_RUNS
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 64
        with (tmp_path / "work" / "run-777" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 20, "loss": 1.0}\n')
        server.until(lambda: max(x["step"] for x in server.json("/runs")) == 20, "it is live")


def test_what_is_beyond_a_limit_is_said_on_the_page_and_in_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "MAX_ARTIFACTS", 3)
    for number in range(5):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "metrics.jsonl").write_text('{"step": 0}\n')
        (tmp_path / f"plan_{number}.json").write_text("{}")
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        status = server.json("/status")
        assert (status["runs"], status["runs_left_out"]) == (3, 2)
        assert status["documents_left_out"] == 2 and not status["is_search_cut"]
        assert sample(server, "server_runs_left_out") == 2
    monkeypatch.setattr(artifacts, "MAX_ENTRIES", 4)
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        assert server.json("/status")["is_search_cut"]
        assert sample(server, "server_search_is_cut") == 1
