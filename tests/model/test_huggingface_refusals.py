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

Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FOURTH = "model-00004-of-00003.safetensors"


def refusal(folder, *words: str) -> str:
    """The message, which must have all these words, a code and a fix."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert message.startswith("XSK-601.") and re.search(r"\n  fix:      \S", message), message
    for word in words:
        assert word in message, message
    return message


# Changes of a checkpoint in a folder.


def tensors(change):
    """Changes the tensors, which are saved in one file."""
    return lambda folder: rewritten(folder, change)


def q_with(value):
    def change(tensors):
        tensors[Q] = tensors[Q].copy()
        tensors[Q][3, 4] = value
        return tensors

    return tensors(change)


def contents(data: bytes, file: str = WEIGHTS):
    return lambda folder: (folder / file).write_bytes(data)


def header(text: bytes, body: bytes = b""):
    return contents(struct.pack("<Q", len(text)) + text + body)


def entry(**changes):
    """Changes the header entry of the embedding."""

    def change(folder):
        data = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        entries = json.loads(data[8 : 8 + length])
        entries["model.embed_tokens.weight"] |= changes
        header(json.dumps(entries).encode(), data[8 + length :])(folder)

    return change


def index(change):
    """Changes the map of the index, next to a file that it does not list."""

    def rewrite(folder):
        save_file({NORM: tensors_of(folder)[NORM]}, folder / FOURTH)
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        (folder / INDEX).write_text(json.dumps({"weight_map": change(places)}))

    return rewrite


def moved(place):
    return index(lambda places: places | {Q: place})


def without(*files):
    return lambda folder: [(folder / file).unlink() for file in files]


CORRUPT = (WEIGHTS, "again")
REFUSED = {
    "tensor missing": (
        "mistral", tensors(lambda x: {key: value for key, value in x.items() if key != Q}),
        f"{Q} (missing): nothing, expected [32, 32]", "the download",
    ),
    "unexpected": (
        "mistral", tensors(lambda x: x | {BIAS: np.zeros(32, np.float32)}),
        f"{BIAS} (unexpected): F32 [32]", "config.json",
    ),
    "mis-shaped": (
        "mistral", tensors(lambda x: x | {Q: np.ascontiguousarray(x[Q][:-1])}),
        f"{Q} (mis-shaped): F32 [31, 32], expected [32, 32]", "same model",
    ),
    "integers": (
        "mistral", tensors(lambda x: x | {Q: x[Q].astype(np.int8)}),
        f"{Q} (unreadable): I8", "quantized",
    ),
    "nan": ("mistral", q_with(np.nan), f"{Q} in model.safetensors", "1 of 1024"),
    "infinite": ("mistral", q_with(-np.inf), f"{Q} in model.safetensors", "1 of 1024"),
    "control characters": (
        "mistral", tensors(lambda x: x | {"evil\x1b[2J": np.zeros(2, np.float32)}), r"evil\x1b",
    ),
    "empty": ("llama", contents(b""), *CORRUPT, "a header of 0 bytes"),
    "no header": ("llama", contents(b"\xff" * 8), *CORRUPT, "not a valid safetensors file"),
    "zip": ("llama", contents(b"PK\x03\x04\x00\x00\x08\x08" + bytes(99)), *CORRUPT, "a pickle"),
    "pickle": ("llama", contents(b"\x80\x02\x8a\x0al\xfc\x9cF" + bytes(99)), *CORRUPT, "a pickle"),
    "no JSON": ("llama", header(b"{{{{", bytes(99)), *CORRUPT, "not valid JSON"),
    "no object": ("llama", header(b"[]"), *CORRUPT, "not an object"),
    "no entry": ("llama", header(b'{"a": {}}'), *CORRUPT, "'a' has the invalid entry {}"),
    "a hole": (
        "llama", header(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', b"ab"),
        *CORRUPT, "a does not start where the header ends",
    ),
    **{
        f"entry {change}": ("llama", entry(**change), "model.embed_tokens.weight", "again")
        for change in (
            {"shape": [64, 33]}, {"shape": [-64, 32]}, {"shape": [2**70, 32]}, {"shape": "64"},
            {"dtype": 3}, {"data_offsets": [0]}, {"data_offsets": [4096, 0]},
        )
    },
    "a terabyte": (
        "mistral", lambda folder: os.truncate(folder / WEIGHTS, 2**40), "unused bytes",
    ),
    "a directory of pickles": (
        "llama", lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin", "not supported", "executes code", "save_pretrained",
    ),
    "no weights": ("llama", without(WEIGHTS), "no weights", "config.json"),
    "no config": ("llama", without("config.json"), "config.json is missing"),
    "weights twice": (
        "llama_yarn", lambda folder: save_file(tensors_of(folder), folder / WEIGHTS),
        "both a single file and an index", INDEX,
    ),
    "shard missing": (
        "llama_yarn", without("model-00002-of-00003.safetensors"),
        "model-00002-of-00003.safetensors is missing", "complete the download",
    ),
    **{
        f"index to {place}": ("llama_yarn", moved(place), str(place), words)
        for place, words in (
            ("../model.safetensors", "invalid file name"),
            ("/etc/model.safetensors", "invalid file name"),
            ("sub/model.safetensors", "invalid file name"),
            (".hidden.safetensors", "invalid file name"),
            ("pytorch_model-00001.bin", "pickled weights are not supported"),
            ("notes.txt", "not a safetensors file"),
            (["a.safetensors"], "not a safetensors file"),
            (None, "not a safetensors file"),
            ("model-00009-of-00003.safetensors", "is missing from the checkpoint"),
        )
    },
    **{
        f"index of {places}": ("llama_yarn", index(lambda _, places=places: places), INDEX)
        for places in (None, [], {})
    },
    "stored twice": (
        "llama_yarn", index(lambda places: places | {NORM: FOURTH}), NORM, "stored twice", FOURTH,
    ),
    "not in the index": (
        "llama_yarn", index(lambda places: {k: v for k, v in places.items() if k != Q}),
        Q, "disagree",
    ),
    "only in the index": (
        "llama_yarn", index(lambda _: {Q: "model-00001-of-00003.safetensors"}), "disagree",
    ),
    **{
        f"config {text[:12]!r}": ("llama", contents(text, "config.json"), "config.json", words)
        for text, words in (
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
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_spoiled_checkpoint_is_refused_by_name_and_printed_safely(tmp_path, case):
    name, spoil, *words = REFUSED[case]
    folder = copied(name, tmp_path)
    spoil(folder)
    assert refusal(folder, *words).replace("\n", "").isprintable()


def test_at_most_ten_tensors_are_listed_and_the_others_counted(tmp_path):
    message = refusal(copied("mistral", tmp_path, hidden_size=64, head_dim=8), "of 21", "more")
    assert message.count("mis-shaped)") == 10


def test_a_truncated_file_is_refused_with_the_tensor_that_was_cut(tmp_path):
    folder = copied("qwen3", tmp_path)
    known = tensors_of(folder)
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 20)
    message = refusal(folder, "model.safetensors is truncated", "again")
    assert re.search(r"got: +(\S+) ends at", message)[1] in known


def test_dtypes_that_a_terminal_would_obey_are_never_printed(tmp_path):
    folder = copied("mistral", tmp_path)
    entry = {"dtype": "F3\x1b]0;pwned\x07", "shape": [1], "data_offsets": [0, 4]}
    header(json.dumps({"x": entry}).encode(), bytes(4))(folder)
    assert not set("\x1b\x07") & set(refusal(folder))


@pytest.mark.parametrize("size", [1, 2**62])
def test_a_tensor_of_a_hundred_thousand_dimensions_is_refused_at_once(tmp_path, size):
    folder = copied("mistral", tmp_path)
    entry = {"dtype": "F32", "shape": [size] * 200_000, "data_offsets": [0, 4]}
    header(json.dumps({"x": entry}).encode(), bytes(4))(folder)
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
    header(text)(folder)
    tracemalloc.start()
    refusal(folder, "model.safetensors", words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_link_out_of_the_directory_is_refused_and_one_inside_is_not(tmp_path, name):
    folder = copied("llama", tmp_path)
    (folder / name).rename(folder / f"real_{name}")
    (folder / name).symlink_to(f"real_{name}")
    load(folder)
    (folder / f"real_{name}").rename(tmp_path / name)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / name)
    refusal(folder, f"{name} is a link to a file outside", "cp -rL")


def test_paths_that_are_not_checkpoints_are_refused_without_waiting(tmp_path):
    refusal(tmp_path / "nowhere", "the checkpoint directory does not exist")
    refusal(tmp_path / "weights.pth", "pickled weights are not supported")
    folder = copied("llama", tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)
    refusal(folder, WEIGHTS)
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    refusal(folder, "model.safetensors is not a regular file")


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
    ("llama", {"hidden_size": 2**24, "head_dim": 2**20, "num_attention_heads": 2**20},
     "parameters", "original config.json"),
    ("llama", {"tie_word_embeddings": False}, "lm_head.weight (missing)", "embeddings: true"),
    ("llama", {"num_hidden_layers": 1}, "model.layers.1.mlp", "(unexpected)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "key", "expected"),
    REFUSED_KEYS,
    ids=[f"{name}-{key}-{number}" for number, (name, _, key, _) in enumerate(REFUSED_KEYS)],
)
def test_a_key_that_cannot_be_honoured_is_refused_by_name(tmp_path, name, changes, key, expected):
    refusal(copied(name, tmp_path, **changes), key, expected)


def test_keys_that_change_nothing_are_ignored():
    values = config_of("llama")
    extra = {"use_cache": False, "made_up": {"a": [1]}, "initializer_range": "?", "auto_map": {}}
    assert read_config(values | extra) == read_config(values)
    gpt2 = config_of("gpt2")
    assert read_config(gpt2 | {"reorder_and_upcast_attn": True}) == read_config(gpt2)
    assert read_config(gpt2 | {"scale_attn_weights": False}).config.scale == 1
