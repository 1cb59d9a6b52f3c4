"""Autoregressive generation with continuous batching."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from xsake.attention.layer_call import AttentionFn
from xsake.errors import ArgumentError
from xsake.model.attend import DenseAttention, LayoutAttention
from xsake.model.batch import Batch, NativeBatch, PagedBatch, padded_length
from xsake.model.decoder import Decoder
from xsake.model.generation_config import read_generation_config
from xsake.model.prefill import CompiledPrograms
from xsake.model.sampling import Sampled, SamplingParams, check_range, sample
from xsake.model.speculation import Draft, speculate
from xsake.model.tokenizer import TextStream, Tokenizer

OnToken = Callable[[int, int | None], None]
"""Called with the number of a prompt and its new token; None: it ended with an end token."""

OnText = Callable[[int, str], None]
"""Called with the number of a prompt and its new text, which is final."""

OnFinish = Callable[[int, "Continuation"], None]
"""Called with the number of a prompt and its output when it is complete."""

FinishReason = Literal["end", "length", "stop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingParams):
    """Length limit, seed and sampling parameters.

    Args:
        max_new_tokens: maximum number of new tokens per row.
        seed: of sampling.
        end_ids: tokens that end a row; not included in its output.
        stop: texts that end a row; its text ends before them, its tokens include them.
    """

    max_new_tokens: int = 128
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.stop, tuple) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise ArgumentError(
                "stop-strings", "invalid stop strings", got=repr(self.stop)[:200],
                expected="a tuple of texts, none of them empty", fix='stop=("text",)',
            )  # fmt: skip
        check_range("max_new_tokens", self.max_new_tokens, "1 or more", self.max_new_tokens >= 1)
        check_range("seed", self.seed, "0 to 2**31 - 1", 0 <= self.seed < 2**31)

    @classmethod
    def from_folder(cls, directory: str | Path, **overrides: Any) -> "GenerationOptions":
        """Read generation_config.json of a checkpoint, as transformers understands it.

        Without `do_sample`, decoding is greedy; with it, `top_k` is 50 unless the file has another
        one. Keys without an equivalent here are an error unless their value changes nothing.

        Args:
            directory: of the checkpoint.
            overrides: options that replace those of the file.
        """
        needs_length = "max_new_tokens" not in overrides
        return cls(**read_generation_config(directory, needs_length=needs_length) | overrides)

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
        finish: "end" after an end token, "stop" after a stop string, "length" after
            `max_new_tokens`.
        text: of the tokens up to a stop string; None without a tokenizer.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class GenerationTiming:
    """Timing of a generation; compilation is separate.

    Args:
        prompt_tokens: of all rows, without padding.
        compile_seconds: near 0 if shapes, attention and sampling are cached.
        prefill_seconds: of all prompts.
        decode_tokens: all tokens but the first of each row, end tokens included.
        decode_seconds: of sampling and decoding steps.
        drafted_tokens: of lossless decoding with a draft.
        accepted_tokens: drafted tokens that the verification accepted.
    """

    prompt_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

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
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " _"]],
    options: GenerationOptions = GenerationOptions(),  # noqa: B008 (frozen)
    *,
    attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
    decode_attend: AttentionFn | None = None,
    draft: Draft | None = None,
    batch_size: int = 8,
    numbers: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    on_token: OnToken | None = None,
    on_text: OnText | None = None,
    on_finish: OnFinish | None = None,
) -> GenerationResult:
    """Generate tokens for prompts.

    At most `batch_size` rows are decoded together; when one ends, the next prompt takes its place.
    The tokens of a row depend on its prompt, its number and the options, not on other rows, up to
    rounding: another batch size may change the summation order and swap tokens of nearly equal
    probability. Greedy decoding does not depend on the number.

    Prompts are processed in tiles of a fixed size if `attend` has `is_chunkable`, otherwise padded
    to one of few sizes (`padded_length`); rows of the cache have one of these sizes too. So prompts
    of similar length do not recompile. Another number of rows does.

    Args:
        model: any decoder.
        prompts: token ids of each row, at least one each.
        options: length limit and sampling.
        attend: attention function for prefill.
        decode_attend: attention function for decoding; None: as for prefill.
        draft: drafts tokens that `decode_attend` verifies; the output does not change.
        batch_size: most rows that are decoded together.
        numbers: of the prompts, for sampling and callbacks; None: 0, 1, 2...
        tokenizer: for stop strings, texts and `on_text`.
        on_token: called with every new token.
        on_text: called with new text, without incomplete characters and what may still become a
            stop string.
        on_finish: called with each output when it is complete.

    Returns:
        Tokens, log-probabilities, finish reasons, texts and timing.

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
    check_range("batch_size", batch_size, "1 or more", batch_size >= 1)
    numbers = range(len(prompts)) if numbers is None else numbers
    _check_prompts(prompts, numbers, model, options)
    if tokenizer is None and (options.stop or on_text is not None):
        raise ArgumentError(
            "text-tokenizer", "stop strings and texts need the tokenizer of the model",
            got="tokenizer=None", expected="a tokenizer", fix="tokenizer=Tokenizer.load(folder)",
        )  # fmt: skip
    longest = max(map(len, prompts)) + options.max_new_tokens
    kind = PagedBatch if model.config.native_sparse is None else NativeBatch
    batch = kind(
        model, CompiledPrograms(), rows=min(batch_size, len(prompts)),
        capacity=padded_length(longest, model.config.context), attend=attend,
        decode_attend=_select_decode_attention(attend, decode_attend), draft=draft,
    )  # fmt: skip
    callbacks = _Callbacks(on_token, on_text, on_finish)
    return _Generation(batch, prompts, numbers, options, tokenizer, callbacks).run()


