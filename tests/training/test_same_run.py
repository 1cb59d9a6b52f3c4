"""Which settings a run may be resumed with, and what must still be there."""

import json

import pytest

from tests.training.test_config import config
from xsake.errors import ArgumentError, CheckpointError
from xsake.training.reliability import require_consistent, require_same_run, require_saves

LONG = "optimizer.total_steps=100"


def test_a_run_that_has_begun_keeps_its_settings(tmp_path):
    require_same_run(config(LONG), tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    require_same_run(config('data.folder="elsewhere"', 'data.verify="size"', LONG), tmp_path)
    require_same_run(config("run.steps=77", "run.log_interval=3", LONG), tmp_path)
    assert '"steps": 77' in (tmp_path / "config.json").read_text()
    with pytest.raises(ArgumentError, match=r"different in data\.seed, run\.eval_interval\n"):
        require_same_run(config("data.seed=5", "run.eval_interval=7", LONG), tmp_path)


def test_a_run_that_failed_before_its_first_step_may_change_everything(tmp_path):
    require_same_run(config("data.seed=4"), tmp_path)
    require_same_run(config("data.seed=5"), tmp_path)
    (tmp_path / "steps" / "10").mkdir(parents=True)
    with pytest.raises(ArgumentError, match=r"data\.seed"):
        require_same_run(config("data.seed=6"), tmp_path)


@pytest.mark.parametrize("steps", [60, 120])
def test_a_schedule_that_ends_with_the_run_keeps_its_end(tmp_path, steps):
    require_same_run(config(), tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(
        ArgumentError, match=rf"(?s)would jump.*run\.steps={steps}.*total_steps=100"
    ):
        require_same_run(config(f"run.steps={steps}"), tmp_path)
    require_same_run(config(LONG), tmp_path)
    require_same_run(config("run.steps=60", LONG), tmp_path)


def write_metrics(folder, steps, *events, **values):
    lines = [{"event": "began", "from_step": 0}, *({"step": n, **values} for n in range(steps))]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, *events])
    (folder / "metrics.jsonl").write_text(text)


def test_checkpoints_that_must_have_been_there_are_missed(tmp_path):
    for steps in (0, 9, 20):  # killed before the first save was complete
        write_metrics(tmp_path, steps)
        require_saves(tmp_path, 10)
    write_metrics(tmp_path, 21)
    with pytest.raises(ArgumentError, match=r"(?s)are missing.*steps up to 20.*delete .*metrics"):
        require_saves(tmp_path, 10)
    require_saves(tmp_path, 0)  # saves at its end only
    require_saves(tmp_path, 1000)
    (tmp_path / "steps" / "10").mkdir(parents=True)
    require_saves(tmp_path, 10)


def test_checkpoints_of_a_run_that_ended_are_missed_and_of_one_that_could_not_save_are_not(
    tmp_path,
):
    write_metrics(tmp_path, 5, {"event": "ended", "ending": "done"})
    with pytest.raises(ArgumentError, match="XSK-102.lost-checkpoints"):
        require_saves(tmp_path, 1000)
    write_metrics(tmp_path, 50, {"event": "ended", "ending": "failed"}, failed_saves=2)
    require_saves(tmp_path, 10)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "has no state of the data"),
        ({"data": 5, "attention": {}}, "has no state of the data"),
        ({"data": {"step": 40}}, "has no state of the data"),
        ({"data": {"step": 7}, "attention": {}}, "is inconsistent"),
        ({"data": {}, "attention": {}}, "is inconsistent"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(extra, words):
    with pytest.raises(CheckpointError, match=f"the checkpoint of step 40 {words}"):
        require_consistent(40, extra, config())


def test_the_settings_in_a_checkpoint_are_compared():
    extra = {"data": {"step": 40}, "attention": {}}
    require_consistent(40, extra, config("data.seed=4"))
    extra["config"] = json.loads(config().to_json())
    require_consistent(40, extra, config())
    with pytest.raises(ArgumentError, match=r"(?s)data\.seed.*the checkpoint of step 40"):
        require_consistent(40, extra, config("data.seed=4"))
