"""The TPU kernels of selected attention, by interpreters: the budget, poison, and empty blocks."""

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.error_budget import failures
from tests.kernels.interpreted import CHECKED
from tests.kernels.test_selected import allowed, drawn
from xsake.errors import UnsupportedError
from xsake.kernels.selected import mosaic_tpu, op, selected
from xsake.kernels.selected.call import Tuning
from xsake.kernels.selected.problem import Operands, Problem


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """The backend `mosaic_tpu`, but run by an interpreter and therefore on every platform."""

    interpret: Any = True

    def platforms(self):
        return None

    def unsupported(self, operands):
        return mosaic_tpu.unsupported(operands)

    def forward(self, operands, problem):
        return mosaic_tpu.forward(operands, problem, self.interpret)

    def backward(self, operands, problem, out, lse, cotangents):
        return mosaic_tpu.backward(operands, problem, out, lse, cotangents, self.interpret)


@pytest.fixture
def interpreted(monkeypatch):
    """Small tiles, so that blocks have several and queries come in chunks."""
    monkeypatch.setitem(op.BACKENDS, "interpreted", Interpreted())
    monkeypatch.setattr(mosaic_tpu, "TUNING", Tuning(rows=48, tiles=1, queries=20))
    op._run.clear_cache()
    yield
    op._run.clear_cache()


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
    blocks[blocks == 2] = -1  # a block that nobody selects
    call = lambda *x: selected(Operands(*x, blocks), Problem(8, 0.4), implementation="interpreted")
    assert failures(call, arrays, allowed(blocks, 8, q_heads // 2, 45), 0.4, dtype) == []


def test_a_strict_interpreter_finds_nothing_wrong(interpreted, monkeypatch):
    monkeypatch.setitem(op.BACKENDS, "interpreted", Interpreted(CHECKED))
    (q, k, v), blocks = drawn(20, 3, 1, block=8, slots=2)
    call = lambda name: jax.vjp(
        lambda *x: selected(Operands(*x, blocks), Problem(8, 0.4), implementation=name)[0], q, k, v
    )
    for x, y in zip(
        *(
            jax.tree.leaves((out, pull(out)))
            for out, pull in map(call, ("interpreted", "reference"))
        ),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_named_kernel_runs_on_its_platform_only():
    arrays, blocks = drawn(8, 1, 1, block=4, slots=1)
    with pytest.raises(UnsupportedError, match="runs on tpu only"):
        selected(Operands(*arrays, blocks), Problem(4, 1.0), implementation="mosaic_tpu")
    half = tuple(x.astype(np.float16) for x in arrays)
    with pytest.raises(UnsupportedError, match="float32 and bfloat16"):
        selected(Operands(*half, blocks), Problem(4, 1.0), implementation="mosaic_tpu")
