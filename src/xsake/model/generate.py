"""Text that goes on: prompts of any lengths read at once, then one token per row and step."""

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

from xsake.errors import ArgumentError
from xsake.model.attend import Attend, Dense, Listed
from xsake.model.cache import AnyCache
from xsake.model.decoder import Decoder
from xsake.model.sampling import Sampling, pick

OnTokens = Callable[[tuple[int | None, ...]], None]
"""Is told the new token of every row at every step; None for rows that have ended."""

Finish = Literal["end", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions(Sampling):
    """How far to go on, and how tokens are picked.

    Args:
        max_new_tokens: most tokens added to a row.
        seed: of the draws; the same seed gives the same draws.
        end_ids: tokens that end a row; they are not part of what it generated.
    """

    max_new_tokens: int = 128
    seed: int = 0
    end_ids: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise ArgumentError(
                "there is nothing to generate",
                got=f"max_new_tokens={self.max_new_tokens}",
                expected="1 or more",
                fix="to read prompts without going on, call the model",
            )
        if not 0 <= self.seed < 2**31:
            raise ArgumentError(
                "the seed is out of range",
                got=f"seed={self.seed}",
                expected="0 to 2**31 - 1",
                fix="give a number in that range",
            )

    @property
    def sampling(self) -> Sampling:
        """The rules alone, which are compiled into the program that picks tokens."""
        fields = dataclasses.fields(Sampling)
        return Sampling(**{field.name: getattr(self, field.name) for field in fields})


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What one row generated.

    Args:
        tokens: without the one that ended it.
        logprobs: the model's own log-probability of each token, before any sampling rule.
        finish: "end" if an end token came, "length" if `max_new_tokens` did.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


@dataclasses.dataclass(frozen=True)
class Timing:
    """Where the time went; compiling is apart, so that the rates are those of later calls too.

    Args:
        prompt_tokens: of all rows, padding not counted.
        compile_seconds: near 0 if shapes, attention and rules were met before.
        prefill_seconds: until the first token of every row was there.
        decode_tokens: all later tokens of rows that had not ended.
        decode_seconds: for these.
    """

    prompt_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all rows together; None if there was no step after the first token."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a batch generated, in the order of its prompts."""

    rows: tuple[Continuation, ...]
    timing: Timing


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " n"]],
    options: GenerationOptions = GenerationOptions(),  # noqa: B008 (frozen)
    *,
    attend: Attend = Dense(),  # noqa: B008 (frozen)
    decode_attend: Attend | None = None,
    on_tokens: OnTokens | None = None,
) -> Generated:
    """Let the model go on from a batch of prompts.

    A row's tokens depend on its own prompt, its place in the batch and the options, not on the
    other rows, up to float rounding: a batch of another size may be summed in another order, so
    tokens whose chances are equal to the last digits can swap. Greedy rows do not depend on
    their place either.

    Prompts and cache are padded to one of few sizes (`padded_length`), so that other prompts of
    about the same length, or a few more tokens, do not compile again. Another number of rows does.

    Args:
        model: any decoder.
        prompts: token ids of each row, at least one each.
        options: how far, and by which rules.
        attend: attention while prompts are read.
        decode_attend: attention of single tokens; None: as for prompts.
        on_tokens: called at every step.

    Returns:
        Tokens, log-probabilities, why rows ended, and timing.

    Example:
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> from xsake.model.generate import GenerationOptions, generate
        >>> model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> options = GenerationOptions(max_new_tokens=4, temperature=0)
        >>> found = generate(model, [[1, 2, 3], [4]], options)
        >>> [(len(row.tokens), row.finish) for row in found.rows]
        [(4, 'length'), (4, 'length')]
    """
    tokens, lengths = _padded(prompts, model, options)
    room = padded_length(int(lengths.max()) + options.max_new_tokens, model.config.context)
    attends = attend, _decoding(attend, decode_attend)
    engine = _Engine(model, attends, options, room=room)
    started = first_at = engine.clock()
    logits, cache = engine.prefill(tokens, lengths)
    seen = _seen(prompts, model, options)
    rows = _Rows(len(prompts), options.end_ids)
    for step in range(options.max_new_tokens):
        picked, logprobs, seen = engine.pick(logits, step, seen)
        new = rows.add(np.asarray(picked), np.asarray(logprobs))
        first_at = engine.clock() if step == 0 else first_at
        if on_tokens is not None:
            on_tokens(new)
        if not rows.growing.any() or step == options.max_new_tokens - 1:
            break
        logits, cache = engine.extend(picked, cache, rows.growing)
    timing = Timing(
        prompt_tokens=int(lengths.sum()),
        compile_seconds=engine.compile_seconds,
        prefill_seconds=first_at - started,
        decode_tokens=rows.picked - len(prompts),
        decode_seconds=engine.clock() - first_at,
    )
    return Generated(rows.continuations(), timing)


