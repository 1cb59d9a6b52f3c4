"""Batched autoregressive generation."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from xsake.attention.layer_call import AttentionFn
from xsake.cache import PageSelector
from xsake.errors import ArgumentError
from xsake.model.attend import DenseAttention, LayoutAttention
from xsake.model.cache import AnyCache, KVCache
from xsake.model.decoder import Decoder
from xsake.model.sampling import SamplingParams, check_range, sample_tokens

OnTokens = Callable[[tuple[int | None, ...]], None]
"""Callback with the new token of every row at every step; None for finished rows."""

FinishReason = Literal["end", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingParams):
    """Length limit, seed and sampling parameters.

    Args:
        max_new_tokens: maximum number of new tokens per row.
        seed: of sampling.
        end_ids: tokens that end a row; not included in its output.
    """

    max_new_tokens: int = 128
    seed: int = 0
    end_ids: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_range("max_new_tokens", self.max_new_tokens, "1 or more", self.max_new_tokens >= 1)
        check_range("seed", self.seed, "0 to 2**31 - 1", 0 <= self.seed < 2**31)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters, which are static in the compiled sampler."""
        fields = dataclasses.fields(SamplingParams)
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields})


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Output of one row.

    Args:
        tokens: without the end token.
        logprobs: log-probability of each token before temperature and filters.
        finish: "end" after an end token, "length" after `max_new_tokens`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason


