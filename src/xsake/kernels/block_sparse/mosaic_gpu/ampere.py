"""Block-sparse attention for NVIDIA GPUs from Ampere on: forward, dq and dkv.

A thread block computes a tile of 64 queries (of keys, for dkv) over the blocks that its row lists.
Products run on tensor cores by `mma`, which every such GPU has; copies are `cp.async` before Hopper
and TMA from Hopper on.
"""

from typing import Any

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.mosaic_gpu import kernels, schedule
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.launch import STAGES, GpuLaunch, pad_features
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.lowering import capability_of

# Compute capabilities, by their major number, that these kernels were compiled for.
CAPABILITIES = (8, 9, 10, 12)
# Those whose thread blocks get little shared memory, and how much; others get 163 KiB or more.
SMALL_SHARED = ((8, 6), (8, 9), (12, 0), (12, 1))
MIN_SHARED = 99 * 1024
# Pass -> (features up to, tokens of an inner tile).
INNER_TILES = {
    "forward": ((128, 64), (kernels.MAX_FEATURES, 32)),
    "dq": ((64, 64), (kernels.MAX_FEATURES, 32)),
    "dkv": ((kernels.MAX_FEATURES, 32),),
}


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    capability = capability_of(platform) or gpu.capability()
    reason = kernels.common_reason(inputs, config) or capability_reason(capability)
    return reason or _too_wide(inputs, capability)


def capability_reason(capability: tuple[int, int] | None) -> str | None:
    """Why no kernel runs on such a GPU; a kernel lowered for a wrong one ends the process."""
    if capability is None:
        return "no GPU was found, so its compute capability is not known"
    name = ".".join(map(str, capability))
    if capability[0] < min(CAPABILITIES):
        return f"compute capability {name} is older than 8.0 (Ampere)"
    if capability[0] not in CAPABILITIES:
        return f"compute capability {name} is not among those it was compiled for"
    return None


def shared_bytes(inputs: BlockSparseInputs) -> int:
    """Shared memory of the pass that takes the most: dq and dkv have four arrays in it."""
    features = sum(pad_features(x.shape[-1]) for x in (inputs.q, inputs.v))
    tokens = schedule.OUTER_TILE + STAGES * max(inner_tile(x, inputs) for x in ("dq", "dkv"))
    return tokens * features * inputs.q.dtype.itemsize


def _too_wide(inputs: BlockSparseInputs, capability: tuple[int, int] | None) -> str | None:
    if capability not in SMALL_SHARED or shared_bytes(inputs) <= MIN_SHARED:
        return None
    named = ".".join(map(str, capability))
    needed, limit = (f"{x // 1024} KiB" for x in (shared_bytes(inputs), MIN_SHARED))
    return f"its tiles take {needed} of shared memory, and compute capability {named} gives {limit}"


def inner_tile(name: str, inputs: BlockSparseInputs) -> int:
    """Tokens of an inner tile: the most that registers hold without spilling, by certificates."""
    features = max(inputs.q.shape[-1], inputs.v.shape[-1])
    layout = inputs.layout
    block = layout.block_q if name == "dkv" else layout.block_kv
    most = next(tile for limit, tile in INNER_TILES[name] if features <= limit)
    return min(most, -(-block // 32) * 32)


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes."""
    inner_sizes = inner_tile("forward", inputs), inner_tile("dkv", inputs)
    return cost.blockwise(inputs, *schedule.count_schedules(inputs, inner_sizes), widens=False)


def launch_of(name: str, inputs: BlockSparseInputs, interpret: Any) -> GpuLaunch:
    """The launch of a pass: "forward", "dq" or "dkv"."""
    make = schedule.schedule_keys if name == "dkv" else schedule.schedule_queries
    capability = None if interpret else gpu.capability()
    ops = gpu.GpuOps(capability is None or capability[0] >= 9, interpret or None)
    return GpuLaunch(inputs, make(inputs, inner_tile(name, inputs)), ops)


forward, backward, dq_pass, dkv_pass = kernels.define_passes(launch_of)