class _Callbacks(NamedTuple):
    on_token: OnToken | None
    on_text: OnText | None
    on_finish: OnFinish | None


@dataclasses.dataclass
class _Output:
    """What a prompt has so far.

    Args:
        number: of the prompt.
        stream: the text; None without a tokenizer.
    """

    number: int
    stream: TextStream | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None

    def to_row(self) -> Continuation:
        """Return the output of a prompt that has ended."""
        assert self.finish is not None
        text = None if self.stream is None else self.stream.text
        return Continuation(tuple(self.tokens), tuple(self.logprobs), self.finish, text)


class _Generation:
    """Prompts that wait for a row, rows that are decoded, and outputs."""

    def __init__(
        self, batch: Batch, prompts, numbers: Sequence[int], options: GenerationOptions,
        tokenizer: Tokenizer | None, callbacks: _Callbacks,
    ):  # fmt: skip
        self._batch, self._programs = batch, batch.programs
        self._prompts, self._options, self._callbacks = prompts, options, callbacks
        self._waiting = collections.deque(range(len(prompts)))
        rows, vocab = batch.rows, batch.model.config.vocab_size
        self._prompt_of = np.full(rows, -1)  # by row; -1: free
        self._logits = jnp.zeros((rows, vocab), jnp.float32)
        is_penalized = options.repetition_penalty is not None
        self._seen = jnp.zeros((rows, vocab), bool) if is_penalized else None
        stream = lambda: None if tokenizer is None else tokenizer.stream(options.stop)
        self._outputs = [_Output(number, stream()) for number in numbers]
        self._key = jax.random.key(options.seed)
        self._prefill_seconds = 0.0
        self._num_sampled = self._num_drafted = self._num_accepted = 0

    @property
    def _is_active(self) -> Bool[np.ndarray, " B"]:
        return self._prompt_of >= 0

    def run(self) -> GenerationResult:
        """Generate until every prompt has its output."""
        started = self._programs.clock()
        while self._waiting or self._is_active.any():
            self._admit()
            sampled = self._sample()
            if not self._is_active.any():
                continue
            if self._batch.draft is None:
                self._logits = self._batch.extend(sampled, self._is_active)
            else:
                self._speculate(sampled, self._batch.draft)
        timing = GenerationTiming(
            prompt_tokens=sum(map(len, self._prompts)),
            compile_seconds=self._programs.compile_seconds,
            prefill_seconds=self._prefill_seconds,
            decode_tokens=self._num_sampled - len(self._prompts),
            decode_seconds=self._programs.clock() - started - self._prefill_seconds,
            drafted_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
        )
        return GenerationResult(tuple(output.to_row() for output in self._outputs), timing)

    def _admit(self) -> None:
        """Process waiting prompts into free rows."""
        free = np.flatnonzero(~self._is_active)[: len(self._waiting)]
        if not len(free):
            return
        started = self._programs.clock()
        for row in free:
            number = self._waiting.popleft()
            prompt = self._prompts[number]
            logits = self._batch.admit(int(row), prompt, self._options.max_new_tokens)
            self._logits = self._logits.at[row].set(logits)
            if self._seen is not None:
                self._seen = self._seen.at[row].set(False).at[row, np.asarray(prompt)].set(True)
            self._prompt_of[row] = number
        jax.block_until_ready(self._logits)
        self._prefill_seconds += self._programs.clock() - started

    def _sample(self) -> Int[Array, " B"]:
        """Sample a token for each active row; release the rows that end."""
        sampled = self._programs.run(
            _sample, self._logits, self._key, self._steps, self._numbers, self._seen,
            sampling=self._options.sampling,
        )  # fmt: skip
        self._seen = sampled.seen
        tokens, logprobs = np.asarray(sampled.tokens), np.asarray(sampled.logprobs)
        for row in np.flatnonzero(self._is_active):
            self._emit(int(row), int(tokens[row]), float(logprobs[row]))
        return sampled.tokens

    def _speculate(self, sampled: Int[Array, " B"], draft: Draft) -> None:
        """Extend active rows by sampled and accepted tokens; release the rows that end."""
        batch, active = self._batch, np.flatnonzero(self._is_active)
        new, batch.cache = self._programs.run(
            speculate, batch.weights, sampled, batch.cache, jnp.asarray(self._is_active),
            self._key, self._steps, self._numbers, self._seen, graph=batch.graph,
            attend=batch.decode_attend, draft=draft, sampling=self._options.sampling,
        )  # fmt: skip
        self._logits, self._seen = new.logits, new.seen
        tokens, logprobs, num_accepted = map(np.asarray, new[:3])
        self._num_drafted += draft.num_tokens * len(active)
        self._num_accepted += int(num_accepted[active].sum())
        for row in active:
            count = num_accepted[row]
            for token, logprob in zip(tokens[row, :count], logprobs[row, :count], strict=True):
                if self._is_active[row]:
                    self._emit(int(row), int(token), float(logprob))

    @property
    def _steps(self) -> Int[Array, " B"]:
        """Number of the next token of each row."""
        return jnp.asarray([len(self._outputs[n].tokens) for n in self._prompt_of], jnp.int32)

    @property
    def _numbers(self) -> Int[Array, " B"]:
        return jnp.asarray([self._outputs[n].number for n in self._prompt_of], jnp.int32)

    def _emit(self, row: int, token: int, logprob: float) -> None:
        """Add a token to the output of a row; release the row if it ends."""
        output = self._outputs[self._prompt_of[row]]
        self._num_sampled += 1
        self._add_token(output, token, logprob)
        if output.finish is not None:
            self._batch.release(row)
            self._prompt_of[row] = -1

    def _add_token(self, output: _Output, token: int, logprob: float) -> None:
        """Add a sampled token to the output of a prompt, which may end with it."""
        options, (on_token, on_text, on_finish) = self._options, self._callbacks
        is_end, stream, text = token in options.end_ids, output.stream, ""
        if is_end:
            output.finish = "end"
        else:
            output.tokens.append(token)
            output.logprobs.append(logprob)
            if len(output.tokens) == options.max_new_tokens:
                output.finish = "length"
        if stream is not None:
            text = "" if is_end else stream.push(token)
            text += stream.finish() if output.finish is not None else ""
            if stream.is_stopped:
                output.finish = "stop"
        if on_token is not None:
            on_token(output.number, None if is_end else token)
        if on_text is not None and text:
            on_text(output.number, text)
        if on_finish is not None and output.finish is not None:
            on_finish(output.number, output.to_row())


