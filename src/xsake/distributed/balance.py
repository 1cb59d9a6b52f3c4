"""Balanced heads: which kv groups go to which tensor shard, when heads have unequal work.

Tensor shards take heads in order, equally many each, and every layer waits for its busiest shard.
So heads are put in another order once, layer by layer, before a model is spread: queries, keys,
values and the rows of the output projection alike, which leaves the function as it was.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from xsake.distributed.packing import equal_parts
from xsake.errors import ArgumentError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.layout.ragged import Items, gather_rows, namespace

Q_HEADS, KV_HEADS, LAYER = "q_heads", "kv_heads", "layer"
"""What the axes that a placement changes, and the axis of layers before them, are called."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """An order of kv heads, with their query heads, for every layer.

    Args:
        kv_order: the head that stands at each place, [L, Hk]; places are shared out to shards in
            order, equally many each.
        group: query heads of a kv head.
        shards: of the tensor axis.
        before: work of each layer's shards in the given order, [L, shards].
        after: the same in this order.
    """

    kv_order: Int[np.ndarray, "L Hk"]
    group: int
    shards: int
    before: Float[np.ndarray, "L shards"]
    after: Float[np.ndarray, "L shards"]

    @property
    def q_order(self) -> Int[np.ndarray, "L Hq"]:
        """The query head that stands at each place; a group stays together, in its order."""
        spread = self.kv_order[:, :, None] * self.group + np.arange(self.group)
        return spread.reshape(self.kv_order.shape[0], -1)

    @property
    def excess_before(self) -> float:
        """Busiest / mean shard in the given order, over all layers, each at its busiest shard."""
        return excess(self.before)

    @property
    def excess_after(self) -> float:
        """The same in this order; 1 is perfect."""
        return excess(self.after)

    def inverse(self) -> "Placement":
        """The way back: what it does to a placed model gives the model as it was."""
        back = np.argsort(self.kv_order, axis=1)
        return Placement(back, self.group, self.shards, self.after, self.before)

    def apply(self, x: Any, names: tuple[str | None, ...]) -> Any:
        """A parameter with its heads in this order; one without heads as it is.

        Args:
            x: NumPy or JAX array.
            names: what its axes are called: "layer" first, and "q_heads" or "kv_heads".
        """
        orders = {Q_HEADS: self.q_order, KV_HEADS: self.kv_order}
        for axis, name in enumerate(names):
            if name in orders:
                if names[0] != LAYER:
                    raise ArgumentError(
                        "heads are placed layer by layer, so layers must be stacked",
                        got=f"axes {names}",
                        expected=f"{LAYER!r} as the first axis",
                    )
                x = reordered(x, orders[name], axis=axis)
        return x

    def layout(self, layout: BlockLayout, layer: int) -> BlockLayout:
        """A layer's layout with its heads in this order; one that heads share as it is."""
        if layout.heads == 1:
            return layout
        if layout.mask is not None and layout.mask.heads is not None:
            raise UnsupportedError(
                "a mask that differs between heads cannot be put in another order",
                got=repr(layout.mask),
                expected="one rule for all heads; the blocks listed may differ between heads",
                fix="use from_block_mask per head under one mask",
            )
        order = self.kv_order[layer] if layout.heads == self.kv_order.shape[1] else None
        order = self.q_order[layer] if layout.heads == self.q_order.shape[1] else order
        if order is None:
            raise _other_heads(layout.heads, self)
        rows = np.arange(layout.rows).reshape(layout.batch, layout.heads, layout.q_blocks)
        items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
        rows = rows[:, order].reshape(-1)
        moved = gather_rows(namespace(*items), items, rows, layout.capacity)
        return dataclasses.replace(layout, **moved._asdict())

    def __str__(self) -> str:
        layers, heads = self.kv_order.shape
        moved = int((self.kv_order != np.arange(heads)).any(axis=1).sum())
        return (
            f"{heads} kv heads on {self.shards} shards: the busiest shard has"
            f" {self.excess_before:.3f} of the mean's work in the given order and"
            f" {self.excess_after:.3f} in this one, which differs in {moved} of {layers} layers"
        )


