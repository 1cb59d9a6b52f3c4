"""Native sparse attention in the trainer: one more kind that learns, and says what it lacks."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.training.test_config import config
from xsake.errors import ArgumentError
from xsake.model import DenseAttention
from xsake.training.attention import make_attention
from xsake.training.state import build_optimizer, define_model, init_state
from xsake.training.step import make_step

NATIVE = (
    "data.context=48",
    "model.loss_chunk_size=16",
    'attention.kind="native_sparse"',
    "model.decoder.native_sparse={length=8, stride=4, size=8, count=4, window=12}",
)


def test_it_learns_through_the_trainer():
    run = config(*NATIVE, "model.decoder.layers=1")
    attention = make_attention(run.attention, run.model.decoder)
    assert attention.attend(0) == DenseAttention() and attention.budget(0) is None
    assert attention.record(0)["kind"] == "native_sparse"
    definition = define_model(run)
    step = make_step(run, definition, build_optimizer(run, definition), attention.attend(0))
    tokens = (np.arange(49)[None] * np.arange(1, 9)[:, None] % 90).astype(np.int32)
    state, losses = init_state(run), []
    for _ in range(12):
        state, metrics = step(state, tokens)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.8 * losses[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.parameters))


def test_kind_and_model_belong_together():
    with pytest.raises(ArgumentError, match="or neither"):
        config('attention.kind="native_sparse"')
    with pytest.raises(ArgumentError, match="or neither"):
        config("model.decoder.native_sparse={}")
    with pytest.raises(ArgumentError, match="does not support context parallelism"):
        config(*NATIVE, "mesh.context=2")
    with pytest.raises(ArgumentError, match="does not use all given settings"):
        config(*NATIVE, "attention.budget=0.5")


ON_A_MESH = """
import json
import jax, numpy as np
from tests.training.test_config import config
from tests.training.test_native_sparse import NATIVE
from xsake.training.attention import make_attention
from xsake.training.state import DeviceSetup
from xsake.training.state import build_optimizer, define_model
from xsake.training.step import make_step

told = {}
for name, mesh in {"alone": (), "mesh": ("mesh.data=2", "mesh.tensor=2")}.items():
    run = config(*NATIVE, *mesh)
    devices, definition = DeviceSetup.from_config(run), define_model(run)
    attend = make_attention(run.attention, run.model.decoder, operator=devices.operator).attend(0)
    optimizer = build_optimizer(run, definition)
    step = make_step(run, definition, optimizer, attend, devices.shardings)
    tokens = (np.arange(49)[None] * np.arange(1, 9)[:, None] % 90).astype(np.int32)
    state, told[name] = devices.init_state(run), []
    if devices.shardings is not None:
        tokens = jax.device_put(tokens, devices.shardings.tokens)
    for _ in range(3):
        state, metrics = step(state, tokens)
        told[name].append([float(metrics.loss), float(metrics.gradient_norm)])
    query = state.parameters["layers"]["attention"]["query"]
    told[name + " parts"] = len({str(x.index) for x in query.addressable_shards})
print(json.dumps(told))
"""


@pytest.mark.slow  # two programs for four devices
def test_a_mesh_gives_the_losses_of_one_device():
    found = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    told = json.loads(found.stdout.splitlines()[-1])
    assert told["mesh parts"] == 2 and told["alone parts"] == 1
    np.testing.assert_allclose(told["mesh"], told["alone"], rtol=1e-5)
