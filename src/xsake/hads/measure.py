"""What is measured of one layer while a model reads: true block masses, entropy and estimates."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.hads.selectors import Look, Selector
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import blocks_of
from xsake.masks import AbstractMask


@runtime_checkable
class Call(Protocol):
    """What a model says about a layer's attention beside its queries and keys."""

    @property
    def layer(self) -> Any: ...

    @property
    def scale(self) -> float: ...

    @property
    def mask(self) -> AbstractMask: ...

    @property
    def softcap(self) -> float | None: ...


Watch = Callable[[Float[Array, "B T Hq D"], Float[Array, "B T Hk D"], Any, Call], Any]
"""From queries, keys, values and the call of a layer to what is kept of it."""

Observe = Callable[[Int[Array, "B T"], Watch], Any]
"""Lets a model read tokens; returns what `watch` returned, stacked over the layers."""


class Moments(NamedTuple):
    """How far components of queries and keys spread."""

    queries: Float[Array, "B Hk D"]  # mean square, over the query heads of a kv head
    keys: Float[Array, "B Hk D"]  # variance: a constant key moves no softmax


class LayerMasses(NamedTuple):
    """What one layer looked at."""

    entropy: Float[Array, "B Hq"]  # of a query's attention over tokens, mean, nats
    true: Float[Array, "B Hq Nq Nk"]  # share of each block, mean over the queries of a row
    estimates: dict[str, Float[Array, "B Hq Nq Nk"]]  # by selector


def watch_moments(q, k, v, call: Call) -> Moments:
    """A `Watch` that tells which components of q and k are worth multiplying."""
    del v, call
    batch, tokens, kv_heads, dim = k.shape
    squares = jnp.square(q.astype(jnp.float32)).reshape(batch, tokens, kv_heads, -1, dim)
    return Moments(squares.mean((1, 3)), k.astype(jnp.float32).var(1))


def watch_masses(
    block: int,
    selectors: Mapping[str, Selector],
    components: Int[Array | np.ndarray, "L Hk D"],
) -> Watch:
    """A `Watch` that measures every block, and what selectors would have thought of it.

    Args:
        block: tokens of a query block and of a kv block.
        selectors: by the name that their estimates get.
        components: of queries and keys, those first that move the scores most.
    """
    components = jnp.asarray(components)

    def watch(q, k, v, call: Call) -> LayerMasses:
        del v
        look = Look(block, call.scale, call.mask, call.softcap)
        found = block_statistics(
            q, k, block_kv=block, mask=call.mask, scale=call.scale, softcap=call.softcap
        )
        ordered = components[call.layer]
        return LayerMasses(
            found.entropy.mean(1),
            _by_row(found.mass(), block),
            {name: s.masses(q, k, look, read(s, ordered)) for name, s in selectors.items()},
        )

    return watch


def read(selector: Selector, ordered: Int[Array, "Hk D"]) -> Int[Array, "Hk R"] | None:
    """The components that a selector multiplies; None if it reads all of them."""
    count = getattr(selector, "dims", None)
    return None if count is None or count >= ordered.shape[-1] else ordered[:, :count]


def _by_row(masses: Float[Array, "B T Hq Nk"], block: int) -> Float[Array, "B Hq Nq Nk"]:
    """Means over the queries of each row; the last row may have fewer."""
    batch, tokens, heads, columns = masses.shape
    rows = blocks_of(tokens, block)
    padded = jnp.pad(masses, ((0, 0), (0, rows * block - tokens), (0, 0), (0, 0)))
    sums = padded.reshape(batch, rows, block, heads, columns).sum(2)
    size = np.minimum(block, tokens - np.arange(rows) * block).astype(np.float32)
    return jnp.moveaxis(sums / size[None, :, None, None], 1, 2)