def place_heads(
    work: Float[np.ndarray, "L Hq"] | Int[np.ndarray, "L Hq"], *, kv_heads: int, shards: int
) -> Placement:
    """The order of heads in which the busiest tensor shard of every layer has least to do.

    Args:
        work: of each layer's query heads, in any unit: the blocks of a plan, say.
        kv_heads: of a layer; a kv head moves with all its query heads.
        shards: of the tensor axis.

    Returns:
        The placement. No layer is busier than in the given order.

    Example:
        >>> work = np.array([[9, 9, 8, 8, 1, 1, 2, 2]])
        >>> placement = place_heads(work, kv_heads=4, shards=2)
        >>> placement.kv_order.tolist(), placement.before.tolist(), placement.after.tolist()
        ([[0, 2, 1, 3]], [[34.0, 6.0]], [[20.0, 20.0]])
    """
    layers, q_heads = work.shape
    if kv_heads < 1 or q_heads % kv_heads:
        raise ArgumentError(
            "query heads must be a multiple of kv heads",
            got=f"{q_heads} query heads, {kv_heads=}",
            expected=f"a divisor of {q_heads}",
        )
    if shards < 1 or kv_heads % shards:
        raise ArgumentError(
            "kv heads cannot be shared out in equal numbers",
            got=f"{kv_heads} kv heads, {shards} shards",
            expected=f"a divisor of {kv_heads}",
            fix="use fewer tensor shards",
        )
    groups = work.reshape(layers, kv_heads, -1).sum(-1).astype(np.float64)
    before = groups.reshape(layers, shards, -1).sum(-1)
    order, after = np.tile(np.arange(kv_heads), (layers, 1)), before.copy()
    for layer in range(layers):
        parts = equal_parts(groups[layer], shards)
        found = groups[layer][parts].sum(-1)
        if found.max() < before[layer].max():
            order[layer], after[layer] = parts.reshape(-1), found
    return Placement(order, q_heads // kv_heads, shards, before, after)


def excess(work: Float[np.ndarray, "L shards"]) -> float:
    """Time that layers take, each as long as its busiest shard, over that of perfect balance."""
    total = float(work.sum())
    return float(work.max(-1).sum() * work.shape[-1] / total) if total else 1.0


def reordered(
    x: Any, order: Int[np.ndarray, "L H"], *, axis: int, head_dim: int | None = None
) -> Any:
    """A stacked array with the heads of every layer in another order.

    Args:
        x: [L, ...], NumPy or JAX: weights, or anything that has a number for each head.
        order: the head that comes to each place, by layer.
        axis: of the heads.
        head_dim: entries of a head, if heads and their dimensions are one axis; None: they are not.

    Example:
        >>> x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
        >>> order = np.array([[1, 0], [0, 1]])
        >>> reordered(x, order, axis=1, head_dim=2).tolist()
        [[3, 4, 1, 2], [5, 6, 7, 8]]
    """
    entries = 1 if head_dim is None else head_dim
    if (
        axis < 1
        or axis >= x.ndim
        or (x.shape[0], x.shape[axis])
        != (
            order.shape[0],
            order.shape[1] * entries,
        )
    ):
        raise ArgumentError(
            "the array does not have these layers and heads",
            got=f"shape {tuple(x.shape)}, axis {axis}",
            expected=f"{order.shape[0]} layers first, {order.shape[1] * entries} at the axis",
            fix="stack the layers; pass head_dim if heads and dimensions are one axis",
        )
    place = (order[:, :, None] * entries + np.arange(entries)).reshape(order.shape[0], -1)
    place = place.reshape(place.shape[0], *(1,) * (axis - 1), -1, *(1,) * (x.ndim - axis - 1))
    if isinstance(x, jax.Array):
        return jnp.take_along_axis(x, jnp.asarray(place), axis=axis)
    return np.take_along_axis(x, place, axis=axis)


def _other_heads(heads: int, placement: Placement) -> ArgumentError:
    return ArgumentError(
        "the layout has other heads than the placement",
        got=f"{heads} heads",
        expected=f"1, {placement.kv_order.shape[1]} or {placement.q_order.shape[1]}",
    )
