"""Selection cost as a share of dense causal attention, in flops of matrix products.

Dense attention has `4 D` flops per visible pair: `2 D` for the score and `2 D` for the value.
Softmax, pooling and sorting are not counted.
"""

from collections.abc import Callable

Cost = Callable[[int, int, int], float]
"""From tokens, block and head dimension to a share of the dense flops."""


def _share(flops: float, tokens: int, head_dim: int) -> float:
    return flops / (4 * head_dim * (tokens * (tokens + 1) / 2))


def _triangle(side: int) -> float:
    return side * (side + 1) / 2


def zero_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return 0: the rule does not use queries."""
    return 0.0


def pooled_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return one product of `2 D` per visible block: about `1 / (2 block^2)`.

    Example:
        >>> f"{pooled_cost(8192, 32, 64):.5f}"
        '0.00049'
    """
    return _share(2 * head_dim * _triangle(tokens // block), tokens, head_dim)


def gate_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return one product of `2 D` per token and visible block: about `1 / (2 block)`."""
    return block * pooled_cost(tokens, block, head_dim)


def bound_cost(tokens: int, block: int, head_dim: int) -> float:
    """Return two products of `2 D` per token and visible block: about `1 / block`."""
    return 2 * gate_cost(tokens, block, head_dim)


def antidiagonal_cost(stride: int) -> Cost:
    """Return one product of `2 stride D` per visible cell: about `1 / (2 stride)`.

    Example:
        >>> f"{antidiagonal_cost(8)(8192, 32, 64):.3f}"
        '0.063'
    """

    def cost(tokens: int, block: int, head_dim: int) -> float:
        flops = 2 * stride * head_dim * _triangle(tokens // stride)
        return _share(flops, tokens, head_dim)

    return cost


def last_queries_cost(count: int) -> Cost:
    """Return one product of `2 D` per pair of the last `count` queries: about `count / tokens`."""

    def cost(tokens: int, block: int, head_dim: int) -> float:
        queries = min(count, tokens)
        pairs = queries * tokens - _triangle(queries - 1)
        return _share(2 * head_dim * pairs, tokens, head_dim)

    return cost
