"""Refuses updates that would do harm: numbers that are not finite, and sudden large gradients."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from pydantic import Field

from xsake.hads.fields import Number, Positive, Strict

# Norms that hardly move would make any motion a spike: a deviation counts at least so much of the
# mean.
LEAST_DEVIATION = 0.05


class GuardSection(Strict):
    """Which updates are not made."""

    is_on: Annotated[bool, Field(strict=True)] = True
    window: Annotated[Positive, Field(ge=2, le=2**16)] = Field(
        default=128, description="accepted gradient norms that a new one is compared with"
    )
    sigmas: Annotated[Number, Field(gt=0)] = Field(
        default=6.0, description="deviations above their mean that are still accepted"
    )
    most_skips: Positive = Field(default=3, description="in a row, before the run is given up")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """What the guard remembers; a part of the training state, so that resuming changes nothing.

    Args:
        norms: float32 [window], the last accepted gradient norms, as a ring.
        accepted: int32, updates that were made.
        skips: int32, updates in a row that were not made, up to now.
        total: int32, all that were not made.
    """

    norms: Any
    accepted: Any
    skips: Any
    total: Any


def first_guard(section: GuardSection) -> Guard:
    """A guard that has seen nothing."""
    count = lambda: jnp.zeros((), jnp.int32)
    return Guard(jnp.zeros((section.window,), jnp.float32), count(), count(), count())


def judge(
    section: GuardSection, guard: Guard, loss: Float[Array, ""], norm: Float[Array, ""]
) -> Bool[Array, ""]:
    """Whether an update is to be made.

    Loss and norm must be finite; once `window` updates have been accepted, the norm must also be
    below `mean + sigmas * deviation` of theirs.

    Args:
        section: the settings.
        guard: what came before.
        loss: of the batch.
        norm: of all its gradients, before clipping.

    Example:
        >>> section = GuardSection(window=2)
        >>> guard = first_guard(section)
        >>> bool(judge(section, guard, jnp.float32(1.0), jnp.float32(float("nan"))))
        False
    """
    if not section.is_on:
        return jnp.ones((), bool)
    mean = guard.norms.mean()
    deviation = jnp.maximum(guard.norms.std(), LEAST_DEVIATION * mean)
    is_warm = guard.accepted >= section.window
    is_usual = norm < mean + section.sigmas * deviation
    return jnp.isfinite(loss) & jnp.isfinite(norm) & (is_usual | ~is_warm)


def remembered(guard: Guard, norm: Float[Array, ""], is_made: Bool[Array, ""]) -> Guard:
    """The guard after an update that was made, or not."""
    place = guard.accepted % guard.norms.shape[0]
    norms = guard.norms.at[place].set(jnp.where(is_made, norm, guard.norms[place]))
    one = is_made.astype(jnp.int32)
    return Guard(
        norms=norms,
        accepted=guard.accepted + one,
        skips=jnp.where(is_made, 0, guard.skips + 1),
        total=guard.total + 1 - one,
    )


def either(is_made: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` or, bit for bit, `old`: leaf by leaf, so that both cost the same program."""
    return jax.tree.map(lambda a, b: jnp.where(is_made, a, b), new, old)


def is_hopeless(section: GuardSection, skips: int) -> bool:
    """Whether so many skips in a row mean that the run is to be given up.

    Example:
        >>> is_hopeless(GuardSection(), 2), is_hopeless(GuardSection(), 3)
        (False, True)
    """
    return skips >= section.most_skips
