"""From logits to tokens: pure functions of [B, vocab]; a token that is ruled out has -inf."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from xsake.errors import ArgumentError

Logits = Float[Array, "B vocab"]
Number = float | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is picked; None leaves a rule out. They apply in the order listed.

    Args:
        repetition_penalty: logits of tokens that are in the row already are divided by it if
            positive and multiplied by it if negative.
        temperature: logits are divided by it; 0 takes the likeliest token, and none of the rules
            below can change that.
        top_k: only so many tokens stay.
        top_p: only the likeliest tokens stay, as few as together have this probability.
        min_p: only tokens stay that have at least this share of the likeliest one's probability.
    """

    repetition_penalty: Number | None = None
    temperature: Number = 0.8
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None

    def __post_init__(self):
        _check("repetition_penalty", self.repetition_penalty, "above 0", lambda x: x > 0)
        _check(
            "temperature", self.temperature, "0 (the likeliest token) or above", lambda x: x >= 0
        )
        is_count = lambda x: x >= 1 and x == int(x)
        _check("top_k", self.top_k, "a whole number of tokens from 1 on", is_count)
        for name in ("top_p", "min_p"):
            _check(name, getattr(self, name), "above 0 and at most 1", lambda x: 0 < x <= 1)


def _check(name: str, value: Number | None, expected: str, is_fine) -> None:
    if value is not None and not (math.isfinite(value) and is_fine(value)):
        optional = "leave it out, or " if name != "temperature" else ""
        raise ArgumentError(
            f"{name} is out of range",
            got=f"{name}={value}",
            expected=expected,
            fix=f"{optional}give a number in that range",
        )


def pick(
    logits: Logits,
    sampling: Sampling,
    *,
    key: Key[Array, ""],
    step: int | Int[Array, ""] = 0,
    seen: Bool[Array, "B vocab"] | None = None,
) -> Int[Array, " B"]:
    """One token for every row.

    What row i draws depends on the key, on i, on the step and on its own logits, so neither the
    other rows nor their number change it.

    Args:
        logits: float32 [B, vocab].
        sampling: the rules.
        key: the same at every step.
        step: tokens picked before.
        seen: tokens in each row so far, for the repetition penalty.

    Returns:
        int32 [B].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xsake.model.sampling import Sampling, pick
        >>> logits = jnp.array([[0.0, 3.0, 2.0], [9.0, 1.0, 1.0]])
        >>> pick(logits, Sampling(temperature=0), key=jax.random.key(0)).tolist()
        [1, 0]
    """
    if sampling.repetition_penalty is not None and seen is not None:
        logits = penalised(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = allowed(logits, sampling)
    at_step = jax.random.fold_in(key, step)
    keys = jax.vmap(lambda row: jax.random.fold_in(at_step, row))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def allowed(logits: Logits, sampling: Sampling) -> Logits:
    """Logits at a temperature above 0, of the tokens that may be drawn; at least one may."""
    logits = at_temperature(logits, sampling.temperature)
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def at_temperature(logits: Logits, temperature: Number) -> Logits:
    """Logits divided by a temperature above 0, the greatest of each row moved to 0."""
    below = logits - logits.max(-1, keepdims=True)
    # The greatest stays 0 even if float32 has no number but 0 for the temperature.
    return jnp.where(below == 0, 0, below / temperature)


def keep_top_k(logits: Logits, count: int) -> Logits:
    """The `count` greatest of each row; among equals those of lower index."""
    _, kept = jax.lax.top_k(logits, min(count, logits.shape[1]))
    rows = jnp.arange(logits.shape[0])[:, None]
    is_kept = jnp.zeros(logits.shape, bool).at[rows, kept].set(True)
    return jnp.where(is_kept, logits, -jnp.inf)


def keep_top_p(logits: Logits, mass: Number) -> Logits:
    """The fewest likeliest tokens that together have the probability `mass`; at least one."""
    if mass >= 1:  # sums of rounded probabilities reach 1 before the last token
        return logits
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    likeliest_first = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    mass_before = jnp.pad(jnp.cumsum(likeliest_first, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    rows = jnp.arange(logits.shape[0])[:, None]
    is_kept = jnp.zeros(logits.shape, bool).at[rows, order].set(mass_before < mass)
    return jnp.where(is_kept, logits, -jnp.inf)


def keep_min_p(logits: Logits, share: Number) -> Logits:
    """Tokens at least `share` times as likely as the likeliest."""
    least = logits.max(-1, keepdims=True) + math.log(share)
    return jnp.where(logits >= least, logits, -jnp.inf)


def penalised(logits: Logits, seen: Bool[Array, "B vocab"], penalty: Number) -> Logits:
    """Logits of seen tokens made smaller, for a penalty above 1."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
