"""Many runs, and more than are shown."""

import json
import os

import pytest

from tests.server.sample import inside, sample, served, values
from xsake.server import artifacts
from xsake.server.settings import ServerSettings

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
