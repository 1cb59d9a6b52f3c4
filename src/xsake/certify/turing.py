"""NVIDIA GPUs before Ampere: the `xla` implementation, as there are no Mosaic kernels."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.certify import cuda, gpu_specs
from xsake.certify.case import CompileCase
from xsake.certify.family import CompileFacts, Target
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.block_sparse.xla import kernels as xla

NAME = "turing"
KERNELS = "xsake.certify.turing"  # the functions below
SELECTED_KERNELS = cuda.SELECTED_KERNELS
PLATFORM = "cuda"
PACKAGES = cuda.PACKAGES
TARGETS = {"sm_75": gpu_specs.target("sm_75", NAME)}

# None: XLA splits what does not fit, so there is nothing it must reject.
CONTROLS: tuple[CompileCase, ...] = ()

requirements = cuda.requirements
process_variables = cuda.process_variables
device_kind = cuda.device_kind


def supports(case: CompileCase) -> bool:
    """Whether a case is compiled: 4096 tokens only, as longer ones compile alike."""
    return case.slots is None and case.tokens == 4096 and not case.traced


def compile(run: Callable[..., Any], arguments: tuple, target: Target, dump: Path) -> CompileFacts:
    """Compile `run` for one GPU of the target; its kernels are not analyzed."""
    return CompileFacts(*cuda.compile_for_gpu(run, arguments, target))


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str):
    """`(o, lse)`."""
    return xla.forward(inputs, config, platform)


def dq_pass(inputs: BlockSparseInputs, config: BlockSparseConfig, o, lse, do, dlse):
    """dq."""
    return xla.backward(inputs, config, PLATFORM, o, lse, do, dlse).dq


def dkv_pass(inputs: BlockSparseInputs, config: BlockSparseConfig, o, lse, do, dlse):
    """dk and dv."""
    grads = xla.backward(inputs, config, PLATFORM, o, lse, do, dlse)
    return grads.dk, grads.dv


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the passes; the compiler generates the kernels."""
    costs = xla.count_passes(inputs, config, platform)
    return tuple(dataclasses.replace(x, launches=1, steps=x.listed) for x in costs)
