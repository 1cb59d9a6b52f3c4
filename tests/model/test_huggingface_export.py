"""Exporting: the very tensors that were read, whole or not at all, and nothing it cannot say."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from tests.model.checkpoints import GOLDEN, NAMES, copied, rewritten, tensors_of
from xsake.errors import ArgumentError, CheckpointError
from xsake.model import Decoder, DecoderConfig, LayerKind, Rope
from xsake.model.config import YarnScaling
from xsake.model.huggingface import export, load
from xsake.model.huggingface.configs import TokenIds


def without_values(config) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].tobytes() == tensor.tobytes(), name


def assert_same_model(found, expected):
    assert found.config == expected.config and found.family == expected.family
    own, other = (nnx.to_flat_state(nnx.state(x.model, nnx.Param)) for x in (found, expected))
    for (path, value), (_, wanted) in zip(own, other, strict=True):
        assert value.get_value().dtype == wanted.get_value().dtype, path
        np.testing.assert_array_equal(value.get_value(), wanted.get_value(), err_msg=str(path))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_is_what_was_loaded_bit_for_bit(name, tmp_path):
    loaded = load(GOLDEN / name)
    out = export(loaded.model, tmp_path / "out", family=loaded.family, token_ids=loaded.token_ids)
    assert_same_tensors(tensors_of(out), tensors_of(GOLDEN / name))
    again = load(out)
    assert_same_model(again, loaded)
    assert again.token_ids == loaded.token_ids


def test_bfloat16_stays_bfloat16(tmp_path):
    cast = lambda tensors: {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}
    source = rewritten(copied("gpt2", tmp_path), cast)
    out = export(load(source, param_dtype="bfloat16").model, tmp_path / "out", family="gpt2")
    assert_same_tensors(tensors_of(out), tensors_of(source))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_many_tensors_are_spread_over_files_that_an_index_names(tmp_path):
    loaded = load(GOLDEN / "gemma3")
    out = export(loaded.model, tmp_path / "out", family=loaded.family, max_shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert max((out / file).stat().st_size for file in files) < 20_000 + 4_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = tensors_of(out)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert_same_model(load(out), loaded)


def test_the_same_model_is_the_same_bytes_that_transformers_and_others_may_read(tmp_path):
    model = load(GOLDEN / "qwen2_windowed").model
    outs = [export(model, tmp_path / name, family="qwen2", max_shard_bytes=30_000) for name in "ab"]
    names = [sorted(path.name for path in out.iterdir()) for out in outs]
    assert names[0] == names[1]
    assert all((outs[0] / x).read_bytes() == (outs[1] / x).read_bytes() for x in names[0])
    for path in outs[0].glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
    assert {oct(path.stat().st_mode & 0o777) for path in outs[0].iterdir()} == {"0o644"}
    assert outs[0].stat().st_mode & 0o500 == 0o500


def test_config_json_is_spelled_for_both_versions(tmp_path):
    def read(name, family):
        out = export(load(GOLDEN / name).model, tmp_path / name, family=family)
        return json.loads((out / "config.json").read_text())

    scaled = read("llama_scaled", "llama")
    assert scaled["rope_parameters"]["rope_theta"] == scaled["rope_theta"] == 10000
    assert scaled["rope_scaling"]["low_freq_factor"] == 1
    assert read("llama", "llama")["rope_scaling"] is None
    windowed = read("qwen2_windowed", "qwen2")
    assert windowed["layer_types"][1:] == ["sliding_attention"] * 2
    assert (windowed["max_window_layers"], windowed["use_sliding_window"]) == (1, True)
    gemma = read("gemma3", "gemma3_text")
    assert (gemma["rope_local_base_freq"], gemma["sliding_window_pattern"]) == (10000, 3)
    assert gemma["query_pre_attn_scalar"] == 24


def test_a_model_that_was_never_a_checkpoint_can_become_one(tmp_path):
    yarn = YarnScaling(factor=2, original_context=128, attention_factor=1.3, is_truncated=False)
    kinds = (LayerKind(window=7, rope=Rope()), LayerKind(rope=Rope(base=500, scaling=yarn)))
    config = DecoderConfig.tiny(
        kinds=kinds, kind_of_layer=(1, 0, 1), norm_offset=1.0, has_post_norms=True,
        has_qk_norm=True, embedding_scale=48**0.5, activation="gelu_tanh",
        logit_softcap=30.0, head_dim=24,
    )  # fmt: skip
    made = without_values(config)
    with pytest.raises(CheckpointError, match=r"(?s)full_attention\.truncate"):
        export(made, tmp_path / "yarn", family="gemma3_text")
    kinds = (kinds[0], LayerKind(rope=Rope(base=500)))
    config = config.model_copy(update={"kinds": kinds})
    graph, state = nnx.split(without_values(config))
    made = nnx.merge(graph, jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state))
    again = load(export(made, tmp_path / "out", family="gemma3_text"))
    assert again.config.kinds == (kinds[1], kinds[0]) and again.config.layer_kinds == (0, 1, 0)
    assert again.config.logit_softcap == 30


@pytest.mark.parametrize(
    ("changes", "family", "field"),
    [
        ({"has_qk_norm": True}, "llama", "has_qk_norm"),
        ({"has_qkv_bias": True}, "llama", "has_out_bias"),
        ({"has_post_norms": True}, "qwen3", "has_post_norms"),
        ({"query_scale": 0.5}, "mistral", "query_scale"),
        ({"attention_softcap": 9.0}, "llama", "attention_softcap"),
        ({"kinds": (LayerKind(window=5, rope=Rope()),)}, "llama", "kinds"),
        ({"kinds": (LayerKind(),)}, "llama", "rotary"),
        ({}, "gpt2", "rotary"),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_field(tmp_path, changes, family, field):
    model = without_values(DecoderConfig.tiny(**changes))
    with pytest.raises(CheckpointError, match=field) as refusal:
        export(model, tmp_path / "out", family=family)
    assert "fix:" in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_mixed_dtypes_and_unknown_families_are_refused(tmp_path):
    model = load(GOLDEN / "llama").model
    with pytest.raises(ArgumentError, match="mamba"):
        export(model, tmp_path / "out", family="mamba")
    model.embedding.set_value(model.embedding[...].astype(jnp.bfloat16))
    with pytest.raises(CheckpointError, match="bfloat16, float32"):
        export(model, tmp_path / "out", family="llama")


def test_a_checkpoint_is_replaced_only_when_told_to_and_nothing_else_ever(tmp_path):
    model = load(GOLDEN / "llama").model
    out = export(model, tmp_path / "out", family="llama")
    (out / "stale.safetensors").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="overwrite"):
        export(model, out, family="llama")
    export(model, out, family="llama", overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    precious = tmp_path / "home"
    (precious / "photos").mkdir(parents=True)
    (precious / "config.json").write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(out)
    for other in (precious, link, tmp_path):
        with pytest.raises(CheckpointError, match="not a plain checkpoint|a checkpoint"):
            export(model, other, family="llama", overwrite=True)
    assert (precious / "photos").is_dir() and link.is_symlink()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_failure_half_way_leaves_nothing_behind_and_keeps_the_old_checkpoint(
    tmp_path, monkeypatch, replaces
):
    model = load(GOLDEN / "llama").model
    out, written = tmp_path / "out", []
    before = None
    if replaces:
        before = (export(model, out, family="llama") / "model.safetensors").read_bytes()

    def full_disk(*arguments, **options):
        written.append(arguments)
        if len(written) == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr("xsake.model.huggingface.exporting.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        export(model, out, family="llama", max_shard_bytes=30_000, overwrite=replaces)
    assert len(written) == 2
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if replaces else [])
    assert not replaces or (out / "model.safetensors").read_bytes() == before


def test_tokenizer_files_are_copied_but_not_through_links_that_leave(tmp_path):
    model, source = load(GOLDEN / "llama").model, tmp_path / "source"
    source.mkdir()
    with pytest.raises(CheckpointError, match="XSK-601.export-tokenizer"):
        export(model, tmp_path / "out", family="llama", tokenizer_from=source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "tokenizer_config.json").write_text("{}")
    (source / "private.txt").write_text("no")
    out = export(
        model, tmp_path / "out", family="llama", tokenizer_from=source,
        token_ids=TokenIds(bos=1, eos=(2, 7)),
    )  # fmt: skip
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not (out / "private.txt").exists()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [2, 7]
    (source / "merges.txt").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("secret")
    with pytest.raises(CheckpointError, match=r"merges\.txt is a link to a file outside"):
        export(model, tmp_path / "other", family="llama", tokenizer_from=source)
    assert not (tmp_path / "other").exists()


def test_weights_on_several_devices_are_exported_whole(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    out = export(load(GOLDEN / "qwen3", mesh=mesh).model, tmp_path / "out", family="qwen3")
    assert_same_tensors(tensors_of(out), tensors_of(GOLDEN / "qwen3"))
