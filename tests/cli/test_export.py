"""`xsake export` as a user meets it: a run's checkpoint becomes a model, or a reason why not."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.training.data_sample import save_data
from tests.training.test_config import config
from tests.training.test_guard import drawn_state
from xsake.cli import app
from xsake.model import huggingface
from xsake.training.checkpointing import CheckpointStore
from xsake.training.state import ModelDefinition, define_model, reorder_heads

ORDER = ((1, 0), (0, 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps; at the second its heads are in another order."""
    folder = tmp_path_factory.mktemp("run")
    data = save_data(folder / "data", 100)
    made = config(f'data.folder="{data}"', f'checkpoint.folder="{folder}"')
    state, definition = drawn_state(made), define_model(made)
    (folder / "config.json").write_text(made.to_json())
    store = CheckpointStore(folder / "steps")
    store.save(1, state, {})
    moved = reorder_heads(ORDER, state.parameters, definition.names)
    store.save(2, {"parameters": moved}, {"kv_order": [list(layer) for layer in ORDER]})
    store.close()
    return folder, state


def exported(*arguments) -> str:
    found = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_becomes_a_model_with_its_heads_in_their_own_order(run, tmp_path, step):
    folder, state = run
    said = exported(folder, "-o", tmp_path / "model", "--step", step)
    assert f"step {step} written" in said
    model = huggingface.load(tmp_path / "model").model
    same = ModelDefinition.from_model(model).parameters(model)
    jax.tree.map(np.testing.assert_array_equal, same, state.parameters)


def test_the_newest_step_is_taken_and_nothing_is_replaced_unasked(run, tmp_path):
    assert "step 2 written" in exported(run[0], "-o", tmp_path / "model")
    again = CliRunner().invoke(app, ["export", str(run[0]), "-o", str(tmp_path / "model")])
    assert again.exit_code == 2
    assert "step 1 written" in exported(run[0], "-o", tmp_path / "model", "--step", 1, "--replace")


def test_a_folder_that_is_no_run_is_named(tmp_path):
    found = CliRunner().invoke(app, ["export", str(tmp_path), "-o", str(tmp_path / "model")])
    assert found.exit_code == 2 and "not the folder of a run" in found.output


def test_a_run_of_a_stranger_cannot_command_the_terminal(run, tmp_path):
    record = json.loads((run[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | {"\x1b]0;pwned\x07\x9b2J": 1}))
    done = CliRunner().invoke(app, ["export", str(tmp_path), "-o", str(tmp_path / "out")])
    assert done.exit_code == 2 and "\\u001b]0;pwned" in done.output
    assert not set("\x1b\x07\x9b") & set(done.output)
