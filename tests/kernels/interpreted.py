"""TPU and GPU kernels on a CPU: by interpreters, some of which play the memory of the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse.mosaic_gpu import ampere
from xsake.kernels.block_sparse.mosaic_tpu import kernels as mosaic_tpu
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.dispatch import BackendSpec
from xsake.layout import BlockLayout
from xsake.masks import Causal
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase

# Two cores, memory that holds NaN until it is written, copies that really take turns, and every
# access checked: against its neighbours' and against the ends of the array.
CHECKED = pltpu.InterpretParams(
    detect_races=True,
    out_of_bounds_reads="raise",
    uninitialized_memory="nan",
    num_cores_or_threads=2,
    random_seed=3,
)


def _ragged(case: ConformanceCase) -> BlockLayout:
    """Blocks by chance, more in each further head; none in the first."""
    density = np.linspace(0.0, 0.9, case.q_heads)[:, None, None]
    grid = np.random.default_rng(3).random((case.q_heads, 3, 3)) < density
    tokens = {"q_tokens": case.q_tokens, "kv_tokens": case.kv_tokens}
    layout = BlockLayout.from_block_mask(grid, **tokens, block_q=16, block_kv=16, mask=case.mask)
    return layout.traced(capacity=40)


# The case of every change: lists of every length that are known at run time only.
SMALL_TRACED_GRID = ConformanceCase(
    "small_traced_grid", Causal(), layout=_ragged, q_tokens=45, kv_tokens=45, q_heads=4, kv_heads=2
)


def register(monkeypatch, op, **backends):
    """Add backends to an operation, each used only when it is named."""
    specs = [BackendSpec(name, each, is_on_request=True) for name, each in backends.items()]
    monkeypatch.setattr(op, "backends", (*op.backends, *specs))


# Memory that holds NaN until it is written, copies that end when a barrier says so, and every
# access checked: against the copies under way and against the ends of the array.
GPU_CHECKED = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """A backend of kernels, but run by an interpreter and therefore on every platform."""

    backend: Any
    interpret: Any
    platform: str  # that it is asked about

    def unsupported_reason(self, inputs, config, platform):
        return self.backend.unsupported_reason(inputs, config, self.platform)

    def count_passes(self, inputs, config, platform):
        return self.backend.count_passes(inputs, config, self.platform)

    def forward(self, inputs, config, platform):
        return self.backend.forward(inputs, config, platform, self.interpret)

    def backward(self, inputs, config, platform, *residuals):
        return self.backend.backward(inputs, config, platform, *residuals, interpret=self.interpret)


def on_tpu(interpret: Any = True) -> Interpreted:
    """The backend `mosaic_tpu`."""
    return Interpreted(mosaic_tpu, interpret, "tpu")


def on_gpu(backend: Any = ampere) -> Interpreted:
    """A backend for NVIDIA GPUs."""
    return Interpreted(backend, GPU_CHECKED, "sm_90")


def case_inputs(name: str, dtype: Any = None) -> BlockSparseInputs:
    """The inputs of a case of the conformance table that has a layout."""
    case = BY_NAME[name]
    arrays = (jnp.asarray(case.inputs().operands[part], dtype) for part in "qkv")
    return BlockSparseInputs(*arrays, case.schedule)


def every_result(interpreted: Interpreted, inputs: BlockSparseInputs, scale: float) -> list[bytes]:
    """o, lse, dq, dk, dv of one call, as bytes."""
    config = BlockSparseConfig(scale)

    @jax.jit
    def run(q, k, v, do, dlse):
        given = inputs._replace(q=q, k=k, v=v)
        o, lse = interpreted.forward(given, config, interpreted.platform)
        rest = o, lse, do, dlse
        return o, lse, *interpreted.backward(given, config, interpreted.platform, *rest)[:3]

    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal(inputs.q.shape), inputs.q.dtype)
    dlse = rng.standard_normal(inputs.q.shape[:3], np.float32)
    return [np.asarray(x).tobytes() for x in run(*inputs[:3], do, dlse)]


def assert_declines_tables(backend: Any, platform: str, dtype: Any) -> None:
    """Masks that need tables are served for a static layout without positions only."""
    inputs = case_inputs("explicit_with_empty_rows_and_columns", dtype)
    why = lambda inputs: backend.unsupported_reason(inputs, BlockSparseConfig(0.25), platform)
    assert why(inputs) is None
    assert "traced layout" in why(inputs._replace(layout=inputs.layout.traced()))
    assert "positions" in why(inputs._replace(q_positions=jnp.arange(90)[None]))
