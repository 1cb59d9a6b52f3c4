"""Native sparse attention in the trainer: one more kind that learns, and says what it lacks."""

import jax
import numpy as np
import pytest

from tests import processes
from tests.training.test_config import config
from xsake.model import DenseAttention
from xsake.training.attention import make_attention
from xsake.training.state import DeviceSetup, build_optimizer, define_model, init_state
from xsake.training.step import make_step

NATIVE = (
    "data.context=48",
    "model.loss_chunk_size=16",
    'attention.kind="native_sparse"',
    "model.decoder.native_sparse={length=8, stride=4, size=8, count=4, window=12}",
)
TOKENS = (np.arange(49)[None] * np.arange(1, 9)[:, None] % 90).astype(np.int32)


@pytest.mark.slow  # quicker: tests/model: it reads at once as token by token
def test_it_learns_through_the_trainer():
    run = config(*NATIVE, "model.decoder.layers=1")
    attention = make_attention(run.attention, run.model.decoder)
    assert attention.attend(0) == DenseAttention() and attention.budget(0) is None
    assert attention.record(0)["kind"] == "native_sparse"
    definition = define_model(run)
    step = make_step(run, definition, build_optimizer(run, definition), attention.attend(0))
    state, losses = init_state(run), []
    for _ in range(12):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.8 * losses[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.parameters))


def step_on_a_mesh() -> None:
    """Compare three steps on four devices with those on one, in a process of its own."""
    losses, parts = [], []
    for mesh in ((), ("mesh.data=2", "mesh.tensor=2")):
        run = config(*NATIVE, *mesh)
        devices, definition = DeviceSetup.from_config(run), define_model(run)
        attention = make_attention(run.attention, run.model.decoder, operator=devices.operator)
        optimizer = build_optimizer(run, definition)
        step = make_step(run, definition, optimizer, attention.attend(0), devices.shardings)
        state = devices.init_state(run)
        for _ in range(3):
            state, metrics = step(state, devices.put(TOKENS))
            losses.append([float(metrics.loss), float(metrics.gradient_norm)])
        query = state.parameters["layers"]["attention"]["query"]
        parts.append(len({str(x.index) for x in query.addressable_shards}))
    assert parts == [1, 2]
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-5)


@pytest.mark.slow  # two programs for four devices
def test_a_mesh_gives_the_losses_of_one_device():
    processes.run(step_on_a_mesh, devices=4, seconds=600)
