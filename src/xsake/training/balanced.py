"""Balanced heads: weights in the order that gives tensor shards equal work of the run's plan.

The order is chosen once, by the plan that the run ends with, and applied to the first weights and
to every plan alike: the function stays what it was. Checkpoints say the order; exports undo it.
"""

from collections.abc import Sequence

import numpy as np

from xsake.distributed import Placement, place_heads
from xsake.distributed.balance import Q_HEADS
from xsake.training.attention import KvOrder, TrainingAttention
from xsake.training.optimizer import nested
from xsake.training.state import Parameters, flat_parameters


def placement_of(attention: TrainingAttention, *, shards: int) -> Placement | None:
    """The order of heads that gives tensor shards equal work; None where none helps.

    Args:
        attention: of the run's beginning, its heads as they were measured.
        shards: of the tensor axis.
    """
    plan = attention.plans[-1]
    if plan is None or shards == 1 or not attention.section.is_balanced:
        return None
    placement = place_heads(plan.blocks, kv_heads=plan.model.kv_heads, shards=shards)
    return placement if placement.excess_after < placement.excess_before else None


def order_of(placement: Placement) -> KvOrder:
    """The order of a placement, as plans and checkpoints take it."""
    return tuple(tuple(layer) for layer in placement.kv_order.tolist())


def with_heads_in(
    order: Sequence[Sequence[int]],
    parameters: Parameters,
    names: dict[str, tuple[str, ...]],
    *,
    is_undone: bool = False,
) -> Parameters:
    """Parameters with their heads in an order, or back in their own.

    Args:
        order: by layer, the kv head that comes to each place.
        parameters: of a decoder, by path.
        names: logical names of the axes of each, by dotted path.
        is_undone: whether the heads are in that order now and go back to where they were.
    """
    flat = flat_parameters(parameters)
    kv_order, work = np.array(order), np.zeros((len(order), 1))
    placement = Placement(kv_order, _group(flat, names, kv_order.shape[1]), 1, work, work)
    if is_undone:
        placement = placement.inverse()
    return nested({path: placement.apply(x, names[path]) for path, x in flat.items()})


def _group(flat: dict, names: dict[str, tuple[str, ...]], kv_heads: int) -> int:
    """Query heads of a kv head."""
    q_heads = next(
        x.shape[names[path].index(Q_HEADS)] for path, x in flat.items() if Q_HEADS in names[path]
    )
    return q_heads // kv_heads
