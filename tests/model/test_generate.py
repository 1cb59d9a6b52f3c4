"""Generation: a step reads what a whole pass reads, rows do not disturb each other, and it ends."""

import collections
import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import xsake
from tests.malformed import refused_type
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.masks import Causal, Sinks, Window
from xsake.model import (
    Decoder,
    DecoderConfig,
    DenseAttention,
    LayerKind,
    LayoutAttention,
    MaskedAttention,
    Rope,
)
from xsake.model.generate import GenerationOptions, generate, padded_length
from xsake.model.speculation import Draft
from xsake.model.tokenizer import Tokenizer

ROOM, LENGTHS = 24, np.array([9, 4, 1], np.int32)
TEXT = np.random.default_rng(0).integers(0, 96, (3, ROOM)).astype(np.int32)
SPARSE = Causal() & (Window(left=5, right=0) | Sinks(2))
TWO_KINDS = {
    "kinds": (LayerKind(rope=Rope()), LayerKind(window=5, rope=Rope(base=500.0))),
    "kind_of_layer": (1, 0, 1),
}
GPT = {
    "kinds": (LayerKind(),), "has_learned_positions": True, "norm": "layer", "is_gated": False,
    "has_qkv_bias": True, "context": ROOM,
}  # fmt: skip
REFERENCE = xsake.BlockSparseAttention(implementation="reference")  # compiles fastest
CASES = {
    "causal": ({}, DenseAttention(REFERENCE)),
    "two kinds of layers, one with a window": (TWO_KINDS, DenseAttention()),
    "learned positions": (GPT, DenseAttention(REFERENCE)),
    "a mask of the caller's": ({}, MaskedAttention(SPARSE)),
}


@pytest.fixture(scope="module", autouse=True)
def compiles_quickly():
    """What is tested here is compiled more often than it is run."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def filled(config: DecoderConfig) -> Decoder:
    """A model with weights from NumPy, because drawing each with JAX compiles for seconds."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def fill(path, shape):
        noise = rng.normal(scale=0.15, size=shape.shape)
        return jnp.asarray(noise + ("norm" in jax.tree_util.keystr(path)), jnp.float32)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, shapes))


@functools.cache
def model_of(case: str) -> Decoder:
    return filled(DecoderConfig.tiny(**CASES[case][0]))


@functools.cache
def prefill_of(case: str):
    """tokens [B, ROOM], lengths -> (logits of every token, cache)."""
    model, attend = model_of(case), CASES[case][1]

    @jax.jit
    def prefill(tokens, lengths):
        hidden, cache = model.prefill(tokens, lengths, capacity=ROOM, attend=attend)
        return model.logits(hidden), cache

    return prefill


@functools.cache
def extend_of(case: str, attend=None):
    model, attend = model_of(case), attend or CASES[case][1]

    @jax.jit
    def extend(tokens, cache):
        hidden, cache = model.extend(tokens, cache, attend=attend)
        return model.logits(hidden), cache

    return extend


def at(starts, count=1):
    """Tokens of TEXT, each row from its own start."""
    return np.take_along_axis(TEXT, starts[:, None] + np.arange(count)[None], axis=1)


@pytest.mark.parametrize("case", CASES)
def test_token_by_token_gives_the_logits_of_one_pass_in_a_ragged_batch(case):
    whole, _ = prefill_of(case)(TEXT, np.full(3, ROOM))
    # What follows each prompt is padding, as long as the text: reading it would show.
    after = np.arange(ROOM)[None] >= LENGTHS[:, None]
    _, cache = prefill_of(case)(np.where(after, 95 - TEXT, TEXT), LENGTHS)
    for step in range(ROOM - LENGTHS.max()):
        logits, cache = extend_of(case)(at(LENGTHS + step), cache)
        expected = np.stack([whole[i, LENGTHS[i] + step] for i in range(3)])
        np.testing.assert_allclose(logits[:, 0], expected, atol=1e-4)
    assert cache.lengths.tolist() == (LENGTHS + step + 1).tolist()


