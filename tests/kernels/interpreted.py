"""The TPU kernels on a CPU: by the plain interpreter, and by the one that plays TPU memory."""

import dataclasses
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse import mosaic_tpu

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
