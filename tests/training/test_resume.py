"""Real runs that find other data, another schedule or no checkpoints when they are resumed."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.faults.runs import prepare
from xsake.observability import read_metrics
from xsake.training import verify

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("resume"), is_inside=True)


@pytest.fixture(scope="module")
def done(ground):
    """20 steps of a run, saved every 10."""
    run = ground.run("done", "run.steps=20")
    run.train()
    return run


def resume(run, *settings, code=2):
    return run.different("run.steps=30", *settings).train(code=code).text


@pytest.fixture
def changed(ground, tmp_path):
    """The data with 1000 other tokens in a file of the same size."""
    folder = tmp_path / "data"
    shutil.copytree(ground.folder / "data", folder)
    path = folder / "train-00000.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[1000:2000] = (tokens[1000:2000] + 7) % 300
    tokens.tofile(path)
    return f'data.folder="{folder}"'


def test_a_new_run_refuses_tokens_that_were_changed(ground, changed):
    text = ground.run("new").different(changed).train(code=2).text
    assert "a shard is damaged" in text and "train-00000.bin" in text
    assert not ground.run("new").steps


@pytest.mark.slow  # quicker: a new run refuses changed tokens; a checkpoint of 0.1.0 is resumed
def test_a_resumed_run_refuses_tokens_that_were_changed(done, changed):
    run = done.copy("tokens")
    assert "train-00000.bin: damaged" in resume(run, changed)
    assert run.last_step == 19
    # The same index elsewhere is the same data, and it may be read unchecked if that is asked for.
    resume(run, changed, 'data.verify="size"', code=0)


def test_lines_of_steps_do_not_list_their_windows(done):
    lines = read_metrics(done.folder / "metrics.jsonl")
    assert len(lines) == 20 and not any("windows" in line for line in lines)
    assert len(done.windows) == 20 and len(done.windows[0]) == 12


@pytest.mark.slow  # quicker: a new run refuses changed tokens; a checkpoint of 0.1.0 is resumed
def test_a_schedule_does_not_move_when_a_run_is_resumed_with_more_steps(ground):
    toml = ground.settings.read_text()
    run = ground.run("schedule")
    ground.settings.write_text(toml.replace("total_steps = 200\n", ""))
    try:
        run.different("run.steps=12").train()
        text = resume(run)
        assert "learning rate of a resumed run would jump" in text
        assert "run.steps=30" in text and "schedule that ends at step 12" in text
        # The same schedule by its explicit name is no change.
        run.different("run.steps=12", "optimizer.total_steps=12").train()
    finally:
        ground.settings.write_text(toml)


def test_settings_are_compared_with_the_checkpoint_when_config_json_is_gone(done):
    run = done.copy("config")
    (run.folder / "config.json").unlink()
    text = resume(run, "optimizer.peak_learning_rate=5e-3")
    assert "different in optimizer.peak_learning_rate" in text
    assert "the settings of the checkpoint of step 20" in text


def test_a_run_whose_checkpoints_are_gone_does_not_start_anew(done):
    run = done.copy("unmounted")
    shutil.rmtree(run.saves)
    text = resume(run)
    assert "the checkpoints of this run are missing" in text and "metrics.jsonl" in text
    (run.folder / "metrics.jsonl").unlink()  # as the error says
    run.different("run.steps=3").train()
    assert run.last_step == 2


def reseal(run, **changes):
    """Edit what the newest checkpoint says next to its arrays; its digest fits afterwards."""
    manifest = verify.read_manifest(run.saves / "20")
    extra = {**manifest.extra, **changes}
    extra = {name: value for name, value in extra.items() if value is not None}
    edited = manifest.model_copy(update={"extra": extra})
    (run.saves / "20" / verify.MANIFEST).write_text(verify.seal(edited))


def test_a_place_in_the_data_of_another_step_is_refused(done):
    run = done.copy("resealed")
    data = verify.read_manifest(run.saves / "20").extra["data"]
    reseal(run, data={**data, "step": 7})
    text = resume(run)
    assert "XSK-601.inconsistent-step: the checkpoint of step 20 is inconsistent" in text
    assert "data at step 7" in text


def test_a_checkpoint_without_a_place_in_the_data_is_refused(done):
    run = done.copy("dataless")
    reseal(run, data=None)
    text = resume(run)
    assert "XSK-601.no-run-state: the checkpoint of step 20 has no state of the data" in text


def test_a_checkpoint_of_0_1_0_is_resumed(done):
    run = done.copy("older")
    reseal(run, config=None)
    resume(run, code=0)
    assert run.steps[-1] == 30


@pytest.mark.slow  # quicker: a new run refuses changed tokens; a checkpoint of 0.1.0 is resumed
def test_a_complete_run_ends_well_without_its_goodput_file(ground, monkeypatch):
    from xsake.observability import goodput

    closed = goodput.GoodputRecorder.close

    def close_and_lose(self):
        closed(self)
        (ground.folder / "lost" / "goodput.jsonl").unlink()

    monkeypatch.setattr(goodput.GoodputRecorder, "close", close_and_lose)
    text = ground.run("lost", "run.steps=2").train().text
    assert "Cannot report goodput" in text


@pytest.mark.slow  # quicker: a new run refuses changed tokens; a checkpoint of 0.1.0 is resumed
def test_a_run_whose_folder_was_taken_stops_and_writes_no_more(ground, monkeypatch):
    from xsake.training import lock
    from xsake.training import train as training

    run, prepare = ground.run("taken"), training._prepare_step

    def take_at_12(*arguments):
        if arguments[-1] == 12:
            other = lock.LockHolder.current(60.0).model_copy(update={"host": "node-b"})
            (run.folder / lock.NAME).unlink()
            lock._create(run.folder / lock.NAME, other)
        return prepare(*arguments)

    monkeypatch.setattr(training, "_prepare_step", take_at_12)
    text = run.train(code=2).text
    assert "another run has taken the folder of this run" in text and "node-b" in text
    assert run.steps == [10]
    assert lock.read_holder(run.folder).host == "node-b"
    assert json.loads((run.folder / "metrics.jsonl").read_bytes().splitlines()[-1])["step"] <= 19
