"""Forward hooks that capture block masses, entropy and selector estimates of each layer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.hads.selectors import ScoringContext, Selector
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import count_blocks
from xsake.masks import AbstractMask


@runtime_checkable
class AttentionCall(Protocol):
    """Attention arguments of a layer other than queries, keys and values."""

    @property
    def layer(self) -> Any: ...

    @property
    def scale(self) -> float: ...

    @property
    def mask(self) -> AbstractMask: ...

    @property
    def softcap(self) -> float | None: ...


ForwardHook = Callable[
    [Float[Array, "B T Hq D"], Float[Array, "B T Hk D"], Any, AttentionCall], Any
]
"""Called with the queries, keys, values and the call of a layer; returns arrays to collect."""

ObserveFn = Callable[[Int[Array, "B T"], ForwardHook], Any]
"""Run a model on tokens and return the outputs of a hook, stacked over the layers."""


class ComponentMoments(NamedTuple):
    """Second moments of the components of queries and keys."""

    queries: Float[Array, "B Hk D"]  # mean square, over the query heads of a kv head
    keys: Float[Array, "B Hk D"]  # variance: a constant key component does not change a softmax


class LayerMasses(NamedTuple):
    """Attention statistics of one layer."""

    entropy: Float[Array, "B Hq"]  # mean over queries of the attention entropy over tokens, nats
    true: Float[Array, "B Hq Nq Nk"]  # attention mass of each block, mean over the queries of a row
    estimates: dict[str, Float[Array, "B Hq Nq Nk"]]  # by selector


def moments_hook(q, k, v, call: AttentionCall) -> ComponentMoments:
    """Measure which components of q and k contribute most to scores; a `ForwardHook`."""
    del v, call
    batch, tokens, kv_heads, dim = k.shape
    squares = jnp.square(q.astype(jnp.float32)).reshape(batch, tokens, kv_heads, -1, dim)
    return ComponentMoments(squares.mean((1, 3)), k.astype(jnp.float32).var(1))


def make_mass_hook(
    block: int,
    selectors: Mapping[str, Selector],
    components: Int[Array | np.ndarray, "L Hk D"],
) -> ForwardHook:
    """Build a `ForwardHook` that measures true block masses and the estimates of selectors."""
    components = jnp.asarray(components)

    def hook(q, k, v, call: AttentionCall) -> LayerMasses:
        del v
        context = ScoringContext(block, call.scale, call.mask, call.softcap)
        statistics = block_statistics(
            q, k, block_kv=block, mask=call.mask, scale=call.scale, softcap=call.softcap
        )
        ordered = components[call.layer]
        return LayerMasses(
            statistics.entropy.mean(1),
            _row_means(statistics.mass(), block),
            {
                name: s.masses(q, k, context, scored_components(s, ordered))
                for name, s in selectors.items()
            },
        )

    return hook


def scored_components(selector: Selector, ordered: Int[Array, "Hk D"]) -> Int[Array, "Hk R"] | None:
    """Return the components that a selector multiplies; None: all."""
    count = getattr(selector, "dims", None)
    return None if count is None or count >= ordered.shape[-1] else ordered[:, :count]


def _row_means(masses: Float[Array, "B T Hq Nk"], block: int) -> Float[Array, "B Hq Nq Nk"]:
    """Return means over the queries of each row; the last row may have fewer."""
    batch, tokens, heads, columns = masses.shape
    rows = count_blocks(tokens, block)
    padded = jnp.pad(masses, ((0, 0), (0, rows * block - tokens), (0, 0), (0, 0)))
    sums = padded.reshape(batch, rows, block, heads, columns).sum(2)
    size = np.minimum(block, tokens - np.arange(rows) * block).astype(np.float32)
    return jnp.moveaxis(sums / size[None, :, None, None], 1, 2)
