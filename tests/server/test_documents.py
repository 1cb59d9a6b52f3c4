"""Documents of others: what is odd in them never makes the server fail, or its memory grow."""

import json
import threading
import time

import pytest

from tests.server.hostile_files import BIG
from tests.server.sample import served, write_run
from xsake.server.artifacts import MAX_BYTES

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
    (folder / "plan_large.json").write_text('{"a": [' + "[1]," * (2**23) + "1]}")  # 32 MiB
    (folder / "plan_many.json").write_text('{"a": [' + "{}," * ((MAX_BYTES - 99) // 3) + "1]}")
    lines = ['{"a": "\\ud800"}', "", f'{{"b": {BIG}}}', '{"c": NaN}']
    long = json.dumps({"long": "x" * (MAX_BYTES // 3)})
    (folder / "rows.jsonl").write_text("\n".join([*lines, *[long] * 5]))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as made:
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
def test_large_documents_are_refused_at_once_and_the_largest_have_a_bound(server):
    numbers = documents(server, "plans")
    begin = time.monotonic()
    assert server.ask(f"/api/v1/plans/{numbers['plan_large']}")[0] == 404
    assert time.monotonic() - begin < 5.0
    statuses = []

    def ask():
        statuses.append(server.ask(f"/api/v1/plans/{numbers['plan_many']}")[0])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 6
    assert server.memory()["VmHWM"] < 1000
