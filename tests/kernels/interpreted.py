"""TPU and GPU kernels on a CPU: by interpreters, some of which play the memory of the device."""

import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse.mosaic_gpu import ampere
from xsake.kernels.block_sparse.mosaic_tpu import kernels as mosaic_tpu
from xsake.kernels.dispatch import BackendSpec

# Two cores, memory that holds NaN until it is written, copies that really take turns, and every
# access checked: against its neighbours' and against the ends of the array.
CHECKED = pltpu.InterpretParams(
    detect_races=True,
    out_of_bounds_reads="raise",
    uninitialized_memory="nan",
    num_cores_or_threads=2,
    random_seed=3,
)


def register(monkeypatch, op, **backends):
    """Add backends to an operation, each used only when it is named."""
    specs = [BackendSpec(name, each, is_on_request=True) for name, each in backends.items()]
    monkeypatch.setattr(op, "backends", (*op.backends, *specs))


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """The backend `mosaic_tpu`, but run by an interpreter and therefore on every platform."""

    interpret: Any = True

    def unsupported_reason(self, inputs, config, platform):
        return mosaic_tpu.unsupported_reason(inputs, config, "tpu")

    def count_passes(self, inputs, config, platform):
        return mosaic_tpu.count_passes(inputs, config, "tpu")

    def forward(self, inputs, config, platform):
        return mosaic_tpu.forward(inputs, config, platform, self.interpret)

    def backward(self, inputs, config, platform, *residuals):
        return mosaic_tpu.backward(inputs, config, platform, *residuals, interpret=self.interpret)


# Memory that holds NaN until it is written, copies that end when a barrier says so, and every
# access checked: against the copies under way and against the ends of the array.
GPU_CHECKED = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class InterpretedGpu:
    """A backend for NVIDIA GPUs, run by their interpreter."""

    backend: Any = ampere
    interpret: Any = GPU_CHECKED

    def unsupported_reason(self, inputs, config, platform):
        return self.backend.unsupported_reason(inputs, config, "sm_90")

    def count_passes(self, inputs, config, platform):
        return self.backend.count_passes(inputs, config, "sm_90")

    def forward(self, inputs, config, platform):
        return self.backend.forward(inputs, config, platform, self.interpret)

    def backward(self, inputs, config, platform, *residuals):
        return self.backend.backward(inputs, config, platform, *residuals, interpret=self.interpret)
