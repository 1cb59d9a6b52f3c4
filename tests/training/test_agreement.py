"""Processes of one run with different settings, data or versions; F22 starts two of them."""

import shutil

from benchmarks.faults.runs import prepare
from tests.training.test_config import config
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
