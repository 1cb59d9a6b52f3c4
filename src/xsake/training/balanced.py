"""Order of heads in the weights that gives tensor shards equal work.

The order is chosen once, from the final plan, and applied to the initial weights and to all plans;
the function of the model is unchanged. Checkpoints record the order, exports undo it.
"""

from collections.abc import Sequence

import numpy as np

from xsake.distributed import HeadPlacement, place_heads
from xsake.distributed.head_balancing import Q_HEADS
from xsake.training.attention import KvOrder, TrainingAttention
from xsake.training.optimizer import unflatten
from xsake.training.state import Parameters, flat_parameters


def choose_placement(attention: TrainingAttention, *, shards: int) -> HeadPlacement | None:
    """Choose the order of heads with equal work per tensor shard; None if none is better.

    Args:
        attention: at the start of the run, with the heads in calibration order.
        shards: size of the tensor axis.
    """
    plan = attention.plans[-1]
    if plan is None or shards == 1 or not attention.section.balance_heads:
        return None
    placement = place_heads(plan.blocks, kv_heads=plan.model.kv_heads, shards=shards)
    return placement if placement.excess_after < placement.excess_before else None


def to_kv_order(placement: HeadPlacement) -> KvOrder:
    """Return the order of a placement in the form of plans and checkpoints."""
    return tuple(tuple(layer) for layer in placement.kv_order.tolist())


def reorder_heads(
    order: Sequence[Sequence[int]],
    parameters: Parameters,
    names: dict[str, tuple[str, ...]],
    *,
    is_inverse: bool = False,
) -> Parameters:
    """Return parameters with reordered heads.

    Args:
        order: by layer, the kv head for each position.
        parameters: of a decoder, by path.
        names: logical axis names of each parameter, by dotted path.
        is_inverse: undo the order.
    """
    flat = flat_parameters(parameters)
    kv_order, work = np.array(order), np.zeros((len(order), 1))
    placement = HeadPlacement(kv_order, _group_size(flat, names, kv_order.shape[1]), 1, work, work)
    if is_inverse:
        placement = placement.inverse()
    return unflatten({path: placement.apply(x, names[path]) for path, x in flat.items()})


def _group_size(flat: dict, names: dict[str, tuple[str, ...]], kv_heads: int) -> int:
    """Return the number of query heads per kv head."""
    q_heads = next(
        x.shape[names[path].index(Q_HEADS)] for path, x in flat.items() if Q_HEADS in names[path]
    )
    return q_heads // kv_heads
