"""Keys and values of the tokens read so far, for a batch of rows of different lengths."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from xsake.layout.pytree import register_layout
from xsake.model.native_cache import NativeCache


@register_layout(leaves=("keys", "values", "lengths"), static=())
@dataclasses.dataclass(frozen=True)
class Cache:
    """Slot i of a row holds position i, so causality alone hides slots that are not filled yet."""

    keys: Float[Array, "layers B room Hk D"]
    values: Float[Array, "layers B room Hk D"]
    lengths: Int[Array, " B"]

    @classmethod
    def holding(cls, keys, values, lengths, room: int) -> "Cache":
        """A cache with room for `room` tokens that starts with these."""
        spare = ((0, 0), (0, 0), (0, room - keys.shape[2]), (0, 0), (0, 0))
        return cls(jnp.pad(keys, spare), jnp.pad(values, spare), lengths.astype(jnp.int32))

    @property
    def room(self) -> int:
        """Tokens it can hold."""
        return self.keys.shape[2]

    @property
    def positions(self) -> Int[Array, "1 room"]:
        """The position of every slot."""
        return jnp.arange(self.room, dtype=jnp.int32)[None]

    def with_layer(self, layer, positions: Int[Array, "B T"], k, v) -> "Cache":
        """The same with `k` and `v` of one layer written at these positions."""
        rows = jnp.arange(positions.shape[0])[:, None]
        write = lambda old, new: old.at[layer, rows, positions].set(new, mode="drop")
        return dataclasses.replace(self, keys=write(self.keys, k), values=write(self.values, v))

    def of_layer(self, layer) -> tuple[Array, Array]:
        """Keys and values of one layer, [B, room, Hk, D] each."""
        return self.keys[layer], self.values[layer]

    def longer_by(self, tokens: int) -> "Cache":
        """The same, with so many more tokens in every row."""
        return dataclasses.replace(self, lengths=self.lengths + tokens)


AnyCache = Cache | NativeCache
"""What a decoder keeps of the tokens that it has read."""
