"""From a checkpoint of training to a directory of Hugging Face, and back into a decoder."""

import jax
import numpy as np
import pytest
from flax import nnx

from xsake.errors import CheckpointError
from xsake.model import Decoder, DecoderConfig, huggingface
from xsake.training.checkpointing import CheckpointStore
from xsake.training.export import export_checkpoint

CONFIG = DecoderConfig.tiny()


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def parameters_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.fixture(scope="module")
def store(model, tmp_path_factory):
    """Parameters as flax keeps them, and as plain dictionaries: a checkpoint names them alike."""
    folder = tmp_path_factory.mktemp("run")
    own = nnx.state(model, nnx.Param)
    writer = CheckpointStore(folder)
    writer.save(2, {"parameters": own, "plain": parameters_of(model)}, {})
    writer.close()
    return CheckpointStore(folder, is_read_only=True)


@pytest.mark.parametrize("part", ["parameters", "plain"])
def test_the_parameters_of_a_step_become_a_model_that_loads(store, model, tmp_path, part):
    target = tmp_path / "model"
    assert export_checkpoint(store, target, config=CONFIG, family="llama", part=part) == 2
    loaded = huggingface.load(target)
    assert loaded.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, parameters_of(loaded.model), parameters_of(model))


def test_a_config_of_another_model_is_refused_and_nothing_is_written(store, tmp_path):
    wider = CONFIG.model_copy(update={"mlp_width": 2 * CONFIG.mlp_width})
    with pytest.raises(CheckpointError, match="'parameters' of step 2 has another tree"):
        export_checkpoint(store, tmp_path / "model", config=wider, family="llama")
    with pytest.raises(CheckpointError, match="not saved"):
        export_checkpoint(store, tmp_path / "model", config=CONFIG, family="llama", part="weights")
    assert not list(tmp_path.iterdir()) and store.steps() == [2]
