"""The `xla` implementation with the functions of a kernel module, for GPUs without Mosaic."""

import dataclasses

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.block_sparse.xla import kernels as xla

_PLATFORM = "cuda"
forward = xla.forward


def dq_pass(inputs: BlockSparseInputs, config: BlockSparseConfig, o, lse, do, dlse):
    """dq."""
    return xla.backward(inputs, config, _PLATFORM, o, lse, do, dlse).dq


def dkv_pass(inputs: BlockSparseInputs, config: BlockSparseConfig, o, lse, do, dlse):
    """dk and dv."""
    grads = xla.backward(inputs, config, _PLATFORM, o, lse, do, dlse)
    return grads.dk, grads.dv


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the passes; the compiler generates the kernels."""
    costs = xla.count_passes(inputs, config, platform)
    return tuple(dataclasses.replace(x, launches=1, steps=x.listed) for x in costs)
