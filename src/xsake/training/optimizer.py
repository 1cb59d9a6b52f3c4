"""AdamW with linear warmup, cosine decay and selective weight decay."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from xsake.errors import ArgumentError
from xsake.training.sections import OptimizerSection

Names = Mapping[str, tuple[str, ...]]
"""Logical axis names of parameters by path."""

_PARAMETER_GROUPS: dict[str, Callable[[str], bool]] = {
    "norms": lambda path: any(part.endswith("norm") for part in path.split(".")),
    "biases": lambda path: path.endswith("bias"),
    "embeddings": lambda path: path in ("embedding", "positions"),
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Gradient transformation and learning rate schedule."""

    transform: optax.GradientTransformation  # clipping, AdamW and the learning rate
    learning_rate: Callable[[Any], Array]  # by the number of previous updates

    @staticmethod
    def updates(state: Any) -> Int[Array, ""]:
        """Return the number of updates of a `transform` state."""
        adam = next(part for part in state if isinstance(part, optax.ScaleByAdamState))
        return jnp.asarray(adam.count)


def make_optimizer(section: OptimizerSection, names: Names, *, total_steps: int) -> Optimizer:
    """Build the optimizer of a run."""
    rate = make_schedule(section, total_steps)
    clip = optax.clip_by_global_norm(section.clip_norm) if section.clip_norm else optax.identity()
    transform = optax.chain(
        clip,
        optax.scale_by_adam(section.beta1, section.beta2, section.epsilon, mu_dtype=jnp.float32),
        optax.add_decayed_weights(
            section.weight_decay, mask=unflatten(make_decay_mask(section, names))
        ),
        optax.scale_by_learning_rate(rate),
    )
    return Optimizer(transform, rate)


def make_schedule(section: OptimizerSection, total_steps: int) -> Callable[[Any], Array]:
    """Build the learning rate as a function of the number of previous updates.

    The first update has a positive learning rate, update `warmup_steps` has the peak, and update
    `total_steps` and all later ones have `end_lr_ratio` times the peak.

    Example:
        >>> section = OptimizerSection(peak_learning_rate=1.0, warmup_steps=2, end_lr_ratio=0.5)
        >>> [round(float(make_schedule(section, 4)(i)), 3) for i in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.5]
    """
    peak, warmup = section.peak_learning_rate, section.warmup_steps
    cosine = optax.cosine_decay_schedule(peak, total_steps - warmup, section.end_lr_ratio)
    if not warmup:
        return lambda count: jnp.asarray(cosine(count + 1), jnp.float32)
    joined = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), cosine], [warmup])
    return lambda count: jnp.asarray(joined(count + 1), jnp.float32)


def make_decay_mask(section: OptimizerSection, names: Names) -> dict[str, bool]:
    """Return whether weight decay applies to a parameter, by path.

    Example:
        >>> section = OptimizerSection(peak_learning_rate=1.0)
        >>> make_decay_mask(section, {"head": ("embed", "vocab"), "final_norm.weight": ("embed",)})
        {'head': True, 'final_norm.weight': False}
    """
    for pattern in section.no_decay_paths:
        if not fnmatch.filter(names, pattern):
            raise ArgumentError(
                "no-decay-paths", "optimizer.no_decay_paths matches no parameter",
                got=repr(pattern),
                expected="a path or a pattern of one of " + ", ".join(names),
            )  # fmt: skip

    def is_excluded(path: str) -> bool:
        by_group = any(_PARAMETER_GROUPS[group](path) for group in section.no_decay)
        by_path = any(fnmatch.fnmatchcase(path, pattern) for pattern in section.no_decay_paths)
        return by_group or by_path or bool(set(names[path]) & set(section.no_decay_axes))

    return {path: not is_excluded(path) for path in names}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries from values by dotted path.

    Example:
        >>> unflatten({"a.b": 1, "a.c": 2, "d": 3})
        {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        inner = tree
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree
