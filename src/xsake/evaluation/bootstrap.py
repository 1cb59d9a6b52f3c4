"""Bootstrap confidence intervals over documents."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from xsake.evaluation.record import Estimate

RESAMPLES = 2000
EDGES = (2.5, 97.5)  # percent

Statistic = Callable[[Float[np.ndarray, "*rest sums"]], Float[np.ndarray, "*rest"] | np.float64]


def estimate(
    statistic: Statistic, sums: Float[np.ndarray, "documents sums"], seed: int
) -> Estimate:
    """Estimate a statistic of totals over documents with its 95 % interval.

    Whole documents are resampled: tokens of one document are not independent. Statistics of
    several sums use the same resamples, so differences are paired.

    Args:
        statistic: from totals [..., sums] to numbers [...].
        sums: of each document.
        seed: of the resamples.

    Returns:
        The statistic of all documents; no interval if there is only one.

    Example:
        >>> mean = lambda totals: totals[..., 0] / totals[..., 1]
        >>> result = estimate(mean, np.array([[2.0, 1.0], [4.0, 1.0], [6.0, 1.0]]), seed=0)
        >>> result.value, result.low < 4 < result.high
        (4.0, True)
    """
    value = float(statistic(sums.sum(axis=0)))
    documents = len(sums)
    if documents < 2:
        return Estimate(value=value, low=None, high=None)
    # Counts of each document instead of indices: the totals are one matrix product.
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES)
    low, high = np.percentile(statistic(counts @ sums), EDGES)
    return Estimate(value=value, low=float(low), high=float(high))
