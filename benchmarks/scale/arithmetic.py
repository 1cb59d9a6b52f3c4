"""What a token costs in training, counted from shapes: flops, dense and sparse, at any context.

Nothing here is measured. A pair is a query and a key that are multiplied, whether the mask lets
one see the other or not: blocks on the diagonal count whole.
"""

import dataclasses

from xsake.hads.selectors import Sampled
from xsake.layout.grid import count_blocks
from xsake.model import DecoderConfig

CONTEXTS = tuple(2**power for power in range(13, 21))
"""From 8,192 to 1,048,576 tokens."""

FORWARD, BACKWARD = 2, 7
"""Products over all pairs: q.k and p.v; for gradients dQ takes three and dK/dV four."""


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """Flops that one token of a batch takes in one update.

    Args:
        weights: products with weights: forward twice, and twice that for gradients.
        attention: products of queries, keys and values; forward twice.
        selector: choosing blocks; forward twice.
    """

    weights: float
    attention: float
    selector: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.attention + self.selector


def layer_weights(decoder: DecoderConfig) -> int:
    """Weights of one layer that tokens are multiplied with.

    Example:
        >>> layer_weights(DecoderConfig.tiny())
        15360
    """
    heads = (2 * decoder.q_heads + 2 * decoder.kv_heads) * decoder.head_dim
    return decoder.width * (heads + (3 if decoder.is_gated else 2) * decoder.mlp_width)


def weight_flops(decoder: DecoderConfig) -> int:
    """Flops of a token's products with weights: 2 forward, 4 for gradients, 2 forward again."""
    head = decoder.vocab_size * decoder.width
    return 8 * (decoder.layers * layer_weights(decoder) + head)


def dense_keys(context: int, block: int) -> float:
    """Keys that a query is multiplied with, on average, when all visible blocks are computed.

    Example:
        >>> dense_keys(1024, 128)
        576.0
    """
    return (count_blocks(context, block) + 1) / 2 * block


def window_keys(context: int, block: int, *, window: int, sinks: int) -> float:
    """The same under `window(window - 1, 0) | sinks(sinks)`: whole blocks of either.

    Example:
        >>> window_keys(1024, 128, window=256, sinks=64)
        400.0
    """
    n = count_blocks(context, block)
    reach = count_blocks(window - 1, block)  # blocks before the own one that the window touches
    first = count_blocks(sinks, block)
    seen = 0
    for row in range(n):
        start = max(row - reach, 0)
        seen += row - start + 1 + min(first, start)
    return seen / n * block


def planned_keys(context: int, block: int, budget: float) -> float:
    """The same under a plan that computes a share of the visible blocks.

    Example:
        >>> planned_keys(1024, 128, 0.25)
        144.0
    """
    return budget * dense_keys(context, block)


def attention_flops(decoder: DecoderConfig, keys: float) -> float:
    """Flops of a token's attention in one update, with `keys` keys per query on average."""
    products = 2 * FORWARD + BACKWARD
    return products * 2.0 * decoder.layers * decoder.q_heads * decoder.head_dim * keys


def selector_flops(decoder: DecoderConfig, context: int, block: int) -> float:
    """Flops of choosing blocks by the default selector, twice: gradients choose again."""
    share = Sampled().cost(context, block, decoder.head_dim)
    pairs = 2.0 * decoder.layers * decoder.q_heads * decoder.head_dim * dense_keys(context, block)
    return 2 * share * FORWARD * pairs


def dense_cost(decoder: DecoderConfig, context: int, block: int) -> TokenCost:
    """A token's cost when every visible block is computed."""
    return TokenCost(weight_flops(decoder), attention_flops(decoder, dense_keys(context, block)))


def window_cost(
    decoder: DecoderConfig, context: int, block: int, *, window: int, sinks: int
) -> TokenCost:
    """A token's cost under a window and sinks."""
    keys = window_keys(context, block, window=window, sinks=sinks)
    return TokenCost(weight_flops(decoder), attention_flops(decoder, keys))


def planned_cost(decoder: DecoderConfig, context: int, block: int, budget: float) -> TokenCost:
    """A token's cost under a plan of some budget, blocks chosen by the default selector."""
    return TokenCost(
        weight_flops(decoder),
        attention_flops(decoder, planned_keys(context, block, budget)),
        selector_flops(decoder, context, block),
    )


def least_chip_seconds(flops: float, peak_flops: float, tokens: int = 10**6) -> float:
    """Chip seconds for some tokens if every flop ran at the published peak: a lower bound.

    Example:
        >>> least_chip_seconds(2e9, 1e12)
        2000.0
    """
    return tokens * flops / peak_flops
