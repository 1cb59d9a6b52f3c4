"""What decoding with native sparse attention keeps: blocks, summaries, a window and a run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from xsake.attention import Blocks, Branches
from xsake.kernels.pooled.compress import summaries_of
from xsake.layout.pytree import register_layout

_ARRAYS = (
    "keys", "values", "window_keys", "window_values", "summary_keys", "summary_values",
    "run_keys", "run_values",
)  # fmt: skip


@register_layout(leaves=_ARRAYS, static=())
@dataclasses.dataclass(frozen=True)
class NativeState:
    """One layer's memory: all keys that may be selected, and rings of the most recent ones.

    Slot i of `keys` holds position i, slot i of the summaries summary i; slot s of a ring holds
    the latest position that is s modulo its size.
    """

    keys: Float[Array, "B room Hk D"]
    values: Float[Array, "B room Hk D"]
    window_keys: Float[Array, "B window Hk D"]
    window_values: Float[Array, "B window Hk D"]
    summary_keys: Float[Array, "B Nc Hk D"]
    summary_values: Float[Array, "B Nc Hk D"]
    run_keys: Float[Array, "B length Hk D"]  # of the branch that is compressed
    run_values: Float[Array, "B length Hk D"]

    @classmethod
    def holding(
        cls, k: Branches, v: Branches, summaries: tuple[Array, Array], lengths, blocks: Blocks,
        room: int,
    ) -> "NativeState":  # fmt: skip
        """Room for `room` tokens that starts with texts of these lengths."""

        def padded(x, size):
            return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))

        def ring(x, size):
            slot = _ring_positions(lengths - 1, size)
            return jnp.take_along_axis(x, jnp.maximum(slot, 0)[:, :, None, None], axis=1)

        number = summaries_of(room, blocks.length, blocks.stride)
        return cls(
            padded(k.selected, room),
            padded(v.selected, room),
            ring(k.window, blocks.window),
            ring(v.window, blocks.window),
            padded(summaries[0], number),
            padded(summaries[1], number),
            ring(k.compressed, blocks.length),
            ring(v.compressed, blocks.length),
        )

    def with_token(self, k: Branches, v: Branches, position: Int[Array, " B"], blocks: Blocks,
                   compress: tuple) -> "NativeState":  # fmt: skip
        """One more token in every row; a summary is added whenever its run becomes whole."""
        rows = jnp.arange(position.shape[0])
        put = lambda old, slot, new: old.at[rows, slot].set(new[:, 0], mode="drop")
        length, window = blocks.length, position % blocks.window
        run = [
            put(old, position % length, new)
            for old, new in ((self.run_keys, k.compressed), (self.run_values, v.compressed))
        ]
        order = (position[:, None] + 1 + jnp.arange(length)[None]) % length  # oldest first
        begin = position + 1 - length
        is_whole = (begin >= 0) & (begin % blocks.stride == 0)
        slot = jnp.where(is_whole, begin // blocks.stride, self.summary_keys.shape[1])
        made = [
            function(
                jnp.take_along_axis(x, order[:, :, None, None], axis=1)[:, None], begin[:, None]
            )
            for x, function in zip(run, compress, strict=True)
        ]
        return NativeState(
            put(self.keys, position, k.selected),
            put(self.values, position, v.selected),
            put(self.window_keys, window, k.window),
            put(self.window_values, window, v.window),
            put(self.summary_keys, slot, made[0]),
            put(self.summary_values, slot, made[1]),
            run[0],
            run[1],
        )

    def window_positions(self, position: Int[Array, " B"]) -> Int[Array, "B window"]:
        """What is in each slot of the window's ring; a slot that is not filled is in the future."""
        found = _ring_positions(position, self.window_keys.shape[1])
        return jnp.where(found < 0, position[:, None] + 1, found)


@register_layout(leaves=("layers", "lengths"), static=())
@dataclasses.dataclass(frozen=True)
class NativeCache:
    """The states of all layers, stacked, for a batch of rows of different lengths."""

    layers: Any  # a NativeState whose arrays have a leading axis of layers
    lengths: Int[Array, " B"]

    @property
    def room(self) -> int:
        """Tokens it can hold."""
        return self.layers.keys.shape[2]

    def of_layer(self, layer) -> NativeState:
        """The state of one layer."""
        return jax.tree.map(lambda x: x[layer], self.layers)

    def with_layer(self, layer, state: NativeState) -> "NativeCache":
        """The same with another state of one layer."""
        put = lambda old, new: old.at[layer].set(new)
        return dataclasses.replace(self, layers=jax.tree.map(put, self.layers, state))

    def longer_by(self, tokens: int) -> "NativeCache":
        """The same, with so many more tokens in every row."""
        return dataclasses.replace(self, lengths=self.lengths + tokens)


def _ring_positions(last: Int[Array, " B"], size: int) -> Int[Array, "B size"]:
    """The latest position up to `last` in every slot of a ring; negative where there is none."""
    last = last[:, None]
    return last - (last - jnp.arange(size)[None]) % size
