"""Processes of one run with different settings, data or versions: refused by all, by name."""

import contextlib
import json
import shutil
import socket

import pytest

from benchmarks.faults.runs import prepare
from tests.training.test_config import config
from xsake.errors import ArgumentError
from xsake.training import agreement
from xsake.training.processes import BIND, COORDINATOR, LOOPBACK, PROCESS, PROCESSES


def test_a_setting_is_named_with_the_processes_and_their_values():
    facts = [agreement.settings(config()) for _ in range(4)]
    assert agreement.differences(facts) == []
    facts[2] = agreement.settings(config("optimizer.peak_learning_rate=2e-2", "data.seed=4"))
    assert agreement.differences(facts) == [
        "data.seed: processes 0, 1, 3 have 0, process 2 has 4",
        "optimizer.peak_learning_rate: processes 0, 1, 3 have 0.01, process 2 has 0.02",
    ]


def test_a_value_that_a_process_does_not_have_is_a_difference():
    assert agreement.differences([{"a": 1}, {}]) == ["a: process 0 has 1, process 1 has nothing"]


def test_a_long_list_of_processes_is_cut_to_its_runs():
    facts = [{"a": 0} for _ in range(256)]
    facts[7] = facts[200] = {"a": "x" * 500}
    (line,) = agreement.differences(facts)
    assert line.startswith("a: processes 0-6, 8-199, 201-255 have 0, processes 7, 200 have 'xxx")
    assert len(line) < 250


def test_the_folder_of_the_data_may_be_another_on_every_process():
    facts = [agreement.settings(config(f'data.folder="{folder}"')) for folder in ("a", "b")]
    assert agreement.differences(facts) == []


def test_data_that_one_process_cannot_read_is_a_difference_and_no_end(tmp_path):
    ground = prepare(tmp_path)
    there = agreement.contents(config(f'data.folder="{ground.folder / "data"}"'))
    missing = agreement.contents(config(f'data.folder="{ground.folder}"'))
    lines = agreement.differences([there, missing])
    assert lines and all("process 1 has 'the folder has no data" in line for line in lines)


def test_a_file_of_the_attention_is_compared_by_its_content(tmp_path):
    facts = []
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        facts.append(
            agreement.contents(
                config('attention.kind="plan"', f'attention.plan="{tmp_path / name}"')
            )
        )
    assert [line.partition(":")[0] for line in agreement.differences(facts)] == [
        "content of attention.plan"
    ]


def test_one_process_agrees_with_itself():
    agreement.require(config(), gather=None)


def test_the_error_says_what_differs():
    with pytest.raises(ArgumentError, match=r"(?s)processes of this run.*data\.seed: process 0"):
        raise agreement.disagreement_error(["data.seed: process 0 has 1, process 1 has 2"])


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
