"""Processes of one run with different settings, data or versions: refused by all, by name."""

import contextlib
import json
import shutil
import socket

import pytest

from benchmarks.faults.runs import prepare
from tests.training.test_config import config
from xsake.training.processes import BIND, COORDINATOR, LOOPBACK, PROCESS, PROCESSES
from xsake.training.reliability import collect_facts, list_differences


def test_a_setting_is_named_with_the_processes_and_their_values():
    facts = [collect_facts(config()) for _ in range(4)]
    assert list_differences(facts) == []
    facts[2] = collect_facts(config("optimizer.peak_learning_rate=2e-2", "data.seed=4"))
    assert list_differences(facts) == [
        "data.seed: processes 0, 1, 3 have 0, process 2 has 4",
        "optimizer.peak_learning_rate: processes 0, 1, 3 have 0.01, process 2 has 0.02",
    ]


def test_values_are_compared_by_presence_and_long_lists_are_cut():
    assert list_differences([{"a": 1}, {}]) == ["a: process 0 has 1, process 1 has nothing"]
    facts = [{"a": 0} for _ in range(256)]
    facts[7] = facts[200] = {"a": "x" * 500}
    (line,) = list_differences(facts)
    assert line.startswith("a: processes 0-6, 8-199, 201-255 have 0, processes 7, 200 have 'xxx")
    assert len(line) < 250


def test_data_and_plans_are_compared_by_content_wherever_they_are(tmp_path):
    data = prepare(tmp_path).folder / "data"
    shutil.copytree(data, tmp_path / "copy")
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    facts = [
        collect_facts(
            config(f'data.folder="{folder}"', 'attention.kind="plan"', f'attention.plan="{plan}"')
        )
        for folder, plan in ((data, tmp_path / "a"), (tmp_path / "copy", tmp_path / "b"))
    ]
    assert [line.partition(":")[0] for line in list_differences(facts)] == [
        "attention.plan",
        "content of attention.plan",
    ]
    missing = collect_facts(config(f'data.folder="{tmp_path}"'))
    lines = list_differences([collect_facts(config(f'data.folder="{data}"')), missing])
    assert lines and all("process 1 has 'the folder has no data" in line for line in lines)


@contextlib.contextmanager
def a_pair(ground, *different):
    """Two processes of one run; the second with other settings."""
    with contextlib.ExitStack() as stack, socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        place = f"{LOOPBACK}:{probe.getsockname()[1]}"
        probe.close()
        run = ground.run("pair", "mesh.data=2")
        yield [
            stack.enter_context(
                made.started(
                    variables={
                        COORDINATOR: place, PROCESSES: "2", PROCESS: str(rank), BIND: LOOPBACK,
                    }
                )
            )
            for rank, made in enumerate((run, run.different(*different)))
        ]  # fmt: skip


@pytest.mark.timeout(300)
def test_a_stale_file_on_one_host_ends_both_processes(tmp_path):
    ground = prepare(tmp_path)
    other = tmp_path / "other-data"
    shutil.copytree(tmp_path / "data", other)
    index = json.loads((other / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["blake2b"] = "0" * 64
    (other / "index.json").write_text(json.dumps(index))
    settings = "optimizer.peak_learning_rate=2e-3", f'data.folder="{other}"'
    with a_pair(ground, *settings) as both:
        for started in both:
            started.ended()
    text = (tmp_path / "pair.log").read_text()
    assert [started.process.returncode for started in both] == [2, 2], text[-3000:]
    line = "optimizer.peak_learning_rate: process 0 has 0.001, process 1 has 0.002"
    assert text.count(line) == 2  # both say it
    assert text.count("digest of data (train): process 0 has ") == 2
    assert "data.folder:" not in text
    assert not (tmp_path / "pair" / "metrics.jsonl").exists()
