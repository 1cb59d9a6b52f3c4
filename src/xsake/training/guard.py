"""Skip updates with non-finite or outlier gradient norms."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from xsake.training.sections import GuardSection

# Lower bound of the deviation, relative to the mean: nearly constant norms have a tiny deviation.
MIN_RELATIVE_DEVIATION = 0.05


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """State of the update filter, part of the training state.

    Args:
        norms: float32 [window], ring buffer of the last accepted gradient norms.
        accepted: int32, number of applied updates.
        skips: int32, number of consecutive skipped updates.
        total: int32, number of all skipped updates.
    """

    norms: Any
    accepted: Any
    skips: Any
    total: Any


def init_guard(section: GuardSection) -> GuardState:
    """Return the state before the first update."""
    count = lambda: jnp.zeros((), jnp.int32)
    return GuardState(jnp.zeros((section.window,), jnp.float32), count(), count(), count())


def should_update(
    section: GuardSection, guard: GuardState, loss: Float[Array, ""], norm: Float[Array, ""]
) -> Bool[Array, ""]:
    """Return whether to apply an update.

    Loss and norm must be finite. Once `window` updates were accepted, the norm must also be below
    `mean + zscore_threshold * deviation` of theirs. After `max_consecutive_skips - 1` skipped
    updates a large finite norm is accepted, because gradients may have grown permanently.

    Args:
        section: the settings.
        guard: state before the update.
        loss: of the batch.
        norm: of all gradients, before clipping.

    Example:
        >>> section = GuardSection(window=2)
        >>> guard = init_guard(section)
        >>> bool(should_update(section, guard, jnp.float32(1.0), jnp.float32(float("nan"))))
        False
    """
    if not section.enabled:
        return jnp.ones((), bool)
    is_persistent = guard.skips + 1 >= section.max_consecutive_skips
    return (
        jnp.isfinite(loss)
        & jnp.isfinite(norm)
        & (_is_in_range(section, guard, norm) | is_persistent)
    )


def _is_in_range(
    section: GuardSection, guard: GuardState, norm: Float[Array, ""]
) -> Bool[Array, ""]:
    """Return whether a norm is below the threshold, or fewer than `window` norms are known."""
    mean = guard.norms.mean()
    deviation = jnp.maximum(guard.norms.std(), MIN_RELATIVE_DEVIATION * mean)
    return (norm < mean + section.zscore_threshold * deviation) | (guard.accepted < section.window)


def update_guard(
    section: GuardSection, guard: GuardState, norm: Float[Array, ""], is_applied: Bool[Array, ""]
) -> GuardState:
    """Return the state after an update was applied or skipped.

    An accepted outlier shifts all stored norms to its level.
    """
    is_level_shift = is_applied & ~_is_in_range(section, guard, norm)
    slot = guard.accepted % section.window
    norms = guard.norms + jnp.where(is_level_shift, norm - guard.norms.mean(), 0)
    norms = norms.at[slot].set(jnp.where(is_applied, norm, norms[slot]))
    one = is_applied.astype(jnp.int32)
    return GuardState(
        norms=norms,
        accepted=guard.accepted + one,
        skips=jnp.where(is_applied, 0, guard.skips + 1),
        total=guard.total + 1 - one,
    )


def select_tree(is_applied: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Return `new` or `old` leaf by leaf, without a branch in the program."""
    return jax.tree.map(lambda a, b: jnp.where(is_applied, a, b), new, old)


def should_abort(section: GuardSection, consecutive_skips: int) -> bool:
    """Return whether this many consecutive skipped updates end the run.

    Example:
        >>> should_abort(GuardSection(), 2), should_abort(GuardSection(), 3)
        (False, True)
    """
    return consecutive_skips >= section.max_consecutive_skips