def test_a_mask_of_the_callers_changes_what_a_step_sees():
    _, cache = prefill_of("causal")(TEXT, np.full(3, 20))
    dense, _ = extend_of("causal")(at(np.full(3, 20)), cache)
    masked, _ = extend_of("a mask of the caller's")(at(np.full(3, 20)), cache)
    assert np.abs(dense - masked).max() > 1e-2


def test_reading_a_prompt_in_pieces_equals_reading_it_at_once():
    case = "two kinds of layers, one with a window"
    whole, _ = prefill_of(case)(TEXT, np.full(3, ROOM))
    _, cache = prefill_of(case)(TEXT, LENGTHS)
    for start in (LENGTHS, LENGTHS + 7):
        logits, cache = extend_of(case, DenseAttention(REFERENCE))(at(start, 7), cache)
        for row in range(3):
            expected = whole[row, start[row] : start[row] + 7]
            np.testing.assert_allclose(logits[row], expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_bit_of_a_real_token(case):
    real = np.arange(ROOM)[None] < LENGTHS[:, None]
    first, _ = prefill_of(case)(np.where(real, TEXT, 0), LENGTHS)
    other, _ = prefill_of(case)(np.where(real, TEXT, 95), LENGTHS)
    np.testing.assert_array_equal(np.asarray(first)[real], np.asarray(other)[real])
    assert (np.asarray(first)[~real] != np.asarray(other)[~real]).any()


GREEDY = GenerationOptions(max_new_tokens=12, temperature=0)
PROMPTS = [TEXT[i, :length].tolist() for i, length in enumerate(LENGTHS)]


def test_greedy_tokens_are_the_likeliest_of_one_pass_over_the_result():
    found = generate(model_of("causal"), PROMPTS, GREEDY)
    tokens = np.zeros((3, ROOM), np.int32)
    for i, row in enumerate(found.rows):
        assert (len(row.tokens), row.finish) == (12, "length")
        tokens[i, : LENGTHS[i] + 12] = [*PROMPTS[i], *row.tokens]
    logits, _ = prefill_of("causal")(tokens, LENGTHS + 12)
    for i, row in enumerate(found.rows):
        own = logits[i, LENGTHS[i] - 1 : LENGTHS[i] + 11]
        assert tuple(own.argmax(-1).tolist()) == row.tokens
        expected = jax.nn.log_softmax(own)[np.arange(12), np.array(row.tokens)]
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_a_row_generates_the_same_alone_as_in_a_batch():
    model, drawn = model_of("causal"), GenerationOptions(max_new_tokens=12, temperature=1, seed=3)
    together = generate(model, PROMPTS, GREEDY)
    alone = [generate(model, [prompt], GREEDY) for prompt in PROMPTS]
    assert [x.rows[0].tokens for x in alone] == [x.tokens for x in together.rows]
    # Drawn rows depend on their place too, so the first is the one that can be tried alone.
    assert (
        generate(model, PROMPTS[:1], drawn).rows[0].tokens
        == generate(model, PROMPTS, drawn).rows[0].tokens
    )


def test_a_seed_repeats_its_draws_and_another_gives_others():
    draw = lambda seed, prompts: generate(
        model_of("causal"), prompts, GenerationOptions(max_new_tokens=12, temperature=1, seed=seed)
    )
    tokens = lambda found: [row.tokens for row in found.rows]
    same = [PROMPTS[0]] * 3
    assert tokens(draw(3, same)) == tokens(draw(3, same)) != tokens(draw(4, same))
    assert len(set(tokens(draw(3, same)))) == 3, "equal prompts draw differently"
    neighbours = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    assert tokens(draw(3, neighbours))[2] == tokens(draw(3, same))[2]


def assert_same_output(found, expected):
    """Another number of rows may change the order of sums."""
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert dataclasses.replace(found, logprobs=expected.logprobs) == expected


def test_a_prompt_with_its_number_generates_the_same_in_another_list():
    model, options = model_of("causal"), GenerationOptions(max_new_tokens=6, temperature=1)
    rows = generate(model, PROMPTS, options).rows
    ended = {}
    some = generate(
        model, [PROMPTS[2], PROMPTS[0]], options, numbers=[2, 0], on_finish=ended.__setitem__
    )
    assert some.rows == (ended[2], ended[0])
    for found, number in zip(some.rows, (2, 0), strict=True):
        assert_same_output(found, rows[number])


def test_rows_end_at_an_end_token_and_the_loop_with_the_last_of_them():
    model = model_of("causal")
    free = [row.tokens for row in generate(model, PROMPTS, GREEDY).rows]
    ends = tuple({row[2] for row in free})
    streamed = collections.defaultdict(list)
    options = GenerationOptions(max_new_tokens=12, temperature=0, end_ids=ends)
    found = generate(
        model, PROMPTS, options, on_token=lambda row, token: streamed[row].append(token)
    )
    for row, whole in zip(found.rows, free, strict=True):
        stop = next(i for i, token in enumerate(whole) if token in ends)
        assert (row.tokens, row.finish) == (whole[:stop], "end")
        assert len(row.logprobs) == stop
    assert [streamed[i] for i in range(3)] == [[*row.tokens, None] for row in found.rows]
    picked = sum(len(row.tokens) + 1 for row in found.rows)
    assert found.timing.decode_tokens == picked - 3


def test_an_ended_row_does_not_change_the_others():
    model = model_of("causal")
    free = [row.tokens for row in generate(model, PROMPTS, GREEDY).rows]
    first = next(token for token in free[0] if token not in free[1])
    options = GenerationOptions(max_new_tokens=12, temperature=0, end_ids=(first,))
    found = generate(model, PROMPTS, options)
    assert found.rows[0].finish == "end"
    assert found.rows[1].tokens == free[1]


def test_a_repetition_penalty_counts_prompt_and_new_tokens():
    options = GenerationOptions(max_new_tokens=12, temperature=0, repetition_penalty=1e6)
    for prompt, row in zip(
        PROMPTS, generate(model_of("causal"), PROMPTS, options).rows, strict=True
    ):
        assert len({*prompt, *row.tokens}) == len(set(prompt)) + 12


WORDS = Tokenizer(
    tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, "w0"))
)


