"""Checkpoints that must not be loaded: each is refused with what is wrong and how to fix it."""

import json
import os
import re
import struct
import time
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.model.checkpoints import ABSENT, config_of, copied, rewritten, tensors_of
from xsake.errors import CheckpointError
from xsake.model.huggingface import load
from xsake.model.huggingface.configs import read_config

Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def refusal(folder, *words: str) -> str:
    """The message, which must have all these words, a code and a fix."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert message.startswith("XSK-601.") and re.search(r"\n  fix:      \S", message), message
    for word in words:
        assert word in message, message
    return message


# Tensors: change of the config, change of the tensors, words of the message.


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_value(value):
    def change(tensors):
        tensors[Q] = tensors[Q].copy()
        tensors[Q][3, 4] = value
        return tensors

    return change


BIAS = "model.layers.0.self_attn.q_proj.bias"
MISMATCHES = {
    "missing": ({}, without(Q), f"{Q} (missing): nothing, expected [32, 32]", "the download"),
    "tied head": (
        {"tie_word_embeddings": False}, None, "lm_head.weight (missing)",
        "tie_word_embeddings: true",
    ),
    "unexpected": (
        {}, lambda tensors: tensors | {BIAS: np.zeros(32, np.float32)},
        f"{BIAS} (unexpected): F32 [32]", "config.json",
    ),
    "more layers": ({"num_hidden_layers": 1}, None, "model.layers.1.mlp", "(unexpected)"),
    "mis-shaped": (
        {}, lambda tensors: tensors | {Q: np.ascontiguousarray(tensors[Q][:-1])},
        f"{Q} (mis-shaped): F32 [31, 32], expected [32, 32]", "same model",
    ),
    "integers": (
        {}, lambda tensors: tensors | {Q: tensors[Q].astype(np.int8)},
        f"{Q} (unreadable): I8", "quantized",
    ),
    "nan": ({}, with_value(np.nan), f"{Q} in model.safetensors", "1 of 1024"),
    "infinite": ({}, with_value(-np.inf), f"{Q} in model.safetensors", "1 of 1024"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, case):
    keys, change, *words = MISMATCHES[case]
    name = "llama" if case in ("tied head", "more layers") else "mistral"
    folder = copied(name, tmp_path, **keys)
    refusal(folder if change is None else rewritten(folder, change), *words)


def test_at_most_ten_tensors_are_listed_and_the_others_counted(tmp_path):
    message = refusal(copied("mistral", tmp_path, hidden_size=64, head_dim=8), "of 21", "more")
    assert message.count("mis-shaped)") == 10


# Files.


def test_a_truncated_file_is_refused_with_the_tensor_that_was_cut(tmp_path):
    folder = copied("qwen3", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-20])
    message = refusal(folder, "model.safetensors is truncated", "again")
    last = re.search(r"got: +(\S+) ends at", message)[1]
    assert last in tensors_of(copied("qwen3", tmp_path / "whole"))


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "a header of 0 bytes"),
        (b"\xff" * 8, "not a valid safetensors file"),
        (b"PK\x03\x04\x00\x00\x08\x08" + bytes(99), "the file is a pickle"),
        (b"\x80\x02\x8a\x0al\xfc\x9c\x46" + bytes(99), "the file is a pickle"),
        (struct.pack("<Q", 4) + b"{{{{" + bytes(99), "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "'a' has the invalid entry {}"),
    ],
)
def test_a_corrupt_header_is_refused_by_file(tmp_path, start, words):
    folder = copied("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(start)
    refusal(folder, "model.safetensors", words, "again")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [64, 33]}, {"shape": [-64, 32]}, {"shape": [2**70, 32]}, {"shape": "64"},
        {"dtype": 3}, {"data_offsets": [0]}, {"data_offsets": [4096, 0]},
    ],
)  # fmt: skip
def test_a_header_that_lies_about_a_tensor_is_refused_by_tensor(tmp_path, change):
    folder = copied("llama", tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    name = next(name for name in entries if name.endswith("embed_tokens.weight"))
    entries[name] |= change
    header(folder, json.dumps(entries).encode(), data[8 + length :])
    refusal(folder, name, "again")


def header(folder, text: bytes, body: bytes = b"") -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_names_and_dtypes_that_a_terminal_would_obey_are_never_printed(tmp_path):
    folder = copied("mistral", tmp_path)
    rewritten(folder, lambda tensors: tensors | {"evil\x1b[2J": np.zeros(2, np.float32)})
    assert "\x1b" not in refusal(folder, r"evil\x1b")
    entry = {"dtype": "F3\x1b]0;pwned\x07", "shape": [1], "data_offsets": [0, 4]}
    header(folder, json.dumps({"x": entry}).encode(), bytes(4))
    assert not set("\x1b\x07") & set(refusal(folder))


@pytest.mark.parametrize("size", [1, 2**62])
def test_a_tensor_of_a_hundred_thousand_dimensions_is_refused_at_once(tmp_path, size):
    folder = copied("mistral", tmp_path)
    entry = {"dtype": "F32", "shape": [size] * 200_000, "data_offsets": [0, 4]}
    header(folder, json.dumps({"x": entry}).encode(), bytes(4))
    start = time.process_time()
    refusal(folder, "model.safetensors", "has the invalid entry")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"x":[' + b"[]," * 3_000_000 + b"[]]}", "arrays, objects or strings"),
        (b'{"x":"' + b"x" * 2**25 + b'"}', "a header of"),
    ],
)
def test_a_header_is_refused_before_it_takes_memory(tmp_path, text, words):
    folder = copied("mistral", tmp_path)
    header(folder, text)
    tracemalloc.start()
    refusal(folder, "model.safetensors", words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


def test_a_terabyte_behind_the_tensors_is_refused_without_a_map(tmp_path):
    folder = copied("mistral", tmp_path)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**40)
    refusal(folder, "unused bytes")


def test_a_directory_of_pickles_is_refused_with_the_way_to_convert(tmp_path):
    folder = copied("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refusal(folder, "pytorch_model.bin", "not supported", "executes code", "save_pretrained")
    with pytest.raises(CheckpointError, match="XSK-601.pickle"):
        load(tmp_path / "weights.pth")


def test_a_directory_without_weights_or_without_config_says_so(tmp_path):
    folder = copied("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    refusal(folder, "no weights", "config.json")
    (folder / "config.json").unlink()
    refusal(folder, "config.json is missing")
    refusal(tmp_path / "nowhere", "the checkpoint directory does not exist")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_directory_is_refused_and_one_inside_is_not(tmp_path, name):
    folder = copied("llama", tmp_path)
    (folder / name).rename(folder / f"real_{name}")
    (folder / name).symlink_to(f"real_{name}")
    load(folder)
    (folder / f"real_{name}").rename(tmp_path / name)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / name)
    refusal(folder, f"{name} is a link to a file outside", "cp -rL")


def test_a_link_to_itself_and_a_pipe_are_refused_without_waiting(tmp_path):
    folder = copied("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    refusal(folder, "model.safetensors")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refusal(folder, "model.safetensors is not a regular file")


# The index.


def with_index(folder, change) -> None:
    values = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(change(values)))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("../model.safetensors", "invalid file name"),
        ("/etc/model.safetensors", "invalid file name"),
        ("sub/model.safetensors", "invalid file name"),
        (".hidden.safetensors", "invalid file name"),
        ("pytorch_model-00001.bin", "pickled weights are not supported"),
        ("notes.txt", "not a safetensors file"),
        (["a.safetensors"], "not a safetensors file"),
        (None, "not a safetensors file"),
        ("model-00009-of-00003.safetensors", "is missing from the checkpoint"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path, place, words):
    folder = copied("llama_yarn", tmp_path)
    save_file({Q: np.zeros((32, 32), np.float32)}, tmp_path / "model.safetensors")
    with_index(folder, lambda values: values | {"weight_map": values["weight_map"] | {Q: place}})
    refusal(folder, str(place) if isinstance(place, str) else Q, words)


NORM, FOURTH = "model.norm.weight", "model-00004-of-00003.safetensors"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda places: None, (INDEX,)),
        (lambda places: [], (INDEX,)),
        (lambda places: {}, (INDEX,)),
        (lambda places: places | {NORM: FOURTH}, (NORM, "stored twice", FOURTH)),
        (lambda places: {k: v for k, v in places.items() if k != Q}, (Q, "disagree")),
        (lambda places: {Q: "model-00001-of-00003.safetensors"}, ("disagree",)),
    ],
)
def test_an_index_without_a_map_or_that_disagrees_with_its_files_is_refused(
    tmp_path, change, words
):
    folder = copied("llama_yarn", tmp_path)
    save_file({NORM: tensors_of(folder)[NORM]}, folder / FOURTH)
    with_index(folder, lambda values: {"weight_map": change(values["weight_map"])})
    refusal(folder, *words)


def test_a_missing_shard_and_weights_that_are_there_twice_are_refused(tmp_path):
    folder = copied("llama_yarn", tmp_path)
    save_file(tensors_of(folder), folder / "model.safetensors")
    refusal(folder, "both a single file and an index", INDEX)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    refusal(folder, "model-00002-of-00003.safetensors is missing", "complete the download")


# config.json.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' is there twice"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": -Infinity}', "not a finite number"),
        (b'{"a": 1e999}', "not a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "not an object"),
        (b" " * (2**20 + 1), "too large"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else value,
)
def test_a_config_that_is_no_proper_json_is_refused(tmp_path, text, words):
    folder = copied("llama", tmp_path)
    (folder / "config.json").write_bytes(text)
    refusal(folder, "config.json", words)


REFUSED_KEYS = [
    ("llama", {"model_type": "mixtral"}, "model_type", "llama, qwen2"),
    ("llama", {"model_type": ABSENT}, "model_type", "llama, qwen2"),
    ("llama", {"hidden_act": "relu"}, "hidden_act", "silu"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config", "absent"),
    ("llama", {"num_local_experts": 8}, "num_local_experts", "absent"),
    ("llama", {"sliding_window": 8}, "sliding_window", "absent"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "full"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved", "False"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "auto_map", "code"),
    ("llama", {"hidden_size": 10**9}, "hidden_size", "16777216"),
    ("llama", {"hidden_size": 48.0}, "hidden_size", "integer"),
    ("llama", {"hidden_size": True}, "hidden_size", "integer"),
    ("llama", {"hidden_size": ABSENT}, "hidden_size", "integer"),
    ("llama", {"num_hidden_layers": 2000}, "num_hidden_layers", "1024"),
    ("llama", {"num_key_value_heads": 4}, "q_heads", "multiple"),
    ("llama", {"head_dim": 7}, "head_dim", "even"),
    ("llama", {"head_dim": None, "num_attention_heads": 5}, "head_dim", "required"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps", "above 0"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
    ("llama", {"rope_theta": 5.0}, "rope_theta", "rope_parameters"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type", "yarn"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}},
     "rope_scaling.type", "yarn"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor", "number"),
    ("llama", {"rope_parameters": {"mrope_section": [1]}}, "rope_parameters.mrope_section", "only"),
    ("llama", {"rope_parameters": {"rope_theta": 1}}, "rope_parameters.rope_theta", "above 1"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters", "object"),
    ("llama_scaled", {"rope_scaling": {"type": "linear", "factor": 8}}, "rope_scaling", "only one"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None,
               "layer_types": ["sliding_attention"] * 2}, "sliding_window", "tokens"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types", "a list of 2"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types", "sliding"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types", "sliding_attention"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "absent"),
    ("gemma3", {"final_logit_softcapping": -1}, "final_logit_softcapping", "above 0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "False"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type", "both"),
    ("gemma3", {"hidden_act": "silu"}, "hidden_act", "gelu_tanh"),
    ("gemma3", {"model_type": "gemma3"}, "text_config", "text config"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", "False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention", "False"),
    ("gpt2", {"activation_function": "relu"}, "activation_function", "gelu_new"),
    ("gpt2", {"n_head": 5}, "n_head", "divisor"),
    ("gpt2", {"n_positions": ABSENT}, "n_positions", "integer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "key", "expected"),
    REFUSED_KEYS,
    ids=[f"{name}-{key}-{number}" for number, (name, _, key, _) in enumerate(REFUSED_KEYS)],
)
def test_a_key_that_cannot_be_honoured_is_refused_by_name(tmp_path, name, changes, key, expected):
    refusal(copied(name, tmp_path, **changes), key, expected)


def test_sizes_that_no_memory_holds_are_refused_before_anything_is_made(tmp_path):
    giant = {"hidden_size": 2**24, "head_dim": 2**20, "num_attention_heads": 2**20}
    refusal(copied("llama", tmp_path, **giant), "parameters", "original config.json")


def test_keys_that_change_nothing_are_ignored():
    values = config_of("llama")
    extra = {"use_cache": False, "made_up": {"a": [1]}, "initializer_range": "?", "auto_map": {}}
    assert read_config(values | extra) == read_config(values)
    gpt2 = config_of("gpt2")
    assert read_config(gpt2 | {"reorder_and_upcast_attn": True}) == read_config(gpt2)
    assert read_config(gpt2 | {"scale_attn_weights": False}).config.scale == 1
