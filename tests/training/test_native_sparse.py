"""Native sparse attention in the trainer: one more kind that learns, and says what it lacks."""

import jax
import numpy as np
import pytest

from tests.training.test_config import config
from xsake.errors import ArgumentError
from xsake.model import Dense
from xsake.training.attention import make_attention
from xsake.training.state import define, first_state, optimizer_of
from xsake.training.step import make_step

NATIVE = (
    "data.context=48",
    "model.logit_positions=16",
    'attention.kind="native_sparse"',
    "model.decoder.native_sparse={length=8, stride=4, size=8, count=4, window=12}",
)


def test_it_learns_through_the_trainer():
    run = config(*NATIVE, "model.decoder.layers=1")
    attention = make_attention(run.attention, run.model.decoder)
    assert attention.attend(0) == Dense() and attention.budget(0) is None
    assert attention.record(0)["kind"] == "native_sparse"
    definition = define(run)
    step = make_step(run, definition, optimizer_of(run, definition), attention.attend(0))
    tokens = (np.arange(49)[None] * np.arange(1, 9)[:, None] % 90).astype(np.int32)
    state, losses = first_state(run), []
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
    with pytest.raises(ArgumentError, match="one device so far"):
        config(*NATIVE, "mesh.data=2")
    with pytest.raises(ArgumentError, match="does not use a setting"):
        config(*NATIVE, "attention.budget=0.5")