def test_a_stop_string_ends_a_row_and_is_not_in_its_text():
    model = model_of("causal")
    free = generate(model, PROMPTS, GREEDY, tokenizer=WORDS).rows
    assert [row.text for row in free] == [WORDS.decode(row.tokens) for row in free]
    # Two words of the first row, which are three tokens of text with the start of the next word.
    stop = (f"{WORDS.decode(free[0].tokens[3:5])} w", "never")
    streamed, ended = collections.defaultdict(str), {}

    def on_text(row, text):
        streamed[row] += text

    options = GenerationOptions(max_new_tokens=12, temperature=0, stop=stop)
    rows = generate(
        model, PROMPTS, options, tokenizer=WORDS, batch_size=2, on_text=on_text,
        on_finish=ended.__setitem__,
    ).rows  # fmt: skip
    assert rows[0].finish == "stop"
    assert rows[0].tokens == free[0].tokens[:6] and len(rows[0].logprobs) == 6
    assert rows[0].text == WORDS.decode(free[0].tokens[:3]) + " "
    for number, (row, whole) in enumerate(zip(rows, free, strict=True)):
        assert streamed[number] == row.text and ended[number] == row
        if row.finish != "stop":
            assert_same_output(row, whole)


def test_a_stop_string_in_the_last_token_counts():
    model = model_of("causal")
    free = generate(model, PROMPTS[:1], GREEDY).rows[0]
    first = next(i for i in range(12) if free.tokens[i] not in free.tokens[:i] and i > 0)
    length = {"max_new_tokens": first + 1, "temperature": 0}
    options = GenerationOptions(**length, stop=(f"w{free.tokens[first]}",))
    row = generate(model, PROMPTS[:1], options, tokenizer=WORDS).rows[0]
    assert row.finish == "stop" and row.text == WORDS.decode(free.tokens[:first]) + " "
    row = generate(model, PROMPTS[:1], GenerationOptions(**length), tokenizer=WORDS).rows[0]
    assert row.finish == "length" and row.text == WORDS.decode(free.tokens[: first + 1])


