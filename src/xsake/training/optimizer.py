"""AdamW with a warmup and a cosine: which parameters decay, and how fast all of them move."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int
from pydantic import Field, field_validator

from xsake._schema import Count, Fraction, Frozen, Number, Positive
from xsake.errors import ArgumentError
from xsake.model.sharding import LOGICAL_AXES

Names = Mapping[str, tuple[str, ...]]
"""From the paths of parameters to the logical names of their axes."""

Above0 = Annotated[Number, Field(gt=0)]
AtLeast0 = Annotated[Number, Field(ge=0)]
Below1 = Annotated[Number, Field(ge=0, lt=1)]

_KINDS: dict[str, Callable[[str], bool]] = {
    "norms": lambda path: any(part.endswith("norm") for part in path.split(".")),
    "biases": lambda path: path.endswith("bias"),
    "embeddings": lambda path: path in ("embedding", "positions"),
}


class OptimizerSection(Frozen):
    """AdamW; a linear warmup, then a cosine down to a share of the peak."""

    peak_learning_rate: Above0
    warmup_steps: Count = 0
    total_steps: Positive | None = Field(
        default=None, description="where the cosine ends; None: at run.steps"
    )
    final_share: Fraction = Field(default=0.1, description="of the peak, at the end")
    weight_decay: AtLeast0 = 0.1
    undecayed: tuple[Literal["norms", "biases", "embeddings"], ...] = Field(
        default=("norms", "biases", "embeddings"), description="kinds of parameters"
    )
    undecayed_paths: tuple[str, ...] = Field(
        default=(), description="further ones by their paths; * stands for anything"
    )
    undecayed_axes: tuple[str, ...] = Field(
        default=(), description="further ones by a logical axis that they have, such as vocab"
    )
    beta1: Below1 = 0.9
    beta2: Below1 = 0.95
    epsilon: Above0 = 1e-8
    clip_norm: AtLeast0 = Field(default=1.0, description="of all gradients; 0: not clipped")
    accumulation: Positive = Field(default=1, description="microbatches of one update")

    @field_validator("undecayed_axes")
    @classmethod
    def _known(cls, axes: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [axis for axis in axes if axis not in LOGICAL_AXES]:
            raise ArgumentError(
                "no parameter has such an axis",
                got=", ".join(map(repr, unknown)),
                expected="one of " + ", ".join(LOGICAL_AXES),
            )
        return axes


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How gradients become updates.

    Args:
        transform: clipping, AdamW and the learning rate.
        learning_rate: by the number of updates made before.
    """

    transform: optax.GradientTransformation
    learning_rate: Callable[[Any], Array]

    @staticmethod
    def updates(state: Any) -> Int[Array, ""]:
        """How many updates a state of `transform` has seen."""
        adam = next(part for part in state if isinstance(part, optax.ScaleByAdamState))
        return jnp.asarray(adam.count)


def make_optimizer(section: OptimizerSection, names: Names, *, total_steps: int) -> Optimizer:
    """The optimizer of a run.

    Args:
        section: its settings.
        names: of all parameters.
        total_steps: updates after which the learning rate is at its end.
    """
    rate = schedule(section, total_steps)
    clip = optax.clip_by_global_norm(section.clip_norm) if section.clip_norm else optax.identity()
    transform = optax.chain(
        clip,
        optax.scale_by_adam(section.beta1, section.beta2, section.epsilon, mu_dtype=jnp.float32),
        optax.add_decayed_weights(section.weight_decay, mask=nested(decayed(section, names))),
        optax.scale_by_learning_rate(rate),
    )
    return Optimizer(transform, rate)


def schedule(section: OptimizerSection, total_steps: int) -> Callable[[Any], Array]:
    """The learning rate, by the number of updates made before.

    The first update moves already, update `warmup_steps` has the peak, and the last one of
    `total_steps` has `final_share` of it, as all later ones have.

    Example:
        >>> section = OptimizerSection(peak_learning_rate=1.0, warmup_steps=2, final_share=0.5)
        >>> [round(float(schedule(section, 4)(i)), 3) for i in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.5]
    """
    peak, warmup = section.peak_learning_rate, section.warmup_steps
    cosine = optax.cosine_decay_schedule(peak, total_steps - warmup, section.final_share)
    if not warmup:
        return lambda count: jnp.asarray(cosine(count + 1), jnp.float32)
    joined = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), cosine], [warmup])
    return lambda count: jnp.asarray(joined(count + 1), jnp.float32)


def decayed(section: OptimizerSection, names: Names) -> dict[str, bool]:
    """Whether weight decay pulls at a parameter, by path.

    Args:
        section: what it leaves alone.
        names: of all parameters.

    Example:
        >>> section = OptimizerSection(peak_learning_rate=1.0)
        >>> decayed(section, {"head": ("embed", "vocab"), "final_norm.weight": ("embed",)})
        {'head': True, 'final_norm.weight': False}
    """
    for pattern in section.undecayed_paths:
        if not fnmatch.filter(names, pattern):
            raise ArgumentError(
                "optimizer.undecayed_paths names no parameter of this model",
                got=repr(pattern),
                expected="a path or a pattern of one of " + ", ".join(names),
            )

    def is_left_alone(path: str) -> bool:
        by_kind = any(_KINDS[kind](path) for kind in section.undecayed)
        by_path = any(fnmatch.fnmatchcase(path, pattern) for pattern in section.undecayed_paths)
        return by_kind or by_path or bool(set(names[path]) & set(section.undecayed_axes))

    return {path: not is_left_alone(path) for path in names}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path as dictionaries inside each other, as parameters are kept.

    Example:
        >>> nested({"a.b": 1, "a.c": 2, "d": 3})
        {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        inner = found
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found
