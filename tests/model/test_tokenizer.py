"""A checkpoint's tokenizer: exact round trips, text that streams, and files that are refused."""

import base64
import json
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from xsake.errors import CheckpointError, MissingExtraError
from xsake.model.tokenizer import Tokenizer
from xsake.model.tokenizer_file import library_errors

SPECIAL = ("<|end|>", "<|start|>")


def byte_level() -> tokenizers.Tokenizer:
    """Every byte, a few merges, two special tokens, and a start that is added when asked."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator(["the cat sat on the mat and the other cat"] * 3, trainer)
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


@pytest.fixture
def copy(directory, tmp_path):
    """A checkpoint's directory that a test may spoil; returns a function that adds files."""

    def add(**settings) -> object:
        (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
        for name, value in settings.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return add


@hypothesis.given(st.text())
def test_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_special_tokens_are_added_and_shown_only_when_asked(tokenizer):
    plain = tokenizer.encode("the cat").tolist()
    assert 1 not in plain
    assert tokenizer.encode("the cat", add_special_tokens=True).tolist() == [1, *plain]
    spelled = tokenizer.encode("the<|end|>cat")
    assert 0 in spelled
    assert tokenizer.decode(spelled) == "thecat"
    assert tokenizer.decode(spelled, keep_special_tokens=True) == "the<|end|>cat"


def pieces(tokenizer, ids) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


def test_a_character_of_several_tokens_waits_for_its_last(tokenizer):
    ids = tokenizer.encode("a\N{GRINNING FACE}b").tolist()
    assert len(ids) == 6, "each of its 4 bytes is a token here"
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]


def test_half_a_character_at_the_end_is_given_by_finish(tokenizer):
    ids = tokenizer.encode("a\N{GRINNING FACE}")[:-1]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


@hypothesis.given(st.lists(st.integers(0, 299), max_size=40))
def test_any_tokens_stream_to_the_text_that_they_decode_to(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@hypothesis.given(st.text(max_size=20))
def test_streamed_text_never_shows_half_a_character(tokenizer, text):
    hypothesis.assume("\N{REPLACEMENT CHARACTER}" not in text)
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)
    assert found[-1] == ""


def test_spaces_survive_a_decoder_that_drops_the_first_one():
    words = {"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "</s>": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    found = pieces(Tokenizer(inner), [1, 2, 3, 1, 2])
    assert found == ["the", " cat", "", " the", " cat", ""]


def cut(text: str, stops) -> str:
    """The text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def byte_fallback() -> Tokenizer:
    """Words with spaces, and bytes for all other characters, as sentencepiece has them."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(("<unk>", *"▁abc", "▁a", "ab", "ca"))}
    merges = [("▁", "a"), ("a", "b"), ("c", "a")]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return Tokenizer(inner)


FALLBACK = byte_fallback()
SOME_TEXT = st.text(alphabet="abc é\N{GRINNING FACE}", max_size=30)
STOPS = st.lists(st.text(alphabet="abc é\N{GRINNING FACE}", min_size=1, max_size=4), max_size=4)


@hypothesis.given(st.data(), SOME_TEXT, STOPS)
def test_streamed_text_is_that_of_all_tokens_before_the_first_stop_string(
    tokenizer, data, text, stops
):
    ids = tokenizer.encode(text).tolist()
    cases = [(tokenizer, ids), (FALLBACK, FALLBACK.encode(text).tolist())]
    noise = data.draw(st.lists(st.sampled_from([*ids, 0, *range(240, 256)]), max_size=40))
    for owner, tokens in (*cases, (tokenizer, noise)):
        stream, shown = owner.stream(stops), ""
        expected = cut(owner.decode(tokens), stops)
        for token in tokens:
            shown += stream.push(token)
            assert expected.startswith(shown)
        shown += stream.finish()
        assert shown == stream.text == expected
        assert stream.is_stopped == (expected != owner.decode(tokens))


def test_the_start_of_a_stop_string_waits_until_it_cannot_become_one(tokenizer):
    stream = tokenizer.stream(["\n\nQ:", "END"])
    pushed = [stream.push(token) for token in tokenizer.encode("a\n\nEN\n\nQ:b")]
    assert pushed == ["a", "", "", "\n\n", "", "EN", "", "", "", ""]
    assert stream.is_stopped and stream.text == "a\n\nEN"
    assert stream.push(tokenizer.encode("c")[0]) == stream.finish() == ""


def test_end_tokens_come_from_every_file_that_names_them(copy):
    assert Tokenizer.load(copy()).end_ids == ()
    directory = copy(
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [9, 7]},
        tokenizer_config={"eos_token": {"content": "<|end|>"}},
    )
    assert Tokenizer.load(directory).end_ids == (0, 7, 9)
    assert Tokenizer.load(copy(config={"eos_token_id": None})).end_ids == (0, 7, 9)
    assert Tokenizer.load(copy(tokenizer_config={"eos_token": "<|start|>"})).end_ids == (1, 7, 9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"config": {"eos_token_id": "2"}}, "config.json has an invalid eos_token_id"),
        ({"config": {"eos_token_id": [1, -1]}}, "config.json has an invalid eos_token_id"),
        (
            {"generation_config": {"eos_token_id": True}},
            "generation_config.json has an invalid eos",
        ),
        ({"generation_config": [2]}, "not an object"),
        ({"tokenizer_config": {"eos_token": "<|stop|>"}}, "is not in tokenizer.json"),
        ({"tokenizer_config": {"eos_token": {"content": 5}}}, "is not in tokenizer.json"),
    ],
)
def test_settings_that_make_no_sense_are_refused(copy, settings, words):
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.load(copy(**settings))