def _check_prompts(prompts, numbers, model: Decoder, options: GenerationOptions) -> None:
    """Raise for prompts that are empty, too long or not of the model's vocabulary."""
    lengths = {number: len(prompt) for number, prompt in zip(numbers, prompts, strict=True)}
    longest = max(lengths, key=lambda number: lengths[number], default=None)
    if longest is None or not all(lengths.values()):
        empty = [number for number, length in lengths.items() if not length]
        raise ArgumentError(
            "empty-prompt", "empty prompt",
            got=f"prompt {empty[0]} has no token" if empty else "no prompts",
            expected="at least one prompt, and at least one token in each",
            fix="start an empty prompt with the BOS token of the model",
        )  # fmt: skip
    context, vocab = model.config.context, model.config.vocab_size
    if lengths[longest] + options.max_new_tokens > context:
        raise ArgumentError(
            "prompt-length",
            "prompt and new tokens exceed the context of the model",
            got=f"prompt {longest} of {lengths[longest]} tokens + "
            f"max_new_tokens={options.max_new_tokens}",
            expected=f"at most {context} together",
            fix="shorten the prompt, or reduce max_new_tokens",
        )
    for number, prompt in zip(numbers, prompts, strict=True):
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab:
            raise ArgumentError(
                "prompt-vocabulary", f"prompt {number} has token ids outside the vocabulary",
                got=f"{ids.dtype} from {ids.min()} to {ids.max()}",
                expected=f"integers from 0 to {vocab - 1}", fix="use the tokenizer of the model",
            )  # fmt: skip


def _select_decode_attention(attend: AttentionFn, decode_attend: AttentionFn | None) -> AttentionFn:
    if decode_attend is None and isinstance(attend, LayoutAttention):
        raise ArgumentError(
            "decode-layout",
            "a layout has a fixed length, so decoding needs another attention function",
            got="attend=LayoutAttention(...), decode_attend=None", expected="decode_attend",
            fix="decode_attend=DenseAttention(), or MaskedAttention(mask of the layout)",
        )  # fmt: skip
    return attend if decode_attend is None else decode_attend


@functools.partial(jax.jit, static_argnames=("sampling",))
def _sample(
    logits: Float[Array, "B vocab"],
    key: Key[Array, ""],
    steps: Int[Array, " B"],
    numbers: Int[Array, " B"],
    seen: Bool[Array, "B vocab"] | None,
    *,
    sampling: SamplingParams,
) -> Sampled:
    return sample(logits, seen, sampling, key=key, step=steps, rows=numbers)
