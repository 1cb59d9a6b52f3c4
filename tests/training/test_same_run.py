"""Which settings a run may go on with: its own, unless it has never begun."""

import pytest

from tests.training.test_config import config
from xsake.errors import ArgumentError
from xsake.training.train import _require_same_run


def test_a_run_that_has_begun_keeps_its_settings(tmp_path):
    _require_same_run(config(), tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    _require_same_run(config("run.steps=77", "run.log_every=3"), tmp_path)
    assert '"steps": 77' in (tmp_path / "config.json").read_text()
    with pytest.raises(ArgumentError, match=r"different in data\.seed, run\.evaluate_every\n"):
        _require_same_run(config("data.seed=5", "run.evaluate_every=7"), tmp_path)


def test_a_run_that_failed_before_its_first_step_may_change_everything(tmp_path):
    _require_same_run(config("data.seed=4"), tmp_path)
    _require_same_run(config("data.seed=5"), tmp_path)
    (tmp_path / "steps" / "10").mkdir(parents=True)
    with pytest.raises(ArgumentError, match=r"data\.seed"):
        _require_same_run(config("data.seed=6"), tmp_path)
