"""Files of one run never stop the others, are counted, and are never written."""

import hashlib
import json
import math
import os
import threading
import time

import pytest

from tests.server.hostile_files import FOLDERS, GOOD, LINES
from tests.server.sample import inside, sample, samples, write_run
from xsake.server import runs
from xsake.server.runs import Poller
from xsake.server.settings import ServerSettings
from xsake.server.stream import Broadcaster

ODD_NAME = b"not \xff UTF-8"


def snapshot(folder):
    """Everything below a folder: kinds, sizes, contents."""
    found = {}
    for parent, folders, files in os.walk(os.fsencode(folder)):
        for name in [*folders, *files]:
            path = os.path.join(parent, name)
            about = os.lstat(path)
            content = b""
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "blake2b").digest()
            found[path] = (about.st_mode, content)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("isolated")
    folder = root / "runs"
    write_run(folder / "healthy", 200, name="healthy")
    for number, (lines, _, _) in enumerate(LINES.values()):
        (folder / f"line-{number}").mkdir()
        text = lines.encode() if isinstance(lines, str) else lines
        path = folder / f"line-{number}" / "metrics.jsonl"
        path.write_bytes(GOOD.encode() + text + GOOD.encode())
    for number, plant in enumerate(FOLDERS.values()):
        (folder / f"folder-{number}").mkdir()
        (folder / f"folder-{number}" / "metrics.jsonl").write_text(GOOD * 60)
        plant(folder / f"folder-{number}", root / f"victim-{number}")
    os.mkdir(os.path.join(os.fsencode(folder), ODD_NAME))
    with open(os.path.join(os.fsencode(folder), ODD_NAME, b"metrics.jsonl"), "w") as file:
        file.write(GOOD)
    with open(os.path.join(os.fsencode(folder), b"plan \xff.json"), "w") as file:
        file.write("{}")
    return folder


@pytest.fixture(scope="module")
def before(folder):
    return snapshot(folder.parent)


