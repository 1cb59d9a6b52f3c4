"""The TPU kernels of selected attention, by interpreters: the budget, poison, and empty blocks."""

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.error_budget import failures
from tests.kernels.interpreted import CHECKED, register
from tests.kernels.test_selected import allowed, drawn
from xsake.errors import UnsupportedError
from xsake.kernels.selected import mosaic_tpu, selected_attention
from xsake.kernels.selected.api import OP, _attend
from xsake.kernels.selected.chunking import SelectedTuning
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """The backend `mosaic_tpu`, but run by an interpreter on every platform."""

    interpret: Any = True

    def unsupported_reason(self, inputs, config, platform):
        return mosaic_tpu.unsupported_reason(inputs, config, platform)

    def forward(self, inputs, config, platform):
        return mosaic_tpu.forward(inputs, config, platform, self.interpret)

    def backward(self, inputs, config, platform, *residuals):
        return mosaic_tpu.backward(inputs, config, platform, *residuals, interpret=self.interpret)


@pytest.fixture
def interpreted(monkeypatch):
    """Small tiles, so that blocks have several and queries come in chunks."""
    register(monkeypatch, OP, interpreted=Interpreted())
    monkeypatch.setattr(mosaic_tpu, "TUNING", SelectedTuning(rows=48, tiles=1, queries=20))
    _attend.clear_cache()
    yield
    _attend.clear_cache()


@pytest.mark.parametrize(
    ("q_heads", "dtype"),
    [
        (6, "float32"),
        pytest.param(2, "float32", marks=pytest.mark.slow),
        pytest.param(6, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_interpreted_kernels_are_within_the_error_budget(q_heads, dtype, interpreted):
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    arrays, blocks = drawn(45, q_heads, 2, block=8, slots=3, dtype=kind)
    blocks[blocks == 2] = -1  # a block that no query selects
    call = lambda *x: selected_attention(
        SelectedInputs(*x, blocks), SelectedConfig(8, 0.4), implementation="interpreted"
    )
    assert failures(call, arrays, allowed(blocks, 8, q_heads // 2, 45), 0.4, dtype) == []


def test_a_strict_interpreter_finds_nothing_wrong(interpreted, monkeypatch):
    register(monkeypatch, OP, checked=Interpreted(CHECKED))
    (q, k, v), blocks = drawn(20, 3, 1, block=8, slots=2)
    call = lambda name: jax.vjp(
        lambda *x: selected_attention(
            SelectedInputs(*x, blocks), SelectedConfig(8, 0.4), implementation=name
        )[0],
        q,
        k,
        v,
    )
    for x, y in zip(
        *(jax.tree.leaves((out, pull(out))) for out, pull in map(call, ("checked", "reference"))),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_named_kernel_runs_on_its_platform_only():
    arrays, blocks = drawn(8, 1, 1, block=4, slots=1)
    with pytest.raises(UnsupportedError, match="runs on tpu only"):
        selected_attention(
            SelectedInputs(*arrays, blocks), SelectedConfig(4, 1.0), implementation="mosaic_tpu"
        )
    half = tuple(x.astype(np.float16) for x in arrays)
    with pytest.raises(UnsupportedError, match="float32 and bfloat16"):
        selected_attention(
            SelectedInputs(*half, blocks), SelectedConfig(4, 1.0), implementation="mosaic_tpu"
        )
