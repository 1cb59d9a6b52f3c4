"""torch: scaled_dot_product_attention, and FlexAttention compiled over the same block grid."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.peers.protocol import GEMM_SIZE, READ_SIZE, Prepared


def versions() -> dict[str, str]:
    """What is measured."""
    return {"torch": str(torch.__version__)}


def start(threads: int) -> None:
    """Fix the number of threads."""
    torch.set_num_threads(threads)


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """A causal call on `[B, H, T, D]` tensors, transposed outside the timed part."""
    if case["call"] == "gemm":
        x = torch.randn(GEMM_SIZE, GEMM_SIZE)
        return Prepared(lambda: x @ x, lambda _: {})
    if case["call"] == "read":
        x = torch.randn(READ_SIZE)
        return Prepared(x.sum, lambda _: {})
    q, k, v, cotangent = (
        torch.from_numpy(arrays[name])
        .to(getattr(torch, case["dtype"]))
        .transpose(1, 2)
        .contiguous()
        for name in ("q", "k", "v", "cotangent")
    )
    if case["call"] == "sdpa":
        if case["grid"] is not None:
            raise ValueError("sdpa has no block grid")
        attend = torch.nn.functional.scaled_dot_product_attention
        options = {"is_causal": q.shape[2] > 1, "enable_gqa": q.shape[1] != k.shape[1]}
    else:
        grid = arrays[case["grid"]] if case["grid"] else _causal_grid(q, case["block"])
        attend = torch.compile(flex_attention)
        options = {"block_mask": block_mask(grid, case["block"], q.shape[2])}

    def forward() -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            return {"out": attend(q, k, v, **options)}

    def gradients() -> dict[str, torch.Tensor]:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        loss = (attend(*leaves, **options) * cotangent).sum()
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, leaves), strict=True))
        return {"value": loss.detach(), **found}

    return Prepared(gradients if case["backward"] else forward, _fetched)


def _fetched(found: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    turned = lambda x: x.transpose(1, 2).contiguous() if x.ndim == 4 else x
    return {name: turned(array).float().numpy() for name, array in found.items()}


def block_mask(grid: np.ndarray, block: int, tokens: int) -> BlockMask:
    """FlexAttention's form of `grid[H, Nq, Nk]`: diagonal blocks partial, the others full."""
    diagonal = np.eye(grid.shape[-1], dtype=bool)
    partial, full = _lists(grid & diagonal), _lists(grid & ~diagonal)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=block, mask_mod=_causal, seq_lengths=(tokens, tokens)
    )


def _causal(batch, head, q_position, kv_position):
    return q_position >= kv_position


def _causal_grid(q: torch.Tensor, block: int) -> np.ndarray:
    blocks = -(-q.shape[2] // block)
    return np.broadcast_to(np.tri(blocks, dtype=bool), (q.shape[1], blocks, blocks))


def _lists(listed: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts `[1, H, Nq]` and, listed blocks first, indices `[1, H, Nq, Nk]`."""
    counts = listed.sum(-1, dtype=np.int32)[None]
    indices = np.argsort(~listed, axis=-1, kind="stable").astype(np.int32)[None]
    return torch.from_numpy(counts), torch.from_numpy(indices)
