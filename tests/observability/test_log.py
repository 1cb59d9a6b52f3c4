"""Metrics of a run: whole lines whatever the disk does and if the writer is killed."""

import itertools
import json
import pathlib
import resource
import time

import pytest

from tests import processes
from xsake.observability import METRICS, MetricsFile, flatten_metrics, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps_of(path):
    return [line["step"] for line in read_metrics(path)]


def test_a_run_that_goes_back_does_steps_again_and_the_file_only_grows(path):
    metrics = MetricsFile(path)
    metrics.start_attempt(0)
    for step in range(5):
        metrics.add(step, validation_loss=1.0)
        metrics.add(step, loss=float(step))
    before = path.read_bytes()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    metrics = MetricsFile(path)
    metrics.start_attempt(3)
    assert steps_of(path) == [0, 0, 1, 1, 2, 2]
    metrics.add(3, loss=33.0)
    metrics.end_attempt("done")
    assert [line["loss"] for line in read_metrics(path) if "loss" in line] == [0, 1, 2, 33]
    assert path.read_bytes().startswith(before)


def test_metrics_of_0_1_0_are_read_under_their_current_names(path):
    path.write_text('{"step": 0, "loss": 1.0, "skips": 2, "budget": 0.5}\n'
                    '{"step": 0, "kept_mass": [[0.5]], "kept_least": [[0.25]], "kl": [[0.7]], '
                    '"budget_spent": [[0.3]], "drift": 1.5, "heads_lost": 1}\n')  # fmt: skip
    step, probe = read_metrics(path)
    assert step == {"step": 0, "loss": 1.0, "consecutive_skips": 2, "budget": 0.5}
    assert probe == {
        "step": 0, "attn_mass_recall": [[0.5]], "attn_mass_recall_min": [[0.25]], "kl": [[0.7]],
        "block_density": [[0.3]], "drift": 1.5, "drifted_heads": 1,
    }  # fmt: skip
    assert all(name in METRICS for line in (step, probe) for name in line.keys() - {"step"})


def test_numbers_that_are_not_finite_become_null(path):
    MetricsFile(None).add(0, loss=1.0)  # not the primary process: writes nothing
    assert not list(path.parent.iterdir())
    MetricsFile(path).add(0, loss=float("nan"), entropy=[[float("inf"), 1.0]])
    assert read_metrics(path) == [{"step": 0, "loss": None, "entropy": [[None, 1.0]]}]


def test_a_disk_without_room_delays_lines_and_loses_none(path):
    """A real limit of the system, in the middle of a line."""
    metrics = MetricsFile(path)
    metrics.add(0, loss=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.warns(RuntimeWarning, match="cannot write metrics, will retry") as warned:
            for step in (1, 2, 3):
                metrics.add(step, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(warned) == 1
    assert steps_of(path) == [0]
    metrics.add(4, loss=1.0)
    assert steps_of(path) == [0, 1, 2, 3, 4]


def write_steps(path):
    metrics = MetricsFile(path)
    for step in itertools.count():
        metrics.add(step, entropy=[[0.123456] * 512] * 8)


def test_a_kill_in_the_middle_of_a_write_loses_at_most_the_last_line(path):
    writer = processes.start(write_steps, path)
    try:
        while not path.exists() or path.stat().st_size < 2**20:
            assert writer.is_alive()
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.join()
    whole = path.read_bytes().count(b"\n")
    assert steps_of(path) == list(range(whole))
    MetricsFile(path).add(whole, loss=1.0)  # the next attempt starts a line of its own
    assert steps_of(path) == list(range(whole + 1))


def test_lines_of_others_are_no_lines(path):
    odd = ["", "7", "null", "[" * 5000, '{"step": true}', '{"step": -1}', '{"event": "began"}', "~"]
    path.write_text("\n".join([*odd, json.dumps({"step": 1})]) + "\n")
    assert read_metrics(path) == [{"step": 1}]


def test_metrics_have_units_and_meanings_and_the_documentation_has_their_table():
    table = "| name | unit | by | description | source |\n|---|---|---|---|---|\n"
    for name, metric in METRICS.items():
        assert name == metric.name and name.isidentifier() and name.islower()
        assert metric.unit and metric.meaning and not metric.meaning.endswith(".")
        assert "|" not in metric.unit
        meaning, by = metric.meaning.replace("|", r"\|"), " and ".join(metric.axes)
        table += f"| `{name}` | {metric.unit} | {by} | {meaning} | {metric.source} |\n"
    page = (pathlib.Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    assert page.partition("<!-- metrics -->\n")[2].partition("<!-- /metrics -->")[0] == table


def test_only_finite_numbers_of_known_metrics_become_series():
    line = {"step": 3, "loss": None, "kl": [[1.0, None], [2.0]], "windows": [1], "entropy": 4.0}
    assert flatten_metrics(line) == {"kl/0/0": 1.0, "kl/1/0": 2.0}
