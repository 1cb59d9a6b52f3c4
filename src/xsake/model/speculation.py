"""Speculative decoding of a model by itself: sparse attention drafts, another one verifies."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from xsake.attention.layer_call import AttentionFn
from xsake.model.cache import KVCache
from xsake.model.sampling import SamplingParams, check_range, sample


@dataclasses.dataclass(frozen=True)
class Draft:
    """Drafts tokens with a cheaper attention function, to be verified together in one chunk.

    Draft and verification draw a token with the same random numbers and compare it. So the output
    is that of decoding without a draft and with the same seed, up to the rounding of a chunk of
    several tokens instead of one.

    Args:
        attend: attention function, such as `hads.PlanDecoding`.
        num_tokens: drafted before each verification.
    """

    attend: AttentionFn
    num_tokens: int = 4

    def __post_init__(self):
        check_range("num_tokens", self.num_tokens, "1 or more", self.num_tokens >= 1)


class Speculated(NamedTuple):
    """Tokens after the last sampled one."""

    tokens: Int[Array, "B n"]  # drafted
    logprobs: Float[Array, "B n"]  # by the verification
    num_accepted: Int[Array, " B"]  # first tokens of each row that the verification accepts
    logits: Float[Array, "B vocab"]  # after the last accepted one
    seen: Bool[Array, "B vocab"] | None


@functools.partial(
    jax.jit, static_argnames=("graph", "attend", "draft", "sampling"), donate_argnames=("cache",)
)
def speculate(
    weights: Any,
    tokens: Int[Array, " B"],
    cache: KVCache,
    is_active: Bool[Array, " B"],
    key: Key[Array, ""],
    steps: Int[Array, " B"],
    numbers: Int[Array, " B"],
    seen: Bool[Array, "B vocab"] | None,
    *,
    graph: Any,
    attend: AttentionFn,
    draft: Draft,
    sampling: SamplingParams,
) -> tuple[Speculated, KVCache]:
    """Append a token to each active row, and the drafted tokens that are accepted.

    Args:
        weights, graph: of the decoder.
        tokens: last sampled token of each row.
        cache: with space for `draft.num_tokens` more.
        is_active: rows that are decoded.
        key, numbers, sampling: of `sample`.
        steps: number of the first drafted token in its row.
        seen: tokens in each row so far.
        attend: attention function of the verification.
        draft: attention function and number of tokens.
    """
    model, lengths = nnx.merge(graph, weights), cache.lengths
    next_token = functools.partial(sample, sampling=sampling, key=key, rows=numbers)

    def draft_token(state, step):
        token, cache, seen = state
        hidden, cache = model.extend(token[:, None], cache, attend=draft.attend)
        sampled = next_token(model.logits(hidden[:, 0]), seen, step=step)
        return (sampled.tokens, cache, sampled.seen), sampled.tokens

    steps = steps[None] + jnp.arange(draft.num_tokens)[:, None]
    (_, cache, _), drafted = jax.lax.scan(draft_token, (tokens, cache, seen), steps)
    # The keys and values of the draft are overwritten by those of the verification.
    cache = dataclasses.replace(cache, lengths=lengths)
    chunk = jnp.concatenate([tokens[None], drafted]).T
    hidden, cache = model.extend(chunk, cache, attend=attend)
    logits = model.logits(hidden)

    def verify(state, step):
        seen, is_accepted, count = state
        logits, drafted, number = step
        sampled = next_token(logits, seen, step=number)
        is_accepted &= sampled.tokens == drafted
        if seen is not None and sampled.seen is not None:
            seen = jnp.where(is_accepted[:, None], sampled.seen, seen)
        return (seen, is_accepted, count + is_accepted), sampled.logprobs

    compared = jnp.swapaxes(logits[:, :-1], 0, 1), drafted, steps
    state = seen, is_active, jnp.zeros_like(lengths)
    (seen, _, count), logprobs = jax.lax.scan(verify, state, compared)
    cache = dataclasses.replace(cache, lengths=lengths + jnp.where(is_active, 1 + count, 0))
    last = jnp.take_along_axis(logits, count[:, None, None], axis=1)[:, 0]
    return Speculated(drafted.T, logprobs.T, count, last, seen), cache
