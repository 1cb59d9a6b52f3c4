"""The converted model: rotation survives the reordering, files are planned and written whole."""

import subprocess

import numpy as np
import pytest

from benchmarks.peers import smollm2
from benchmarks.peers.gguf_to_huggingface import (
    config_of,
    huggingface_name,
    plan_shards,
    unpermuted,
)

METADATA = {
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.block_count": 3,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
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
    config = config_of(METADATA, is_tied=True)
    assert config["num_hidden_layers"] == 3
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 2)
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, True)


def test_unknown_tensors_and_scaled_rotations_are_refused():
    assert huggingface_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    with pytest.raises(SystemExit, match="blk.0.attn_q.bias"):
        huggingface_name("blk.0.attn_q.bias")
    with pytest.raises(SystemExit, match="rope.scaling.factor"):
        config_of(METADATA | {"llama.rope.scaling.factor": 4.0}, is_tied=True)


def test_a_failed_conversion_leaves_nothing_and_a_finished_one_is_not_repeated(
    tmp_path, monkeypatch
):
    def fail(command, **_):
        made = tmp_path / command[-1]
        made.mkdir()
        (made / "model-00001-of-00005.safetensors").touch()
        raise subprocess.CalledProcessError(1, command)

    def finish(command, **_):
        made = tmp_path / command[-1]
        made.mkdir()
        (made / "config.json").touch()

    monkeypatch.setattr(smollm2, "built_interpreter", lambda *_: "python")
    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        smollm2.directory(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(smollm2.subprocess, "run", finish)
    folder = smollm2.directory(tmp_path)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    assert smollm2.directory(tmp_path) == folder
