"""Block-sparse attention for Hopper GPUs: forward, dQ and dK/dV by `wgmma` and TMA.

A thread block has one warp group that copies, and one or two that compute a tile of 64 tokens each:
these multiply straight from shared memory, and hand a slot back when they have read it.
"""

from typing import Any

from xsake.kernels import mosaic_gpu_compat as gpu
from xsake.kernels.block_sparse import cost, gpu_lists, gpu_passes
from xsake.kernels.block_sparse.gpu_call import Walk
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.kernels.platforms import capability_named

# `wgmma` is of this compute capability and of no other: 10.0 does not have it any more.
CAPABILITY = (9, 0)
# Tokens of a met tile: the least that `wgmma` contracts from shared memory by our layouts.
MET_TILE = 64
# Features up to which two workers find room for their sums.
TEAM_FEATURES = {"forward": 128, "d_q": 128, "d_kv": 64}
MOST_FEATURES = {"forward": 256, "d_q": 256, "d_kv": 128}


def platforms() -> tuple[str, ...]:
    """The only platform that these kernels compile for."""
    return ("cuda",)


def unsupported(operands: Operands, problem: Problem, platform: str) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    found = capability_named(platform) or gpu.capability()
    if found is None:
        return "no GPU is here, so nobody knows its compute capability"
    if found != CAPABILITY:
        return f"it is for compute capability 9.0 (Hopper), not {'.'.join(map(str, found))}"
    features = _features(operands)
    if features > min(MOST_FEATURES.values()):
        return f"registers hold the sums of dK and dV for 128 features, not {features}"
    return gpu_passes.declined(operands, problem)


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What forward and backward will compute."""
    found = gpu_lists.walked(operands, (MET_TILE, MET_TILE))
    return cost.blockwise(operands, *found, widens=False)


def _features(operands: Operands) -> int:
    return max(operands.q.shape[-1], operands.v.shape[-1])


def _walk(name: str, operands: Operands, interpret: Any) -> Walk:
    make = gpu_lists.by_key if name == "d_kv" else gpu_lists.by_query
    listing = make(operands, MET_TILE)
    shares = listing.own.parts % 2 == 0 and _features(operands) <= TEAM_FEATURES[name]
    machine = gpu.Machine(True, interpret, uses_wgmma=True)
    return Walk(operands, listing, machine, gpu.Team(2 if shares else 1))


_PASSES = gpu_passes.Passes(_walk)
forward, backward = _PASSES.forward, _PASSES.backward
query_gradient, key_value_gradient = _PASSES.query_gradient, _PASSES.key_value_gradient
