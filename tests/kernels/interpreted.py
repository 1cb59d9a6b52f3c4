"""TPU and GPU kernels on a CPU: by interpreters, some of which play the memory of the device."""

import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse import mosaic_gpu, mosaic_tpu

# Two cores, memory that holds NaN until it is written, copies that really take turns, and every
# access checked: against its neighbours' and against the ends of the array.
CHECKED = pltpu.InterpretParams(
    detect_races=True,
    out_of_bounds_reads="raise",
    uninitialized_memory="nan",
    num_cores_or_threads=2,
    random_seed=3,
)


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """The backend `mosaic_tpu`, but run by an interpreter and therefore on every platform."""

    interpret: Any = True

    def platforms(self):
        return None

    def unsupported(self, operands, problem, platform):
        return mosaic_tpu.unsupported(operands, problem, "tpu")

    def passes(self, operands, problem, platform):
        return mosaic_tpu.passes(operands, problem, "tpu")

    def forward(self, operands, problem):
        return mosaic_tpu.forward(operands, problem, self.interpret)

    def backward(self, operands, problem, out, lse, cotangents):
        return mosaic_tpu.backward(operands, problem, out, lse, cotangents, self.interpret)


# Memory that holds NaN until it is written, copies that end when a barrier says so, and every
# access checked: against the copies under way and against the ends of the array.
GPU_CHECKED = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class InterpretedGpu:
    """A backend for NVIDIA GPUs, run by their interpreter."""

    backend: Any = mosaic_gpu
    interpret: Any = GPU_CHECKED

    def platforms(self):
        return None

    def unsupported(self, operands, problem, platform):
        return self.backend.unsupported(operands, problem, "sm_90")

    def passes(self, operands, problem, platform):
        return self.backend.passes(operands, problem, "sm_90")

    def forward(self, operands, problem):
        return self.backend.forward(operands, problem, self.interpret)

    def backward(self, operands, problem, out, lse, cotangents):
        return self.backend.backward(operands, problem, out, lse, cotangents, self.interpret)
