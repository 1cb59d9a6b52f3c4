"""generation_config.json: what transformers would do by it, or an error."""

import json

import pytest

from xsake.errors import CheckpointError
from xsake.model.generate import GenerationOptions


@pytest.fixture
def read(tmp_path):
    """Options from a file with these values."""

    def load(values, **overrides):
        content = values if isinstance(values, str) else json.dumps(values)
        (tmp_path / "generation_config.json").write_text(content)
        return GenerationOptions.from_folder(tmp_path, **overrides)

    return load


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"temperature": 0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            {"temperature": 0.6},
        ),
        (
            {"do_sample": True, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "temperature": 2},
            {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "temperature": 2},
        ),
        ({"repetition_penalty": 1.0}, {"temperature": 0}),
        ({"repetition_penalty": 1.1}, {"temperature": 0, "repetition_penalty": 1.1}),
        ({"eos_token_id": 7}, {"temperature": 0, "end_ids": (7,)}),
        ({"eos_token_id": [9, 7, 9]}, {"temperature": 0, "end_ids": (7, 9)}),
        ({"stop_strings": "\n\n"}, {"temperature": 0, "stop": ("\n\n",)}),
        ({"stop_strings": ["a", "b"]}, {"temperature": 0, "stop": ("a", "b")}),
        ({"max_new_tokens": 5, "max_length": 9}, {"temperature": 0, "max_new_tokens": 5}),
        (
            {
                "bos_token_id": 1, "pad_token_id": 0, "transformers_version": "5.22.2",
                "cache_implementation": "hybrid", "num_beams": 1, "length_penalty": 1.0,
                "typical_p": 1.0, "suppress_tokens": None, "use_cache": True, "unknown": None,
            },
            {"temperature": 0},
        ),
    ],
)  # fmt: skip
def test_a_file_gives_the_options_of_transformers(read, values, expected):
    assert read(values) == GenerationOptions(**expected)


def test_overrides_win(read):
    file = {"do_sample": True, "temperature": 0.6, "max_length": 4096, "eos_token_id": 2}
    options = read(file, max_new_tokens=3, temperature=0, end_ids=(5,))
    assert options == GenerationOptions(max_new_tokens=3, temperature=0, end_ids=(5,), top_k=50)


@pytest.mark.parametrize(
    ("values", "slug", "words"),
    [
        ({"num_beams": 4}, "generation-key", "num_beams: 4"),
        ({"no_repeat_ngram_size": False}, "generation-key", "no_repeat_ngram_size"),
        ({"typical_p": 0.9}, "generation-key", "typical_p"),
        ({"chat_format": "chatml"}, "generation-key", "chat_format"),
        ({"max_length": 4096}, "generation-length", "4096"),
        ({"do_sample": 1}, "generation-value", "do_sample: 1"),
        ({"eos_token_id": [1, -1]}, "generation-value", "eos_token_id"),
        ({"eos_token_id": True}, "generation-value", "eos_token_id"),
        ({"stop_strings": ["a", ""]}, "generation-value", "stop_strings"),
        ({"max_new_tokens": 0}, "generation-value", "at least 1"),
        ({"do_sample": True, "temperature": 0}, "generation-value", "above 0"),
        ({"do_sample": True, "top_k": 1.5}, "generation-value", "top_k"),
        ({"do_sample": True, "top_p": 1.5}, "generation-value", "at most 1"),
        ({"do_sample": True, "min_p": "0.1"}, "generation-value", "min_p"),
        ({"repetition_penalty": True}, "generation-value", "repetition_penalty"),
        ("[]", "file-format", "not an object"),
        ('{"top_k": 1, "top_k": 2}', "file-format", "top_k"),
        ('{"temperature": NaN}', "file-format", "NaN"),
    ],
)
def test_what_cannot_be_done_is_refused(read, values, slug, words):
    with pytest.raises(CheckpointError, match=rf"(?s)XSK-601.{slug}.*{words}"):
        read(values)


def test_a_folder_without_the_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="generation_config.json is missing"):
        GenerationOptions.from_folder(tmp_path)
