"""TPU and GPU kernels of selected attention, by interpreters: the budget, races, empty blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.error_budget import failures
from tests.kernels.interpreted import CHECKED, GPU_CHECKED, Interpreted, register
from tests.kernels.test_selected import allowed, drawn
from xsake.errors import UnsupportedError
from xsake.kernels.selected import mosaic_gpu, mosaic_tpu, selected_attention
from xsake.kernels.selected.api import OP, _attend
from xsake.kernels.selected.chunking import SelectedTuning
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture
def interpreted(monkeypatch):
    """Small tiles, so that blocks have several and queries come in chunks."""
    backends = {
        "tpu": Interpreted(mosaic_tpu, True, "tpu"),
        "tpu_checked": Interpreted(mosaic_tpu, CHECKED, "tpu"),
        "gpu": Interpreted(mosaic_gpu, GPU_CHECKED, "sm_80"),
    }
    register(monkeypatch, OP, **backends)
    for backend in (mosaic_tpu, mosaic_gpu):
        monkeypatch.setattr(backend, "TUNING", SelectedTuning(rows=48, tiles=1, queries=20))
    _attend.clear_cache()
    yield
    _attend.clear_cache()


def attend(blocks, block, scale, name):
    """Selected attention as a function of (q, k, v)."""
    config = SelectedConfig(block, scale)
    return lambda *x: selected_attention(SelectedInputs(*x, blocks), config, implementation=name)


@pytest.mark.slow  # quicker: the strict interpreter
@pytest.mark.parametrize(
    ("name", "q_heads", "dtype"),
    [
        ("tpu", 6, "float32"),
        ("tpu", 2, "bfloat16"),
        ("gpu", 6, "bfloat16"),
        ("gpu", 2, "bfloat16"),
        ("gpu", 16, "float16"),
    ],
)
def test_interpreted_kernels_are_within_the_error_budget(name, q_heads, dtype, interpreted):
    arrays, blocks = drawn(45, q_heads, 2, block=8, slots=3, dtype=DTYPES[dtype])
    blocks[blocks == 2] = -1  # a block that no query selects
    visible = allowed(blocks, 8, q_heads // 2, 45)
    assert failures(attend(blocks, 8, 0.4, name), arrays, visible, 0.4, dtype) == []


@pytest.mark.slow  # quicker: groups of six; the strict interpreter
def test_three_heads_of_a_group_are_within_the_error_budget(interpreted):
    arrays, blocks = drawn(20, 3, 1, block=8, slots=2, dtype=ml_dtypes.bfloat16)
    visible = allowed(blocks, 8, 3, 20)
    assert failures(attend(blocks, 8, 0.4, "gpu"), arrays, visible, 0.4, "bfloat16") == []


def test_a_strict_interpreter_finds_nothing_wrong(interpreted):
    arrays, blocks = drawn(20, 3, 1, block=8, slots=2)
    call = lambda name: jax.vjp(lambda *x: attend(blocks, 8, 0.4, name)(*x)[0], *arrays)
    results = map(call, ("tpu_checked", "reference"))
    for x, y in zip(*(jax.tree.leaves((out, pull(out))) for out, pull in results), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("mosaic_tpu", "float32", "runs on tpu only"),
        ("mosaic_tpu", "float16", "float32 and bfloat16"),
        ("mosaic_gpu", "float32", "not float32"),
        ("mosaic_gpu", "bfloat16", "no GPU was found"),
    ],
)
def test_a_named_kernel_is_declined_where_it_cannot_run(name, dtype, reason):
    arrays, blocks = drawn(8, 1, 1, block=4, slots=1)
    with pytest.raises(UnsupportedError, match=reason):
        attend(blocks, 4, 1.0, name)(*(jnp.asarray(x, dtype) for x in arrays))
