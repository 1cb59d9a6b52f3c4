"""`xsake export` as a user meets it: a run's checkpoint becomes a model, or a reason why not."""

import json

import jax
import numpy as np
import pytest

from tests.training.data_sample import save_data
from tests.training.test_config import config
from tests.training.test_guard import drawn_state
from xsake.model import huggingface
from xsake.training.checkpointing import CheckpointStore
from xsake.training.state import ModelDefinition, define_model, reorder_heads

ORDER = ((1, 0), (0, 1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
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


@pytest.fixture
def export(run, trained, tmp_path):
    return lambda *flags: run("export", trained[0], "-o", tmp_path / "model", *flags)


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_becomes_a_model_with_its_heads_in_their_own_order(export, trained, tmp_path, step):
    assert f"step {step} written" in export("--step", step).output
    model = huggingface.load(tmp_path / "model").model
    same = ModelDefinition.from_model(model).parameters(model)
    jax.tree.map(np.testing.assert_array_equal, same, trained[1].parameters)


def test_the_newest_step_is_taken_and_nothing_is_replaced_unasked(export):
    assert "step 2 written" in export().output
    assert export().exit_code == 2
    assert "step 1 written" in export("--step", 1, "--replace").output


def test_folders_that_are_no_run_are_named_and_cannot_command_the_terminal(run, trained, tmp_path):
    done = run("export", tmp_path, "-o", tmp_path / "model")
    assert done.exit_code == 2 and "not the folder of a run" in done.output
    record = json.loads((trained[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | {"\x1b]0;pwned\x07\x9b2J": 1}))
    done = run("export", tmp_path, "-o", tmp_path / "model")
    assert done.exit_code == 2 and "\\u001b]0;pwned" in done.output
    assert not set("\x1b\x07\x9b") & set(done.output)
