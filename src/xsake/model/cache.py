"""KV cache for a batch of rows of different lengths."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from xsake.layout.grid import register_layout
from xsake.model.nsa_cache import NativeCache


@register_layout(leaves=("keys", "values", "lengths"), static=())
@dataclasses.dataclass(frozen=True)
class KVCache:
    """KV cache. Slot i of a row holds position i, so the causal mask hides empty slots."""

    keys: Float[Array, "layers B capacity Hk D"]
    values: Float[Array, "layers B capacity Hk D"]
    lengths: Int[Array, " B"]

    @classmethod
    def from_prefill(cls, keys, values, lengths, capacity: int) -> "KVCache":
        """Create a cache for `capacity` tokens from the keys and values of a prefill."""
        padding = ((0, 0), (0, 0), (0, capacity - keys.shape[2]), (0, 0), (0, 0))
        return cls(jnp.pad(keys, padding), jnp.pad(values, padding), lengths.astype(jnp.int32))

    @property
    def capacity(self) -> int:
        """Maximum number of tokens."""
        return self.keys.shape[2]

    @property
    def positions(self) -> Int[Array, "1 capacity"]:
        """Position of every slot."""
        return jnp.arange(self.capacity, dtype=jnp.int32)[None]

    def set_layer(self, layer, positions: Int[Array, "B T"], k, v) -> "KVCache":
        """Return the cache with `k` and `v` of one layer written at these positions."""
        rows = jnp.arange(positions.shape[0])[:, None]
        write = lambda old, new: old.at[layer, rows, positions].set(new, mode="drop")
        return dataclasses.replace(self, keys=write(self.keys, k), values=write(self.values, v))

    def get_layer(self, layer) -> tuple[Array, Array]:
        """Return keys and values of one layer, [B, capacity, Hk, D] each."""
        return self.keys[layer], self.values[layer]

    def advance(self, tokens: int) -> "KVCache":
        """Return the cache with the length of every row increased by `tokens`."""
        return dataclasses.replace(self, lengths=self.lengths + tokens)


AnyCache = KVCache | NativeCache
"""Cache of a decoder."""