def test_truncation_and_padding_in_the_file_are_not_followed(tmp_path):
    inner = byte_level()
    inner.enable_truncation(3)
    inner.enable_padding(length=3)
    inner.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer.load(tmp_path)
    assert found.decode(found.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert found.encode("a").shape == (1,)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": 3}}', None],
)
def test_a_corrupt_or_truncated_file_is_refused(directory, tmp_path, content):
    whole = (directory / "tokenizer.json").read_bytes()
    half = whole[: len(whole) // 2]
    (tmp_path / "tokenizer.json").write_bytes(half if content is None else content)
    with pytest.raises(CheckpointError, match="invalid tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_an_oversized_one_and_a_link_out_are_refused(directory, tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**27 + 1)  # a hole, which takes no room on the disk
    with pytest.raises(CheckpointError, match="bytes, at most"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(directory / "tokenizer.json")
    with pytest.raises(CheckpointError, match="a file outside of the checkpoint directory"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="XSK-601.no-directory"):
        Tokenizer.load(tmp_path / "elsewhere")


def test_without_the_package_it_says_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "xsake\[model\]"'):
        Tokenizer.load(directory)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def spoiled(copy, **changes):
    plain = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": WORDS,
    }  # fmt: skip
    return copy(tokenizer=plain | changes)


def charsmap(text: bytes) -> str:
    return base64.b64encode(bytes(4) + text + b"\0").decode()


ADDED = {"content": "zz", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": True, "special": False}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": sequence(*[replace("a", "aa")] * 28)}, "one character may become"),
        ({"normalizer": sequence(*[sequence(replace("a", "aa"))] * 20)}, "one character may"),
        ({"normalizer": sequence(*[replace("a", "a" * 10_000)] * 3)}, "one character may become"),
        ({"normalizer": sequence(*[replace("(?=a)", "a", "Regex")] * 28)}, "one character may"),
        ({"normalizer": sequence(*[{"type": "NFC"}] * 1000)}, "1001 steps"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 9999)}},
            "one character may become",
        ),
        (
            {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 28}},
            "decoder: one character may become",
        ),
        (
            {
                "normalizer": sequence(*[replace("a", "aa")] * 28),
                "added_tokens": [ADDED | {"id": 2, "content": "a"}],
            },
            "one character may become",
        ),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "invert": False,
                               "behavior": "Isolated"}},
            "unmatched parenthesis",
        ),
        ({"normalizer": replace("[", "b", "Regex")}, "the pattern"),
        ({"model": WORDS | {"vocab": {"a": 0, "<unk>": 2**32 - 1}}}, "4294967295"),
        ({"added_tokens": [ADDED | {"id": 2**32 - 1}]}, "4294967295"),
        ({"added_tokens": [ADDED | {"id": True}]}, "True"),
        ({"version": "\x1b[31m"}, "tokenizer.json"),
    ],
)  # fmt: skip
def test_a_file_that_would_take_all_memory_or_cannot_be_obeyed_is_refused(copy, changes, words):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(spoiled(copy, **changes))
    assert words in str(caught.value) and "\x1b" not in str(caught.value)


def test_the_normalizers_of_known_models_are_accepted(copy):
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    albert = sequence(
        replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Lowercase"}, replace(" {2,}", " ", "Regex"),
    )  # fmt: skip
    for normalizer in (llama, albert, sequence(*[replace(r"\s+", " ", "Regex")] * 10)):
        assert Tokenizer.load(spoiled(copy, normalizer=normalizer)).encode("a").size == 1


def test_a_tokenizer_that_fails_on_a_text_is_named(copy):
    tokenizer = Tokenizer.load(spoiled(copy, model=WORDS | {"unk_token": "none"}))
    with pytest.raises(CheckpointError, match=r"(?s)tokenizer.json.*\[UNK\]"):
        tokenizer.encode("b")


def test_a_pattern_that_backtracks_without_end_is_given_up(copy):
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split["pattern"] = {"Regex": "(a|aa|a?)+$"}
    tokenizer = Tokenizer.load(spoiled(copy, pre_tokenizer=split))
    with pytest.raises(CheckpointError, match="retry-limit"):
        tokenizer.encode("a" * 40 + "!")


class PanicException(BaseException):  # as pyo3 defines it
    pass


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (PanicException("index out of bounds"), CheckpointError),
        (Exception("of the library"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
        (KeyError("ours"), KeyError),
    ],
)
def test_panics_of_the_library_are_refusals_and_nothing_else_is_caught(raised, expected):
    with pytest.raises(expected) as caught, library_errors():
        raise raised
    assert type(caught.value) is expected
