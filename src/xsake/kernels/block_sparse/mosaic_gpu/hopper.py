"""Block-sparse attention for Hopper GPUs: forward, dq and dkv by `wgmma` and TMA.

A thread block has one warp group that copies, and one or two that compute a tile of 64 tokens each.
The latter multiply straight from shared memory, and release a slot when they have read it.
"""

from typing import Any

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.mosaic_gpu import kernels, schedule
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.launch import GpuLaunch
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.lowering import capability_of

# `wgmma` exists for this compute capability only; 10.0 does not have it.
CAPABILITY = (9, 0)
# Tokens of an inner tile: the fewest that `wgmma` contracts from shared memory in our layouts.
INNER_TILE = 64
# Features up to which registers hold the sums of two compute groups.
TWO_GROUPS_FEATURES = {"forward": 128, "dq": 128, "dkv": 64}
MAX_FEATURES = {"forward": 256, "dq": 256, "dkv": 128}


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    capability = capability_of(platform) or gpu.capability()
    if capability is None:
        return "no GPU was found, so its compute capability is not known"
    if capability != CAPABILITY:
        return f"it is for compute capability 9.0 (Hopper), not {'.'.join(map(str, capability))}"
    features = _features(inputs)
    if features > min(MAX_FEATURES.values()):
        return f"registers hold dk and dv of 128 features, not {features}"
    return kernels.common_reason(inputs, config)


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes."""
    costs = schedule.count_schedules(inputs, (INNER_TILE, INNER_TILE))
    return cost.blockwise(inputs, *costs, widens=False)


def _features(inputs: BlockSparseInputs) -> int:
    return max(inputs.q.shape[-1], inputs.v.shape[-1])


def _launch(name: str, inputs: BlockSparseInputs, interpret: Any) -> GpuLaunch:
    make = schedule.schedule_keys if name == "dkv" else schedule.schedule_queries
    made = make(inputs, INNER_TILE)
    is_shared = made.outer.tiles % 2 == 0 and _features(inputs) <= TWO_GROUPS_FEATURES[name]
    ops = gpu.GpuOps(True, interpret or None, uses_wgmma=True)
    return GpuLaunch(inputs, made, ops, gpu.WarpGroups(2 if is_shared else 1))


forward, backward, dq_pass, dkv_pass = kernels.define_passes(_launch)
