"""Block-sparse attention for NVIDIA GPUs from Ampere on: forward, dQ and dK/dV, from one source.

A thread block owns a tile of 64 queries (of keys, for dK/dV) and walks the blocks that its row
lists, and nothing else. Products run on tensor cores by `mma`, which every such GPU has; copies
are `cp.async` before Hopper and TMA since.
"""

from typing import Any

from xsake.kernels import mosaic_gpu_compat as gpu
from xsake.kernels.block_sparse import cost, gpu_lists, gpu_passes
from xsake.kernels.block_sparse.gpu_arrays import room_of
from xsake.kernels.block_sparse.gpu_call import STAGES, Walk
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.kernels.platforms import capability_named

# Compute capabilities, by their major number, that these kernels were compiled for.
CAPABILITIES = (8, 9, 10, 12)
# Those whose thread blocks get little shared memory, and how much; others get 163 KiB or more.
SMALL_SHARED = ((8, 6), (8, 9), (12, 0), (12, 1))
LEAST_SHARED = 99 * 1024
# Pass -> (features up to, tokens of a met tile).
MET_TILES = {
    "forward": ((128, 64), (gpu_passes.MOST_FEATURES, 32)),
    "d_q": ((64, 64), (gpu_passes.MOST_FEATURES, 32)),
    "d_kv": ((gpu_passes.MOST_FEATURES, 32),),
}


def platforms() -> tuple[str, ...]:
    """The only platform that these kernels compile for."""
    return ("cuda",)


def unsupported(operands: Operands, problem: Problem, platform: str) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    capability = capability_named(platform) or gpu.capability()
    reason = gpu_passes.declined(operands, problem) or incapable(capability)
    return reason or _too_wide(operands, capability)


def incapable(capability: tuple[int, int] | None) -> str | None:
    """Why no kernel runs on such a GPU; a kernel lowered for a wrong one ends the process."""
    if capability is None:
        return "no GPU is here, so nobody knows its compute capability"
    if capability[0] < min(CAPABILITIES):
        return f"compute capability {'.'.join(map(str, capability))} is older than 8.0 (Ampere)"
    if capability[0] not in CAPABILITIES:
        return f"compute capability {'.'.join(map(str, capability))} is not among those it knows"
    return None


def shared_bytes(operands: Operands) -> int:
    """Shared memory of the pass that takes the most: dQ and dK/dV have four arrays in it."""
    features = sum(room_of(x.shape[-1]) for x in (operands.q, operands.v))
    tokens = gpu_lists.OWN_TILE + STAGES * max(met_tile(x, operands) for x in ("d_q", "d_kv"))
    return tokens * features * operands.q.dtype.itemsize


def _too_wide(operands: Operands, capability: tuple[int, int] | None) -> str | None:
    if capability not in SMALL_SHARED or shared_bytes(operands) <= LEAST_SHARED:
        return None
    named = ".".join(map(str, capability))
    needed, room = (f"{x // 1024} KiB" for x in (shared_bytes(operands), LEAST_SHARED))
    return f"its tiles take {needed} of shared memory, and compute capability {named} gives {room}"


def met_tile(name: str, operands: Operands) -> int:
    """Tokens of a met tile: the most that registers hold without spilling, by certificates."""
    features = max(operands.q.shape[-1], operands.v.shape[-1])
    layout = operands.layout
    block = layout.block_q if name == "d_kv" else layout.block_kv
    most = next(tile for limit, tile in MET_TILES[name] if features <= limit)
    return min(most, -(-block // 32) * 32)


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What forward and backward will compute."""
    tiles_met = met_tile("forward", operands), met_tile("d_kv", operands)
    return cost.blockwise(operands, *gpu_lists.walked(operands, tiles_met), widens=False)


def _machine(interpret: Any) -> gpu.Machine:
    if interpret:
        return gpu.Machine(True, interpret)
    capability = gpu.capability()
    return gpu.Machine(capability is None or capability[0] >= 9)


def walk_of(name: str, operands: Operands, interpret: Any) -> Walk:
    """The walk of a pass: "forward", "d_q" or "d_kv"."""
    make = gpu_lists.by_key if name == "d_kv" else gpu_lists.by_query
    return Walk(operands, make(operands, met_tile(name, operands)), _machine(interpret))


_PASSES = gpu_passes.Passes(walk_of)
forward, backward = _PASSES.forward, _PASSES.backward
query_gradient, key_value_gradient = _PASSES.query_gradient, _PASSES.key_value_gradient
