"""Settings by their names of 0.1.0: from TOML, overrides, config.json and checkpoints."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.training.test_config import config
from xsake.errors import ArgumentError
from xsake.training.config import RENAMED, TrainingConfig, rename_settings
from xsake.training.reliability import require_consistent, require_same_run

OLD_RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "training" / "small_plan"
OLD_JSON = (OLD_RUN / "config.json").read_text()
DIGEST = "e9885e855ba47682ca24b59244e9dd3826cee0798504d156dc10c5ecf0a2d109"
"""Of the run by the names of 0.1.0, which profiles and plans of earlier runs depend on."""

VALUES = {
    "compute": '"bfloat16"', "undecayed": '["norms"]', "undecayed_axes": '["vocab"]',
    "undecayed_paths": '["head"]', "is_rematerialised": "true", "is_balanced": "false",
    "is_on": "false", "final_share": "0.25", "sigmas": "3.5", "seconds": "2.5",
    "hang_seconds": "1.5",
}  # fmt: skip
PLAN = ('attention.kind="plan"', "attention.budget=0.8", "attention.block=8")
NAMES = [(section, *pair) for section, names in RENAMED.items() for pair in names.items()]


def test_a_run_of_0_1_0_has_the_settings_that_it_had():
    document, old = json.loads(OLD_JSON), TrainingConfig.from_json(OLD_JSON)
    used = [name for section, name, _ in NAMES if name in document[section]]
    assert len(used) == len(NAMES) - 1  # track.seconds came later
    new = {section: dict(values) for section, values in document.items()}
    for section, name, current in NAMES:
        if name in new[section]:
            new[section][current] = new[section].pop(name)
            assert getattr(getattr(old, section), current) is not None
    assert new == rename_settings(document) != document
    assert TrainingConfig.from_dict(new) == TrainingConfig.from_dict(document) == old
    assert (old.checkpoint.save_interval, old.attention.probe_interval) == (50, 10)
    assert (old.attention.recalibration_interval, old.run.eval_interval) == (100, 25)
    assert (old.guard.zscore_threshold, old.model.compute_dtype) == (6.0, "float32")


def test_a_toml_file_of_0_1_0_is_the_same_run_under_current_names(tmp_path):
    text = (OLD_RUN / "run.toml").read_text()
    old = TrainingConfig.read(OLD_RUN / "run.toml")
    for section, name, current in NAMES:
        if name in tomllib.loads(text).get(section, {}):
            head, _, rest = text.partition(f"[{section}]")
            text = f"{head}[{section}]" + rest.replace(f"\n{name} = ", f"\n{current} = ", 1)
    (tmp_path / "run.toml").write_text(text)
    assert "probe_interval = " in text and "probe_every" not in text
    assert TrainingConfig.read(tmp_path / "run.toml") == old
    assert old.model_dump(exclude={"model"}) == TrainingConfig.from_json(OLD_JSON).model_dump(
        exclude={"model"}
    )


@pytest.mark.parametrize(("section", "old", "new"), NAMES, ids=lambda name: name)
def test_an_override_by_its_old_name_replaces_the_current_one(section, old, new):
    plan = PLAN if section == "attention" else ()
    value = VALUES.get(old, "7" if old != "accumulation" else "4")
    by_old = config(*plan, f"{section}.{old}={value}")
    assert by_old == config(*plan, f"{section}.{new}={value}") != config(*plan)
    document = json.loads(by_old.to_json())
    assert new in document[section] and old not in document[section]
    assert TrainingConfig.from_dict(document, [f"{section}.{old}={value}"]) == by_old


def test_a_setting_under_both_names_is_an_error():
    document = json.loads(OLD_JSON)
    document["guard"]["zscore_threshold"] = 6.0
    for read in (TrainingConfig.from_dict, lambda x: TrainingConfig.from_json(json.dumps(x))):
        with pytest.raises(ArgumentError, match=r"given twice(?s:.*)guard\.sigmas and guard\.zsc"):
            read(document)


def test_a_run_of_0_1_0_can_be_resumed(tmp_path):
    (tmp_path / "config.json").write_text(OLD_JSON)
    (tmp_path / "metrics.jsonl").touch()
    new = TrainingConfig.from_dict(rename_settings(json.loads(OLD_JSON)))
    extra = {"data": {"step": 5}, "attention": {}, "config": json.loads(OLD_JSON)}
    require_same_run(new, tmp_path)
    require_consistent(5, extra, new)
    other = TrainingConfig.from_dict(json.loads(OLD_JSON), ["guard.sigmas=7.0"])
    (tmp_path / "config.json").write_text(OLD_JSON)
    with pytest.raises(ArgumentError, match=r"different in guard\.zscore_threshold\n"):
        require_same_run(other, tmp_path)


def test_the_digest_of_a_run_does_not_depend_on_the_names():
    old = TrainingConfig.from_json(OLD_JSON)
    assert TrainingConfig.from_json(old.to_json()).digest == old.digest == DIGEST
    assert config("guard.sigmas=7.0").digest != config().digest
