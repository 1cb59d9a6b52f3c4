"""Many runs, and runs that were started many times."""

import json
import os

import pytest

from tests.server.sample import inside, served, values
from tests.server.test_index import agree, index_folder
from xsake.server import registry
from xsake.server.index import MetricsIndex
from xsake.server.settings import ServerSettings

NUM_RUNS = 1000


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
    monkeypatch.setattr(registry, "MAX_ARTIFACTS", 3)
    for number in range(5):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "metrics.jsonl").write_text('{"step": 0}\n')
        (tmp_path / f"plan_{number}.json").write_text("{}")
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        status = server.json("/status")
        assert (status["runs"], status["runs_left_out"]) == (3, 2)
        assert status["documents_left_out"] == 2 and not status["is_search_cut"]
        assert b"xsake_server_runs_left_out 2.0" in server.ask("/metrics")[2]
    monkeypatch.setattr(registry, "MAX_ENTRIES", 4)
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        assert server.json("/status")["is_search_cut"]
        assert b"xsake_server_search_is_cut 1.0" in server.ask("/metrics")[2]


@pytest.mark.parametrize("first", [0, 1, 70])
def test_a_run_that_was_started_a_thousand_times_is_read_about_once(tmp_path, first):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": step, "loss": float(step)} for step in range(first)]
    for number in range(1000):
        lines.append({"event": "began", "from_step": first})
        lines += [{"step": first + i, "loss": number + i} for i in range(2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index, num_read = MetricsIndex(folder / "metrics.jsonl", index_folder(folder)), 0
    while not index.is_at_end:
        index.feed(1)
        num_read += 1
    assert num_read < 2 * len(lines)
    agree(index, folder, "loss", 0, 2**50, 200)
    assert not index_folder(folder).exists() or first >= 64  # nothing is written for each of them
