"""Synthetic block grids: causal, and random grids with per-head budgets."""

import numpy as np
from jaxtyping import Bool, Float

from xsake.errors import ArgumentError


def causal_grid(heads: int, blocks: int) -> Bool[np.ndarray, "Hq Nq Nk"]:
    """Return the blocks on or below the diagonal for each head."""
    return np.broadcast_to(np.tri(blocks, dtype=bool), (heads, blocks, blocks))


def head_budgets(
    heads: int, mean: float, *, low: float = 0.1, high: float = 0.9
) -> Float[np.ndarray, " Hq"]:
    """Return head budgets from `low` to `high` with mean `mean`.

    `budget[h] = low + (high - low) * t**p` with `t` from 0 to 1 and `p` solved for the mean;
    `p` is 1 if `mean` is the midpoint.

    Example:
        >>> budgets = head_budgets(12, 0.43)
        >>> round(float(budgets.mean()), 6), float(budgets[0]), float(budgets[-1])
        (0.43, 0.1, 0.9)
    """
    # One head has budget `low` and one `high` for any power, which bounds the mean.
    share = (high - low) / max(heads, 1)
    if not 0 < low < high <= 1 or not low + share < mean < high - share:
        raise ArgumentError(
            "mean-budget",
            "no budgets with this mean exist",
            got=f"{heads=} {low=} {mean=} {high=}",
            expected=f"0 < low < high <= 1, mean between {low + share:.3f} and {high - share:.3f}",
        )
    steps = np.linspace(0.0, 1.0, heads)
    smallest, largest = 1e-3, 1e3
    for _ in range(100):
        power = np.sqrt(smallest * largest)
        if low + (high - low) * np.mean(steps**power) > mean:
            smallest = power
        else:
            largest = power
    return low + (high - low) * steps**power


def ragged_grid(
    heads: int, blocks: int, mean: float, *, seed: int, low: float = 0.1, high: float = 0.9
) -> Bool[np.ndarray, "Hq Nq Nk"]:
    """Return random block grids of heads with different budgets.

    A head gets its budget's share of the causally visible blocks, rounded: the diagonal first, then
    the first column and the block before the diagonal (at random if the budget does not cover
    them, as for 10% of 32 x 32 blocks), then others at random. Budgets are shuffled over heads.

    `mean`, `low` and `high` are fractions of the causally visible blocks, as of `head_budgets`.

    Example:
        >>> ragged_grid(12, 32, 0.25, seed=0).sum() / causal_grid(12, 32).sum()
        np.float64(0.25)
    """
    random = np.random.default_rng(seed)
    q_block, kv_block = np.nonzero(np.tri(blocks, dtype=bool))
    visible = len(q_block)
    budgets = random.permutation(head_budgets(heads, mean, low=low, high=high))
    counts = np.diff(np.rint(np.cumsum(budgets) * visible), prepend=0).astype(int)
    rank = np.where(
        q_block == kv_block, 0, np.where((kv_block == 0) | (kv_block == q_block - 1), 1, 2)
    )
    grid = np.zeros((heads, blocks, blocks), bool)
    for head, count in enumerate(counts):
        chosen = np.lexsort((random.random(visible), rank))[: max(count, blocks)]
        grid[head, q_block[chosen], kv_block[chosen]] = True
    return grid