def test_stop_strings_and_texts_need_a_tokenizer():
    for options, callbacks in (
        (GenerationOptions(stop=("a",)), {}),
        (GREEDY, {"on_text": lambda row, text: None}),
    ):
        with pytest.raises(ArgumentError, match="XSK-102.text-tokenizer"):
            generate(model_of("causal"), PROMPTS, options, **callbacks)
    for stop in ("text", ("",), [b"a"]):
        with refused_type("XSK-102.stop-strings"):
            GenerationOptions(stop=stop)


def test_a_layout_reads_prompts_of_its_length_and_decoding_needs_its_own_attention():
    model = model_of("causal")
    tokens = padded_length(9, 256)
    layout = BlockLayout.from_mask(Causal(), q_tokens=tokens, block_q=16, block_kv=16)
    with pytest.raises(ArgumentError, match="decode_attend"):
        generate(model, PROMPTS, GREEDY, attend=LayoutAttention(layout))
    options = GenerationOptions(max_new_tokens=2, temperature=0)
    found = generate(
        model, PROMPTS, options, attend=LayoutAttention(layout), decode_attend=DenseAttention()
    )
    expected = generate(model, PROMPTS, GREEDY)
    assert [x.tokens for x in found.rows] == [x.tokens[:2] for x in expected.rows]