@pytest.fixture(scope="module")
def server(folder, before, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    settings = ServerSettings((folder,), requests_per_second=1e5, port=0, cache=cache)
    with inside(settings) as made:
        is_done = lambda: all(run["is_indexed"] for run in made.json("/runs"))
        made.until(is_done, "all runs are read")
        yield made


def named(server, name):
    [found] = [run for run in server.json("/runs") if run["folder"] == name]
    return found


def readable(server, run):
    """All that the API says of a run."""
    details = server.json(f"/runs/{run['id']}")
    query = "name=loss&name=entropy/0/0"
    for more in ("", "&begin=0&end=50", "&points=2"):
        server.json(f"/runs/{run['id']}/series?{query}{more}")
    return details


@pytest.mark.parametrize("number", range(len(LINES)), ids=list(LINES))
def test_a_hostile_line_is_counted_and_its_run_stays_readable(server, number):
    _, num_lines, num_values = list(LINES.values())[number]
    run = named(server, f"line-{number}")
    assert (run["dropped_lines"], run["dropped_values"]) == (num_lines, num_values)
    assert run["problem"] is None and run["state"] != "unreadable"
    assert readable(server, run)["latest"]["loss"] == 5.0


@pytest.mark.parametrize("number", range(len(FOLDERS)), ids=list(FOLDERS))
def test_a_hostile_folder_is_read_and_its_run_stays_readable(server, number):
    run = named(server, f"folder-{number}")
    assert run["problem"] is None and readable(server, run)["latest"]["loss"] == 5.0


def test_a_folder_whose_name_is_not_utf_8_is_shown(server):
    run = named(server, "not _ UTF-8")
    assert readable(server, run)["step"] == 4
    assert [plan["name"] for plan in server.json("/plans")] == ["plan \ufffd"]


def test_the_others_stay_live_and_the_counts_are_everywhere(server, folder):
    write_run(folder / "healthy", 220, begin=200, name="healthy")
    server.until(lambda: named(server, "healthy")["step"] == 219, "the healthy run is live")
    num_lines = sum(lines for _, lines, _ in LINES.values())
    num_values = sum(values for _, _, values in LINES.values())
    status = server.json("/status")
    assert (status["dropped_lines"], status["dropped_values"]) == (num_lines, num_values)
    assert status["runs"] == len(LINES) + len(FOLDERS) + 2
    assert status["runs_unreadable"] == 0 and status["problem"] is None
    assert sum(samples(server, "run_lines_dropped_total")) == num_lines
    assert sample(server, "server_runs_unreadable") == 0
    assert -1 < time.time() - sample(server, "server_watcher_last_round_seconds") < 30


def test_nothing_is_written_into_folders_of_runs(server, folder, before):
    after = snapshot(folder.parent)
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    assert [os.path.basename(os.path.dirname(path)) for path in changed] in ([], [b"healthy"])


def test_a_run_that_cannot_be_read_says_why_and_comes_back(tmp_path):
    write_run(tmp_path / "healthy", 50, name="healthy")
    write_run(tmp_path / "broken", 50, name="broken")
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        server.dashboard.poller._scan_at = math.inf  # a search would no longer find the run
        path = tmp_path / "broken" / "metrics.jsonl"
        path.rename(tmp_path / "kept")
        path.symlink_to(tmp_path / "kept")
        server.until(lambda: named(server, "broken")["state"] == "unreadable", "a reason")
        broken = named(server, "broken")
        assert broken["problem"] == "Not a regular file"
        assert server.json("/status")["runs_unreadable"] == 1
        assert server.ask(f"/api/v1/runs/{broken['id']}/series?name=loss")[0] == 404
        assert sample(server, "server_runs_unreadable") == 1
        assert sample(server, "run_state", run=broken["id"], state="unreadable") == 1
        write_run(tmp_path / "healthy", 60, begin=50, name="healthy")
        server.until(lambda: named(server, "healthy")["step"] == 59, "the other run is live")
        path.unlink()
        (tmp_path / "kept").rename(path)
        server.until(lambda: named(server, "broken")["state"] != "unreadable", "it comes back")


def fail(run, error):
    """Make `advance` of a run raise; `del run.advance` ends it."""

    def advance():
        raise error

    run.advance = advance


def test_an_error_inside_a_run_is_its_own(tmp_path):
    write_run(tmp_path / "one", 50, name="one")
    write_run(tmp_path / "two", 50, name="two")
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        run = next(x for x in server.dashboard.poller.runs.values() if x.name == "one")
        run._advance = lambda: {}["no such key"]
        server.until(lambda: named(server, "one")["state"] == "unreadable", "a reason")
        assert named(server, "one")["problem"].startswith("KeyError")
        write_run(tmp_path / "two", 60, begin=50, name="two")
        server.until(lambda: named(server, "two")["step"] == 59, "the other run is live")
        failures = run.num_failures
        del run._advance
        server.until(lambda: named(server, "one")["state"] == "running", "it comes back")
        assert failures >= 1 and run.num_rebuilt <= 1


def test_a_thread_that_ends_is_started_again(tmp_path, monkeypatch):
    write_run(tmp_path / "one", 50, name="one")
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        [run] = server.dashboard.poller.runs.values()
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        fail(run, SystemExit())
        server.until(lambda: server.dashboard.poller.num_failures, "the end is noticed")
        del run.advance
        write_run(tmp_path / "one", 60, begin=50, name="one")
        server.until(lambda: server.run()["step"] == 59, "it is read again")
        assert sample(server, "server_watcher_failures_total") >= 1


def test_ready_says_when_runs_are_no_longer_read(tmp_path, monkeypatch):
    write_run(tmp_path / "one", 50, name="one")
    monkeypatch.setattr(runs, "MAX_ROUND_SECONDS", 0.8)
    with inside(ServerSettings((tmp_path,), port=0)) as server:
        assert json.loads(server.ask("/ready")[2])["status"] == "ok"
        [run] = server.dashboard.poller.runs.values()
        fail(run, ValueError("in every round"))
        status, _, body = server.until(
            lambda: (x := server.ask("/ready"))[0] == 503 and x, "not ready"
        )
        assert json.loads(body)["status"] == "stale" and "last round" in json.loads(body)["reason"]
        assert server.ask("/health")[0] == 200
        del run.advance
        server.until(lambda: server.ask("/ready")[0] == 200, "ready again")


def test_a_server_that_has_not_read_all_runs_is_not_ready(tmp_path):
    write_run(tmp_path / "one", 5)
    watcher = Poller(ServerSettings((tmp_path,)), Broadcaster(1))
    assert watcher.problem == "the first poll of all runs is not finished"
    watcher.stop()
