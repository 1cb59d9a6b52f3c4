"""What choosing blocks costs, as a share of dense causal attention; counts products only.

Dense attention multiplies `4 D` per visible pair: `2 D` for the score and `2 D` for the value.
Softmax, pooling and sorting are counted on neither side.
"""

from collections.abc import Callable

Cost = Callable[[int, int, int], float]
"""From tokens, block and head dimension to a share of the dense flops."""


def _share(flops: float, tokens: int, head_dim: int) -> float:
    return flops / (4 * head_dim * (tokens * (tokens + 1) / 2))


def _triangle(side: int) -> float:
    return side * (side + 1) / 2


def free(tokens: int, block: int, head_dim: int) -> float:
    """Nothing: the rule does not look at the queries."""
    return 0.0


def of_pooled(tokens: int, block: int, head_dim: int) -> float:
    """One product of `2 D` per visible block: about `1 / (2 block^2)`.

    Example:
        >>> f"{of_pooled(8192, 32, 64):.5f}"
        '0.00049'
    """
    return _share(2 * head_dim * _triangle(tokens // block), tokens, head_dim)


def of_gates(tokens: int, block: int, head_dim: int) -> float:
    """One product of `2 D` per token and visible block: about `1 / (2 block)`."""
    return block * of_pooled(tokens, block, head_dim)


def of_bounds(tokens: int, block: int, head_dim: int) -> float:
    """Two products of `2 D` per token and visible block: about `1 / block`."""
    return 2 * of_gates(tokens, block, head_dim)


def of_antidiagonals(stride: int) -> Cost:
    """One product of `2 stride D` per visible cell of `stride` x `stride`: about `1 / (2 stride)`.

    Example:
        >>> f"{of_antidiagonals(8)(8192, 32, 64):.3f}"
        '0.063'
    """

    def cost(tokens: int, block: int, head_dim: int) -> float:
        flops = 2 * stride * head_dim * _triangle(tokens // stride)
        return _share(flops, tokens, head_dim)

    return cost


def of_last_queries(count: int) -> Cost:
    """One product of `2 D` per visible pair of the last `count` queries: about `count / tokens`."""

    def cost(tokens: int, block: int, head_dim: int) -> float:
        seen = min(count, tokens)
        pairs = seen * tokens - _triangle(seen - 1)
        return _share(2 * head_dim * pairs, tokens, head_dim)

    return cost
