"""Attention shapes of real models."""

from xsake.bench.rows import Shape
from xsake.errors import ArgumentError

HEADS: dict[str, tuple[int, int, int]] = {
    "square": (12, 12, 64),
    "smollm2-135m": (9, 3, 64),
    "llama-3-8b/4": (8, 2, 128),
    "qwen3-0.6b": (16, 8, 128),
    "gemma-3-1b": (4, 1, 256),
}
"""Query heads, kv heads and head dimension; `/4`: a quarter of the heads."""


def model_shape(name: str, tokens: int) -> Shape:
    """Return the self-attention shape of a model over `tokens` positions, batch 1.

    Example:
        >>> model_shape("smollm2-135m", 4096).q_heads
        9
    """
    if name not in HEADS:
        raise ArgumentError("unknown shape", got=name, expected=", ".join(HEADS))
    q_heads, kv_heads, head_dim = HEADS[name]
    return Shape(
        q_tokens=tokens, kv_tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim
    )