@contextlib.contextmanager
def compilations():
    """A list that grows by one with every program that XLA compiles."""
    found = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_other_prompts_seeds_and_a_few_more_tokens_compile_nothing():
    model = model_of("causal")
    generate(model, PROMPTS, GREEDY)
    with compilations() as compiled:
        for length in (2, 20, 40):
            prompts = [[1] * length, [2], [3, 4]]
            options = GenerationOptions(max_new_tokens=24 - length // 2, temperature=0, seed=length)
            timing = generate(model, prompts, options).timing
        assert not compiled
        assert timing.compile_seconds < 0.5
        jax.jit(lambda x: x * 2.5)(np.float32(1))
        assert compiled, "nothing is counted"


def test_padded_lengths_waste_a_quarter_at_most_and_are_few():
    sizes = {n: padded_length(n, 2**17) for n in range(1, 2**15)}
    assert all(n <= size <= max(64, 1.25 * n) or size % 64 == 0 for n, size in sizes.items())
    assert all(size <= max(n + 63, 1.25 * n) for n, size in sizes.items())
    assert len(set(sizes.values())) < 40
    assert padded_length(8100, 8150) == 8150


def test_time_is_told_without_compiling():
    timing = generate(model_of("causal"), PROMPTS, GREEDY).timing
    assert timing.prompt_tokens == LENGTHS.sum()
    assert timing.decode_tokens == 33
    assert timing.prefill_seconds > 0
    assert math.isclose(timing.tokens_per_second, 33 / timing.decode_seconds)
    once = generate(model_of("causal"), PROMPTS, GenerationOptions(max_new_tokens=1))
    assert once.timing.tokens_per_second is None


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "empty prompt"),
        ([[1], []], {}, "empty prompt"),
        ([[1] * 200], {"max_new_tokens": 57}, "at most 256 together"),
        ([[1], [5, 96]], {}, "prompt 1 has token ids"),
        ([[-1]], {}, "prompt 0 has token ids"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is out of range"),
        ([[1]], {"seed": -1}, "seed is out of range"),
        ([[1]], {"temperature": -0.1}, "temperature is out of range"),
        ([[1]], {"temperature": math.nan}, "temperature is out of range"),
        ([[1]], {"top_k": 0}, "top_k is out of range"),
        ([[1]], {"top_p": 0.0}, "top_p is out of range"),
        ([[1]], {"min_p": 1.5}, "min_p is out of range"),
        ([[1]], {"repetition_penalty": 0}, "repetition_penalty is out of range"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts, options, words):
    with pytest.raises(ArgumentError, match=words):
        generate(model_of("causal"), prompts, GenerationOptions(**options))


def test_a_text_may_fill_the_context_to_the_last_token():
    options = GenerationOptions(max_new_tokens=1, temperature=0)
    attend = DenseAttention(REFERENCE)
    found = generate(model_of("learned positions"), [TEXT[0, :-1]], options, attend=attend)
    assert np.isfinite(found.rows[0].logprobs).all()


def test_the_cache_is_written_in_place():
    """Rows of a cache may be gigabytes: a step must not hold a second one."""
    config = DecoderConfig.tiny(layers=8, context=4096)
    model = filled(config)
    cache = jax.eval_shape(
        lambda: model.prefill(jnp.zeros((2, 4), jnp.int32), jnp.ones(2, int), capacity=4096)[1]
    )
    step = jax.jit(lambda tokens, cache: model.extend(tokens, cache)[1], donate_argnums=1)
    memory = step.lower(jnp.zeros((2, 1), jnp.int32), cache).compile().memory_analysis()
    size = sum(math.prod(x.shape) * 4 for x in (cache.pages.k, cache.pages.v))
    assert memory.alias_size_in_bytes >= size
    # Some pages of one layer are copied (an eighth would be all of them), never the cache.
    assert memory.temp_size_in_bytes < size / 16


WINDOW = MaskedAttention(Window(left=2, right=0))
SETTINGS = {
    "greedy": GREEDY,
    "sampled": GenerationOptions(max_new_tokens=12, temperature=1, seed=3),
    "penalized": GenerationOptions(
        max_new_tokens=11, temperature=0.7, seed=5, repetition_penalty=1.3, top_k=20
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_draft_does_not_change_the_output(setting, num_tokens):
    model, options = model_of("causal"), SETTINGS[setting]
    prompts = [*PROMPTS, PROMPTS[0][:5]]
    plain = generate(model, prompts, options, batch_size=2)
    found = generate(model, prompts, options, batch_size=2, draft=Draft(WINDOW, num_tokens))
    for row, expected in zip(found.rows, plain.rows, strict=True):
        assert_same_output(row, expected)
    assert 0 < found.timing.accepted_tokens < found.timing.drafted_tokens


def test_a_draft_by_the_verifying_attention_is_always_accepted():
    found = generate(model_of("causal"), PROMPTS, GREEDY, draft=Draft(DenseAttention(), 3))
    assert found.timing.accepted_tokens == found.timing.drafted_tokens == 3 * 9


def test_accepted_tokens_after_an_end_token_are_dropped():
    model = model_of("causal")
    free = generate(model, PROMPTS, GREEDY).rows
    ends = tuple({row.tokens[2] for row in free})
    options = GenerationOptions(max_new_tokens=12, temperature=0, end_ids=ends)
    plain = generate(model, PROMPTS, options)
    streamed = collections.defaultdict(list)
    found = generate(
        model, PROMPTS, options, draft=Draft(DenseAttention(), 4),
        on_token=lambda row, token: streamed[row].append(token),
    )  # fmt: skip
    assert [(x.tokens, x.finish) for x in found.rows] == [(x.tokens, x.finish) for x in plain.rows]
    assert [streamed[i] for i in range(3)] == [[*row.tokens, None] for row in found.rows]
    assert found.timing.decode_tokens == plain.timing.decode_tokens
