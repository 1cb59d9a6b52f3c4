"""Refuses updates that would do harm: numbers that are not finite, and sudden large gradients."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from pydantic import Field

from xsake._schema import Frozen, Number, Positive

# Norms that hardly move would make any motion a spike: a deviation counts at least so much of the
# mean.
LEAST_DEVIATION = 0.05


class GuardSection(Frozen):
    """Which updates are not made."""

    is_on: Annotated[bool, Field(strict=True)] = True
    window: Annotated[Positive, Field(ge=2, le=2**16)] = Field(
        default=128, description="accepted gradient norms that a new one is compared with"
    )
    sigmas: Annotated[Number, Field(gt=0)] = Field(
        default=6.0, description="deviations above their mean that are still accepted"
    )
    most_skips: Positive = Field(
        default=3,
        description="in a row, before a run is given up, or large numbers become usual",
    )


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
    below `mean + sigmas * deviation` of theirs. A spike is soon over, but gradients may grow for
    good: where `most_skips - 1` updates in a row were refused, a large norm is accepted.

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
    is_to_stay = guard.skips + 1 >= section.most_skips
    return jnp.isfinite(loss) & jnp.isfinite(norm) & (_is_usual(section, guard, norm) | is_to_stay)


def _is_usual(section: GuardSection, guard: Guard, norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a norm is no spike beside those that are remembered, or too few of them are."""
    mean = guard.norms.mean()
    deviation = jnp.maximum(guard.norms.std(), LEAST_DEVIATION * mean)
    return (norm < mean + section.sigmas * deviation) | (guard.accepted < section.window)


def remembered(
    section: GuardSection, guard: Guard, norm: Float[Array, ""], is_made: Bool[Array, ""]
) -> Guard:
    """The guard after an update that was made, or not.

    Norms that were accepted though they are large lift all that are remembered to where they are.
    """
    is_lift = is_made & ~_is_usual(section, guard, norm)
    place = guard.accepted % section.window
    norms = guard.norms + jnp.where(is_lift, norm - guard.norms.mean(), 0)
    norms = norms.at[place].set(jnp.where(is_made, norm, norms[place]))
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
