"""Head balancing: reorder heads so that tensor shards have equal work.

Tensor shards take equal numbers of consecutive heads, and every layer waits for its slowest shard.
Heads are permuted once per layer, before the model is sharded: queries, keys, values and the rows
of the output projection alike, which does not change the function.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from xsake.distributed.load_balancing import partition_equal
from xsake.errors import ArgumentError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.layout.csr import Items, gather_rows, namespace

Q_HEADS, KV_HEADS, LAYER = "q_heads", "kv_heads", "layer"
"""Logical names of the permuted axes and of the stacked layer axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadPlacement:
    """Permutation of kv heads, with their query heads, for every layer.

    Args:
        kv_order: head at each index, [L, Hk]; each shard takes Hk / shards consecutive heads.
        group: query heads per kv head.
        shards: size of the tensor axis.
        before: work per layer and shard in the original order, [L, shards].
        after: work per layer and shard in this order.
    """

    kv_order: Int[np.ndarray, "L Hk"]
    group: int
    shards: int
    before: Float[np.ndarray, "L shards"]
    after: Float[np.ndarray, "L shards"]

    @property
    def q_order(self) -> Int[np.ndarray, "L Hq"]:
        """Query head at each index; groups stay together."""
        order = self.kv_order[:, :, None] * self.group + np.arange(self.group)
        return order.reshape(self.kv_order.shape[0], -1)

    @property
    def excess_before(self) -> float:
        """Imbalance in the original order; see `mean_imbalance`."""
        return mean_imbalance(self.before)

    @property
    def excess_after(self) -> float:
        """Imbalance in this order; 1 is perfect."""
        return mean_imbalance(self.after)

    def inverse(self) -> "HeadPlacement":
        """Return the inverse permutation."""
        inverse_order = np.argsort(self.kv_order, axis=1)
        return HeadPlacement(inverse_order, self.group, self.shards, self.after, self.before)

    def apply(self, x: Any, names: tuple[str | None, ...]) -> Any:
        """Permute the heads of a parameter; parameters without heads are returned unchanged.

        Args:
            x: NumPy or JAX array.
            names: logical axis names: "layer" first, and "q_heads" or "kv_heads".
        """
        orders = {Q_HEADS: self.q_order, KV_HEADS: self.kv_order}
        for axis, name in enumerate(names):
            if name in orders:
                if names[0] != LAYER:
                    raise ArgumentError(
                        "order-layers", "layers must be stacked: heads are permuted per layer",
                        got=f"axes {names}",
                        expected=f"{LAYER!r} as the first axis",
                    )  # fmt: skip
                x = reorder_heads(x, orders[name], axis=axis)
        return x

    def layout(self, layout: BlockLayout, layer: int) -> BlockLayout:
        """Permute the heads of a layer's layout; shared layouts are returned unchanged."""
        if layout.heads == 1:
            return layout
        if layout.mask is not None and layout.mask.heads is not None:
            raise UnsupportedError(
                "permute-per-head-mask", "a mask with per-head rules cannot be permuted",
                got=repr(layout.mask),
                expected="one rule for all heads; block lists may differ between heads",
                fix="use from_block_mask with per-head grids and one mask",
            )  # fmt: skip
        order = self.kv_order[layer] if layout.heads == self.kv_order.shape[1] else None
        order = self.q_order[layer] if layout.heads == self.q_order.shape[1] else order
        if order is None:
            raise _heads_error(layout.heads, self)
        rows = np.arange(layout.rows).reshape(layout.batch, layout.heads, layout.q_blocks)
        items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
        rows = rows[:, order].reshape(-1)
        items = gather_rows(namespace(*items), items, rows, layout.capacity)
        return dataclasses.replace(layout, **items._asdict())

    def __str__(self) -> str:
        layers, heads = self.kv_order.shape
        changed = int((self.kv_order != np.arange(heads)).any(axis=1).sum())
        return (
            f"{heads} kv heads on {self.shards} shards: max / mean work {self.excess_before:.3f} in"
            f" the original order, {self.excess_after:.3f} in this order;"
            f" {changed} of {layers} layers differ"
        )


