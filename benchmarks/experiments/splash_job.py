"""One call of one side in the comparison with splash attention, as plain data between processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """What to build and count, in bfloat16.

    Args:
        side: "splash" or "xsake".
        mask: "causal", "window" (causal, the last 1024 tokens), "per_head" (every other head has
            the window), or "ragged_25": heads with 10% to 90% of the blocks, 25% on average.
        tokens, q_heads, kv_heads, head_dim: sizes; batch 1.
        block: tokens of a block, queries and keys alike. Ragged heads are drawn in blocks of 128.
        seed: of the drawing.
        is_compiled: else only grid steps are counted.
    """

    side: str
    mask: str
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    block: int
    seed: int = 0
    is_compiled: bool = True