def padded_length(tokens: int, context: int) -> int:
    """`tokens` rounded up to one of few sizes: at most a quarter more, or to a multiple of 64.

    A block layout for reading prompts (`Listed`) must be built for this many tokens.

    Args:
        tokens: of the longest row.
        context: of the model; never exceeded.

    Example:
        >>> [padded_length(tokens, 8192) for tokens in (1, 65, 1000, 1100, 8000)]
        [64, 128, 1024, 1280, 8192]
    """
    unit = max(64, 2 ** (tokens.bit_length() - 3))
    return min(-(-tokens // unit) * unit, context)


def _padded(prompts, model: Decoder, options: GenerationOptions) -> tuple[np.ndarray, np.ndarray]:
    """([B, T] with each prompt at the start of its row, [B] lengths), after all checks."""
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if lengths.size == 0 or lengths.min() == 0:
        raise ArgumentError(
            "every prompt needs a token to start from",
            got=f"prompts of {lengths.tolist()} tokens"[:200],
            expected="at least one prompt, and at least one token in each",
            fix="start an empty text with the token that opens texts, as the model was trained",
        )
    context, vocab = model.config.context, model.config.vocab_size
    longest = int(lengths.max())
    if longest + options.max_new_tokens > context:
        raise ArgumentError(
            "the text would become longer than what the model was made for",
            got=f"{longest} prompt tokens + max_new_tokens={options.max_new_tokens}",
            expected=f"at most {context} together",
            fix="shorten the longest prompt, or lower max_new_tokens",
        )
    tokens = np.zeros((len(prompts), padded_length(longest, context)), np.int32)
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab:
            raise ArgumentError(
                f"prompt {row} has ids that the model does not know",
                got=f"{ids.dtype} from {ids.min()} to {ids.max()}",
                expected=f"integers from 0 to {vocab - 1}",
                fix="use the tokenizer that belongs to the model",
            )
        tokens[row, : len(ids)] = ids
    return tokens, lengths


def _decoding(attend: Attend, decode_attend: Attend | None) -> Attend:
    if decode_attend is None and isinstance(attend, Listed):
        raise ArgumentError(
            "a layout serves calls of one length, so single tokens need attention of their own",
            got="attend=Listed(...), decode_attend=None",
            expected="decode_attend",
            fix="decode_attend=Dense(), or Masked(...) with the mask that the layout stands for",
        )
    return attend if decode_attend is None else decode_attend


def _seen(prompts, model: Decoder, options: GenerationOptions) -> Array | None:
    """bool [B, vocab]: what each prompt holds, if anybody wants to know."""
    if options.repetition_penalty is None:
        return None
    seen = np.zeros((len(prompts), model.config.vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, np.asarray(prompt)] = True
    return jnp.asarray(seen)


class _Rows:
    """The tokens that rows have so far, and which rows still grow."""

    def __init__(self, number: int, end_ids: tuple[int, ...]):
        self.growing = np.ones(number, bool)
        self.picked = 0  # end tokens included: they were computed like any other
        self._end_ids = frozenset(end_ids)
        self._tokens: list[list[int]] = [[] for _ in range(number)]
        self._logprobs: list[list[float]] = [[] for _ in range(number)]

    def add(self, tokens: np.ndarray, logprobs: np.ndarray) -> tuple[int | None, ...]:
        """Take a step's tokens [B]; returns those that rows grew by."""
        self.picked += int(self.growing.sum())
        is_end = np.asarray([int(token) in self._end_ids for token in tokens])
        self.growing = self.growing & ~is_end
        for row in np.flatnonzero(self.growing):
            self._tokens[row].append(int(tokens[row]))
            self._logprobs[row].append(float(logprobs[row]))
        return tuple(
            int(token) if grows else None for token, grows in zip(tokens, self.growing, strict=True)
        )

    def continuations(self) -> tuple[Continuation, ...]:
        """What every row generated."""
        return tuple(
            Continuation(tuple(tokens), tuple(logprobs), "length" if grows else "end")
            for tokens, logprobs, grows in zip(
                self._tokens, self._logprobs, self.growing, strict=True
            )
        )


class _Engine:
    """The three programs of a generation; keeps count of the time that compiling them takes."""

    def __init__(
        self,
        model: Decoder,
        attends: tuple[Attend, Attend],
        options: GenerationOptions,
        *,
        room: int,
    ):
        graph, self._weights = nnx.split(model)
        self._key = jax.random.key(options.seed)
        self._settings: dict[Any, dict[str, Any]] = {
            _prefill: {"graph": graph, "attend": attends[0], "room": room},
            _pick: {"sampling": options.sampling},
            _extend: {"graph": graph, "attend": attends[1]},
        }
        self._compiled: dict[Any, Any] = {}
        self.compile_seconds = 0.0

    def clock(self) -> float:
        """Seconds that stand still while something compiles."""
        return time.perf_counter() - self.compile_seconds

    def prefill(self, tokens, lengths) -> tuple[Array, AnyCache]:
        return self._run(_prefill, self._weights, jnp.asarray(tokens), jnp.asarray(lengths))

    def pick(self, logits, step: int, seen) -> tuple[Array, Array, Array | None]:
        return self._run(_pick, logits, self._key, jnp.int32(step), seen)

    def extend(self, tokens, cache: AnyCache, growing) -> tuple[Array, AnyCache]:
        return self._run(_extend, self._weights, tokens, cache, jnp.asarray(growing))

    def _run(self, program, *arguments):
        if program not in self._compiled:
            started = time.perf_counter()
            # jit remembers what it lowered and compiled, so only the first generation pays.
            lowered = program.lower(*arguments, **self._settings[program])
            self._compiled[program] = lowered.compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[program](*arguments)


@functools.partial(jax.jit, static_argnames=("graph", "attend", "room"))
def _prefill(
    weights, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], *, graph, attend, room: int
) -> tuple[Float[Array, "B vocab"], AnyCache]:
    """Logits after the last token of each prompt, and the cache."""
    model = nnx.merge(graph, weights)
    hidden, cache = model.prefill(tokens, lengths, room=room, attend=attend)
    return model.logits(hidden[jnp.arange(tokens.shape[0]), lengths - 1]), cache


@functools.partial(jax.jit, static_argnames=("graph", "attend"), donate_argnames=("cache",))
def _extend(
    weights, tokens: Int[Array, " B"], cache: AnyCache, growing: Bool[Array, " B"], *, graph, attend
) -> tuple[Float[Array, "B vocab"], AnyCache]:
    """Logits after one more token in each row; a row that has ended stays as long as it is."""
    model = nnx.merge(graph, weights)
    hidden, longer = model.extend(tokens[:, None], cache, attend=attend)
    lengths = jnp.where(growing, longer.lengths, cache.lengths)
    return model.logits(hidden[:, 0]), dataclasses.replace(longer, lengths=lengths)


@functools.partial(jax.jit, static_argnames=("sampling",))
def _pick(
    logits: Float[Array, "B vocab"],
    key: Key[Array, ""],
    step: Int[Array, ""],
    seen: Bool[Array, "B vocab"] | None,
    *,
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, "B vocab"] | None]:
    """(tokens, their log-probabilities, the tokens seen by then)."""
    tokens = pick(logits, sampling, key=key, step=step, seen=seen)
    rows = jnp.arange(tokens.shape[0])
    logprobs = jax.nn.log_softmax(logits, axis=-1)[rows, tokens]
    return tokens, logprobs, None if seen is None else seen.at[rows, tokens].set(True)