def place_heads(
    work: Float[np.ndarray, "L Hq"] | Int[np.ndarray, "L Hq"], *, kv_heads: int, shards: int
) -> HeadPlacement:
    """Find an order of heads that minimizes the maximum work of the tensor shards of each layer.

    Args:
        work: work per layer and query head in any unit, e.g. the blocks of a plan.
        kv_heads: kv heads of a layer; they move with their query heads.
        shards: size of the tensor axis.

    Returns:
        The placement. The maximum work of a layer never exceeds that of the original order.

    Example:
        >>> work = np.array([[9, 9, 8, 8, 1, 1, 2, 2]])
        >>> placement = place_heads(work, kv_heads=4, shards=2)
        >>> placement.kv_order.tolist(), placement.before.tolist(), placement.after.tolist()
        ([[0, 2, 1, 3]], [[34.0, 6.0]], [[20.0, 20.0]])
    """
    layers, q_heads = work.shape
    if kv_heads < 1 or q_heads % kv_heads:
        raise ArgumentError(
            "placement-groups", "query heads must be a multiple of kv heads",
            got=f"{q_heads} query heads, {kv_heads=}",
            expected=f"a divisor of {q_heads}",
        )  # fmt: skip
    if shards < 1 or kv_heads % shards:
        raise ArgumentError(
            "placement-shards", "kv heads are not a multiple of the tensor shards",
            got=f"{kv_heads} kv heads, {shards} shards", expected=f"a divisor of {kv_heads}",
            fix="use fewer tensor shards",
        )  # fmt: skip
    groups = work.reshape(layers, kv_heads, -1).sum(-1).astype(np.float64)
    before = groups.reshape(layers, shards, -1).sum(-1)
    order, after = np.tile(np.arange(kv_heads), (layers, 1)), before.copy()
    for layer in range(layers):
        parts = partition_equal(groups[layer], shards)
        loads = groups[layer][parts].sum(-1)
        if loads.max() < before[layer].max():
            order[layer], after[layer] = parts.reshape(-1), loads
    return HeadPlacement(order, q_heads // kv_heads, shards, before, after)


def mean_imbalance(work: Float[np.ndarray, "L shards"]) -> float:
    """Return the sum over layers of the maximum work of a shard, relative to perfect balance."""
    total = float(work.sum())
    return float(work.max(-1).sum() * work.shape[-1] / total) if total else 1.0


def reorder_heads(
    x: Any, order: Int[np.ndarray, "L H"], *, axis: int, head_dim: int | None = None
) -> Any:
    """Permute the heads of a stacked array in every layer.

    Args:
        x: [L, ...], NumPy or JAX.
        order: head at each index, by layer.
        axis: head axis.
        head_dim: entries per head if heads and head dimension share an axis; otherwise None.

    Example:
        >>> x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
        >>> order = np.array([[1, 0], [0, 1]])
        >>> reorder_heads(x, order, axis=1, head_dim=2).tolist()
        [[3, 4, 1, 2], [5, 6, 7, 8]]
    """
    entries = 1 if head_dim is None else head_dim
    if (
        axis < 1
        or axis >= x.ndim
        or (x.shape[0], x.shape[axis]) != (order.shape[0], order.shape[1] * entries)
    ):
        raise ArgumentError(
            "order-shape",
            "the array has other layers and heads than the order",
            got=f"shape {tuple(x.shape)}, axis {axis}",
            expected=f"{order.shape[0]} layers first, {order.shape[1] * entries} at the axis",
            fix="stack the layers; pass head_dim if heads and head dimension share an axis",
        )
    index = (order[:, :, None] * entries + np.arange(entries)).reshape(order.shape[0], -1)
    index = index.reshape(index.shape[0], *(1,) * (axis - 1), -1, *(1,) * (x.ndim - axis - 1))
    if isinstance(x, jax.Array):
        return jnp.take_along_axis(x, jnp.asarray(index), axis=axis)
    return np.take_along_axis(x, index, axis=axis)


def _heads_error(heads: int, placement: HeadPlacement) -> ArgumentError:
    return ArgumentError(
        "placement-heads", "layout and placement have different numbers of heads",
        got=f"{heads} heads",
        expected=f"1, {placement.kv_order.shape[1]} or {placement.q_order.shape[1]}",
    )  # fmt: skip