@dataclasses.dataclass(frozen=True)
class GenerationTiming:
    """Timing of a generation; compilation is separate.

    Args:
        prompt_tokens: of all rows, without padding.
        compile_seconds: near 0 if shapes, attention and sampling are cached.
        prefill_seconds: until the first token of every row.
        decode_tokens: all later tokens of unfinished rows.
        decode_seconds: for these.
    """

    prompt_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding throughput over all rows; None if there was no step after the first token."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """Outputs in the order of the prompts, and timing."""

    rows: tuple[Continuation, ...]
    timing: GenerationTiming


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " n"]],
    options: GenerationOptions = GenerationOptions(),  # noqa: B008 (frozen)
    *,
    attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
    decode_attend: AttentionFn | None = None,
    on_tokens: OnTokens | None = None,
) -> GenerationResult:
    """Generate tokens for a batch of prompts.

    The tokens of a row depend on its prompt, its index in the batch and the options, not on other
    rows, up to rounding: another batch size may change the summation order and swap tokens of
    nearly equal probability. Greedy decoding does not depend on the index.

    Prompts and cache are padded to one of few sizes (`padded_length`), so that prompts of similar
    length do not recompile. Another number of rows does.

    Args:
        model: any decoder.
        prompts: token ids of each row, at least one each.
        options: length limit and sampling.
        attend: attention function for prefill.
        decode_attend: attention function for decoding; None: as for prefill.
        on_tokens: called at every step.

    Returns:
        Tokens, log-probabilities, finish reasons and timing.

    Example:
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> from xsake.model.generate import GenerationOptions, generate
        >>> model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> options = GenerationOptions(max_new_tokens=4, temperature=0)
        >>> result = generate(model, [[1, 2, 3], [4]], options)
        >>> [(len(row.tokens), row.finish) for row in result.rows]
        [(4, 'length'), (4, 'length')]
    """
    tokens, lengths = _pad_prompts(prompts, model, options)
    capacity = padded_length(int(lengths.max()) + options.max_new_tokens, model.config.context)
    decode_attend = _select_decode_attention(attend, decode_attend)
    graph, weights = nnx.split(model)
    programs, key = _CompiledPrograms(), jax.random.key(options.seed)
    started = first_at = programs.clock()
    logits, cache = programs.run(
        _prefill, weights, tokens, lengths, graph=graph, attend=attend, capacity=capacity,
        selector=getattr(decode_attend, "page_selector", None),
    )  # fmt: skip
    seen = _mark_seen(prompts, model, options)
    rows = _BatchState(len(prompts), options.end_ids)
    for step in range(options.max_new_tokens):
        sampled, logprobs, seen = programs.run(
            _sample, logits, key, jnp.int32(step), seen, sampling=options.sampling
        )
        new = rows.add(np.asarray(sampled), np.asarray(logprobs))
        first_at = programs.clock() if step == 0 else first_at
        if on_tokens is not None:
            on_tokens(new)
        if not rows.is_active.any() or step == options.max_new_tokens - 1:
            break
        is_active = jnp.asarray(rows.is_active)
        logits, cache = programs.run(
            _extend, weights, sampled, cache, is_active, graph=graph, attend=decode_attend
        )
    timing = GenerationTiming(
        prompt_tokens=int(lengths.sum()),
        compile_seconds=programs.compile_seconds,
        prefill_seconds=first_at - started,
        decode_tokens=rows.num_sampled - len(prompts),
        decode_seconds=programs.clock() - first_at,
    )
    return GenerationResult(rows.continuations(), timing)


def padded_length(tokens: int, context: int) -> int:
    """Round `tokens` up to one of few sizes: at most a quarter more, or to a multiple of 64.

    The block layout of `LayoutAttention` for prefill must have this length.

    Args:
        tokens: length of the longest row.
        context: of the model; upper limit.

    Example:
        >>> [padded_length(tokens, 8192) for tokens in (1, 65, 1000, 1100, 8000)]
        [64, 128, 1024, 1280, 8192]
    """
    unit = max(64, 2 ** (tokens.bit_length() - 3))
    return min(-(-tokens // unit) * unit, context)


def _pad_prompts(prompts, model: Decoder, options: GenerationOptions) -> tuple[Array, Array]:
    """Validate and right-pad prompts; return ([B, T] tokens, [B] lengths)."""
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if lengths.size == 0 or lengths.min() == 0:
        raise ArgumentError(
            "empty-prompt", "empty prompt", got=f"prompts of {lengths.tolist()} tokens"[:200],
            expected="at least one prompt, and at least one token in each",
            fix="start an empty prompt with the BOS token of the model",
        )  # fmt: skip
    context, vocab = model.config.context, model.config.vocab_size
    longest = int(lengths.max())
    if longest + options.max_new_tokens > context:
        raise ArgumentError(
            "prompt-length",
            "prompt and new tokens exceed the context of the model",
            got=f"{longest} prompt tokens + max_new_tokens={options.max_new_tokens}",
            expected=f"at most {context} together",
            fix="shorten the longest prompt, or reduce max_new_tokens",
        )
    tokens = np.zeros((len(prompts), padded_length(longest, context)), np.int32)
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab:
            raise ArgumentError(
                "prompt-vocabulary", f"prompt {row} has token ids outside the vocabulary",
                got=f"{ids.dtype} from {ids.min()} to {ids.max()}",
                expected=f"integers from 0 to {vocab - 1}", fix="use the tokenizer of the model",
            )  # fmt: skip
        tokens[row, : len(ids)] = ids
    return jnp.asarray(tokens), jnp.asarray(lengths)


def _select_decode_attention(attend: AttentionFn, decode_attend: AttentionFn | None) -> AttentionFn:
    if decode_attend is None and isinstance(attend, LayoutAttention):
        raise ArgumentError(
            "decode-layout",
            "a layout has a fixed length, so decoding needs another attention function",
            got="attend=LayoutAttention(...), decode_attend=None", expected="decode_attend",
            fix="decode_attend=DenseAttention(), or MaskedAttention(mask of the layout)",
        )  # fmt: skip
    return attend if decode_attend is None else decode_attend


def _mark_seen(prompts, model: Decoder, options: GenerationOptions) -> Array | None:
    """Return bool [B, vocab] of the tokens in each prompt; None without a repetition penalty."""
    if options.repetition_penalty is None:
        return None
    seen = np.zeros((len(prompts), model.config.vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, np.asarray(prompt)] = True
    return jnp.asarray(seen)


class _BatchState:
    """Generated tokens of all rows, and which rows are active."""

    def __init__(self, count: int, end_ids: tuple[int, ...]):
        self.is_active = np.ones(count, bool)
        self.num_sampled = 0  # end tokens included
        self._end_ids = end_ids
        self._rows: list[list[tuple[int, float]]] = [[] for _ in range(count)]

    def add(self, tokens: np.ndarray, logprobs: np.ndarray) -> tuple[int | None, ...]:
        """Add the tokens [B] of a step; return the new token of each row or None."""
        self.num_sampled += int(self.is_active.sum())
        self.is_active = self.is_active & ~np.isin(tokens, self._end_ids)
        for row in np.flatnonzero(self.is_active):
            self._rows[row].append((int(tokens[row]), float(logprobs[row])))
        pairs = zip(tokens.tolist(), self.is_active, strict=True)
        return tuple(token if is_active else None for token, is_active in pairs)

    def continuations(self) -> tuple[Continuation, ...]:
        """Return the output of every row."""
        return tuple(
            Continuation(
                tuple(token for token, _ in row),
                tuple(logprob for _, logprob in row),
                "length" if is_active else "end",
            )
            for row, is_active in zip(self._rows, self.is_active, strict=True)
        )


class _CompiledPrograms:
    """Runs jitted programs; `clock` excludes their compilation."""

    def __init__(self):
        self._compiled: dict[Any, Any] = {}
        self.compile_seconds = 0.0

    def clock(self) -> float:
        """Return a time in seconds that excludes compilation."""
        return time.perf_counter() - self.compile_seconds

    def run(self, program, *arguments, **static):
        if program not in self._compiled:
            started = time.perf_counter()
            # jit caches the compiled program for later generations.
            self._compiled[program] = program.lower(*arguments, **static).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[program](*arguments)


@functools.partial(jax.jit, static_argnames=("graph", "attend", "capacity", "selector"))
def _prefill(
    weights,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    graph,
    attend,
    capacity: int,
    selector: PageSelector | None,
) -> tuple[Float[Array, "B vocab"], AnyCache]:
    """Return the logits after the last token of each prompt, and the cache."""
    model = nnx.merge(graph, weights)
    hidden, cache = model.prefill(tokens, lengths, capacity=capacity, attend=attend)
    if selector is not None and isinstance(cache, KVCache):
        cache = cache.with_selector(selector)
    return model.logits(hidden[jnp.arange(tokens.shape[0]), lengths - 1]), cache


@functools.partial(jax.jit, static_argnames=("graph", "attend"), donate_argnames=("cache",))
def _extend(
    weights,
    tokens: Int[Array, " B"],
    cache: AnyCache,
    is_active: Bool[Array, " B"],
    *,
    graph,
    attend,
) -> tuple[Float[Array, "B vocab"], AnyCache]:
    """Append a token to each active row; return logits and cache."""
    model = nnx.merge(graph, weights)
    hidden, extended = model.extend(tokens[:, None], cache, attend=attend)
    lengths = jnp.where(is_active, extended.lengths, cache.lengths)
    return model.logits(hidden[:, 0]), dataclasses.replace(extended, lengths=lengths)


@functools.partial(jax.jit, static_argnames=("sampling",))
def _sample(
    logits: Float[Array, "B vocab"],
    key: Key[Array, ""],
    step: Int[Array, ""],
    seen: Bool[Array, "B vocab"] | None,
    *,
    sampling: SamplingParams,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, "B vocab"] | None]:
    """Return tokens, their log-probabilities, and the updated `seen`."""
    tokens = sample_tokens(logits, sampling, key=key, step=step, seen=seen)
    rows = jnp.arange(tokens.shape[0])
    logprobs = jax.nn.log_softmax(logits, axis=-1)[rows, tokens]
    return tokens, logprobs, None if seen is None else seen.at[rows, tokens].set(True)
