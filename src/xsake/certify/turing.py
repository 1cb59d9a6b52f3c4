"""NVIDIA GPUs before Ampere: no kernels of ours, but the loops of `xla` compile for them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.certify import cuda, gpu_specs
from xsake.certify.case import Case
from xsake.certify.family import Facts, Target
from xsake.kernels.block_sparse import cost, xla
from xsake.kernels.block_sparse.problem import Cotangents, Operands, Problem

NAME = "turing"
KERNELS = "xsake.certify.turing"  # the functions below
SELECTED_KERNELS = cuda.SELECTED_KERNELS
PLATFORM = "cuda"
PACKAGES = cuda.PACKAGES
TARGETS = {"sm_75": gpu_specs.target("sm_75", NAME)}

# None: XLA makes smaller kernels of whatever does not fit, so there is nothing it must refuse.
CONTROLS: tuple[Case, ...] = ()

requirements = cuda.requirements
process_variables = cuda.process_variables
device_kind = cuda.device_kind


def serves(case: Case) -> bool:
    """Whether a case says something here: short texts, as longer ones compile alike."""
    return case.slots is None and case.tokens == 4096 and not case.traced


def compile(run: Callable[..., Any], arguments: tuple, target: Target, dump: Path) -> Facts:
    """Compile `run` for one GPU of the target; its many small kernels are not looked at."""
    return Facts(*cuda.compiled(run, arguments, target))


def forward(operands: Operands, problem: Problem):
    """`(out, lse)`."""
    return xla.forward(operands, problem)


def query_gradient(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents):
    """dQ."""
    return xla.backward(operands, problem, out, lse, cotangents).q


def key_value_gradient(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents):
    """dK and dV."""
    found = xla.backward(operands, problem, out, lse, cotangents)
    return found.k, found.v


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What the passes compute; the compiler makes its own kernels of it."""
    found = xla.passes(operands, problem, platform)
    return tuple(dataclasses.replace(x, launches=1, steps=x.listed) for x in found)
