"""The GPU kernels of selected attention, by their interpreter: the budget, and empty blocks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.error_budget import failures
from tests.kernels.interpreted import GPU_CHECKED, register
from tests.kernels.test_selected import allowed, drawn
from xsake.errors import UnsupportedError
from xsake.kernels.selected import mosaic_gpu, selected_attention
from xsake.kernels.selected.api import OP, _attend
from xsake.kernels.selected.chunking import SelectedTuning
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """The backend `mosaic_gpu`, but run by an interpreter on every platform."""

    interpret: Any = GPU_CHECKED

    def unsupported_reason(self, inputs, config, platform):
        return None

    def forward(self, inputs, config, platform):
        return mosaic_gpu.forward(inputs, config, platform, self.interpret)

    def backward(self, inputs, config, platform, *residuals):
        return mosaic_gpu.backward(inputs, config, platform, *residuals, interpret=self.interpret)


@pytest.fixture
def interpreted(monkeypatch):
    """Small tiles, so that blocks have several and queries come in chunks."""
    register(monkeypatch, OP, interpreted=Interpreted())
    monkeypatch.setattr(mosaic_gpu, "TUNING", SelectedTuning(rows=48, tiles=1, queries=20))
    _attend.clear_cache()
    yield
    _attend.clear_cache()


@pytest.mark.parametrize(
    ("q_heads", "dtype"),
    [(6, "bfloat16"), (2, "bfloat16"), (16, "float16")],
)
@pytest.mark.slow
def test_interpreted_kernels_are_within_the_error_budget(q_heads, dtype, interpreted):
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    arrays, blocks = drawn(45, q_heads, 2, block=8, slots=3, dtype=kind)
    blocks[blocks == 2] = -1  # a block that no query selects
    call = lambda *x: selected_attention(
        SelectedInputs(*x, blocks), SelectedConfig(8, 0.4), implementation="interpreted"
    )
    assert failures(call, arrays, allowed(blocks, 8, q_heads // 2, 45), 0.4, dtype) == []


def test_three_heads_of_a_group_are_within_the_error_budget(interpreted):
    arrays, blocks = drawn(20, 3, 1, block=8, slots=2, dtype=ml_dtypes.bfloat16)
    call = lambda *x: selected_attention(
        SelectedInputs(*x, blocks), SelectedConfig(8, 0.4), implementation="interpreted"
    )
    assert failures(call, arrays, allowed(blocks, 8, 3, 20), 0.4, "bfloat16") == []


def test_it_is_declined_where_it_cannot_run():
    arrays, blocks = drawn(8, 1, 1, block=4, slots=1)
    call = lambda *x: selected_attention(
        SelectedInputs(*x, blocks), SelectedConfig(4, 1.0), implementation="mosaic_gpu"
    )
    with pytest.raises(UnsupportedError, match="not float32"):
        call(*arrays)
    with pytest.raises(UnsupportedError, match="no GPU was found"):
        call(*(jnp.asarray(x, jnp.bfloat16) for x in arrays))
