"""Sampling: pure functions of logits [B, vocab]; excluded tokens get -inf."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from xsake.errors import ArgumentError

Logits = Float[Array, "B vocab"]
Number = float | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, applied in this order; None disables one.

    Args:
        repetition_penalty: divides positive and multiplies negative logits of tokens that are
            already in the row.
        temperature: divides the logits; 0 is greedy decoding, which ignores the filters below.
        top_k: keep the k most likely tokens.
        top_p: keep the smallest set of most likely tokens with this total probability.
        min_p: keep tokens with at least this share of the largest probability.
    """

    repetition_penalty: Number | None = None
    temperature: Number = 0.8
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None

    def __post_init__(self):
        for name, expected, is_valid in (
            ("repetition_penalty", "above 0", lambda x: x > 0),
            ("temperature", "0 (greedy) or above", lambda x: x >= 0),
            ("top_k", "an integer of at least 1", lambda x: x >= 1 and x == int(x)),
            ("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1),
            ("min_p", "above 0 and at most 1", lambda x: 0 < x <= 1),
        ):
            value = getattr(self, name)
            is_off = value is None
            check_range(name, value, expected, is_off or math.isfinite(value) and is_valid(value))


def check_range(name: str, value: Number | None, expected: str, is_valid: bool) -> None:
    """Raise ArgumentError for an option out of its range."""
    if not is_valid:
        raise ArgumentError(
            "sampling-range", f"{name} is out of range", got=f"{name}={value}", expected=expected,
            fix="use a number in that range; `None` disables a filter",
        )  # fmt: skip


def sample_tokens(
    logits: Logits,
    sampling: SamplingParams,
    *,
    key: Key[Array, ""],
    step: int | Int[Array, " B"] = 0,
    rows: Int[Array, " B"] | None = None,
    seen: Bool[Array, "B vocab"] | None = None,
) -> Int[Array, " B"]:
    """Sample one token per row.

    A token depends on the key, the row's number, the step and its logits, but not on other rows.

    Args:
        logits: float32 [B, vocab].
        sampling: sampling parameters.
        key: the same at every step.
        step: number of earlier steps, of all rows or of each.
        rows: number of each row; None: 0, 1, 2...
        seen: tokens in each row so far, for the repetition penalty.

    Returns:
        int32 [B].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xsake.model.sampling import SamplingParams, sample_tokens
        >>> logits = jnp.array([[0.0, 3.0, 2.0], [9.0, 1.0, 1.0]])
        >>> sample_tokens(logits, SamplingParams(temperature=0), key=jax.random.key(0)).tolist()
        [1, 0]
    """
    if sampling.repetition_penalty is not None and seen is not None:
        logits = apply_repetition_penalty(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = filter_logits(logits, sampling)
    rows = jnp.arange(logits.shape[0]) if rows is None else rows
    draw = lambda step, row: jax.random.fold_in(jax.random.fold_in(key, step), row)
    keys = jax.vmap(draw)(jnp.broadcast_to(step, rows.shape), rows)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class Sampled(NamedTuple):
    """A token of each row."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]  # before temperature and filters
    seen: Bool[Array, "B vocab"] | None


def sample(
    logits: Logits, seen: Bool[Array, "B vocab"] | None, sampling: SamplingParams, **options: Any
) -> Sampled:
    """Sample one token per row; `options` are those of `sample_tokens`."""
    tokens = sample_tokens(logits, sampling, seen=seen, **options)
    rows = jnp.arange(tokens.shape[0])
    logprobs = jax.nn.log_softmax(logits, axis=-1)[rows, tokens]
    return Sampled(tokens, logprobs, None if seen is None else seen.at[rows, tokens].set(True))


def filter_logits(logits: Logits, sampling: SamplingParams) -> Logits:
    """Apply a temperature above 0 and the filters; at least one token is kept."""
    logits = apply_temperature(logits, sampling.temperature)
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def apply_temperature(logits: Logits, temperature: Number) -> Logits:
    """Divide logits by a temperature above 0, after subtracting the maximum of each row."""
    shifted = logits - logits.max(-1, keepdims=True)
    # The maximum stays 0 even if the temperature underflows in float32.
    return jnp.where(shifted == 0, 0, shifted / temperature)


def keep_top_k(logits: Logits, count: int) -> Logits:
    """Keep the `count` largest logits of each row; ties go to the lower index."""
    _, kept = jax.lax.top_k(logits, min(count, logits.shape[1]))
    rows = jnp.arange(logits.shape[0])[:, None]
    is_kept = jnp.zeros(logits.shape, bool).at[rows, kept].set(True)
    return jnp.where(is_kept, logits, -jnp.inf)


def keep_top_p(logits: Logits, mass: Number) -> Logits:
    """Keep the smallest set of most likely tokens with total probability `mass`; at least one."""
    if mass >= 1:  # sums of rounded probabilities reach 1 before the last token
        return logits
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    mass_before = jnp.pad(jnp.cumsum(probabilities, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    rows = jnp.arange(logits.shape[0])[:, None]
    is_kept = jnp.zeros(logits.shape, bool).at[rows, order].set(mass_before < mass)
    return jnp.where(is_kept, logits, -jnp.inf)


def keep_min_p(logits: Logits, share: Number) -> Logits:
    """Keep tokens with at least `share` of the largest probability."""
    threshold = logits.max(-1, keepdims=True) + math.log(share)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def apply_repetition_penalty(
    logits: Logits, seen: Bool[Array, "B vocab"], penalty: Number
) -> Logits:
    """Reduce the logits of seen tokens, for a penalty above 1."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
