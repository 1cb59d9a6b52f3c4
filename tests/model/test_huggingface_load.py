"""Loading: the report, the layouts that files come in, dtypes, and weights spread over devices."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests.model.checkpoints import ABSENT, GOLDEN, NAMES, config_of, copied, rewritten, tensors_of
from xsake.errors import ArgumentError, CheckpointError
from xsake.model.config import LinearScaling, YarnScaling
from xsake.model.huggingface import load
from xsake.model.huggingface.configs import TokenIds, read_config


def weights(folder, **options) -> dict:
    state = nnx.state(load(folder, **options).model, nnx.Param)
    return {".".join(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_the_report_accounts_for_every_tensor_of_the_files(name):
    loaded = load(GOLDEN / name)
    stored = tensors_of(GOLDEN / name)
    assert {line.name for line in loaded.report.filter("used")} == stored.keys()
    assert all(line.actual == stored[line.name].shape for line in loaded.report.lines)
    used = {parameter for line in loaded.report.lines for parameter in line.parameters}
    own = nnx.to_flat_state(nnx.state(loaded.model, nnx.Param))
    assert used == {".".join(path) for path, _ in own}


def test_the_report_says_how_each_tensor_was_used_and_prints_layers_together():
    how = {
        line.name: line.how
        for name in ("gpt2", "qwen3")
        for line in load(GOLDEN / name).report.lines
    }
    assert how["transformer.h.1.attn.c_attn.weight"] == "split"
    assert how["transformer.h.0.attn.c_proj.weight"] == "reshaped"
    assert how["transformer.wte.weight"] == "as is"
    assert how["model.layers.1.self_attn.q_proj.weight"] == "transposed"
    printed = str(load(GOLDEN / "gemma3").report)
    assert printed.startswith("gemma3_text: 41 used, 0 missing, 0 unexpected tensors\n")
    line = next(line for line in printed.splitlines() if "q_proj" in line)
    assert line.split() == [
        "used", "model.layers.{0..2}.self_attn.q_proj.weight", "F32", "[64,", "32]", "transposed",
        "layers.attention.query",
    ]  # fmt: skip


def test_gpt2_without_prefix_and_with_its_mask_buffers_is_the_same_model(tmp_path):
    def as_on_the_hub(tensors):
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        triangle = np.tril(np.ones((1, 1, 48, 48), np.uint8))
        buffers = {f"h.{i}.attn.bias": triangle for i in range(2)}
        return bare | buffers | {"h.0.attn.masked_bias": np.array(-1e4, np.float32)}

    folder = rewritten(copied("gpt2", tmp_path), as_on_the_hub)
    assert_same(weights(folder), weights(GOLDEN / "gpt2"))
    aside = [line.name for line in load(folder).report.filter("ignored")]
    assert sorted(aside) == ["h.0.attn.bias", "h.0.attn.masked_bias", "h.1.attn.bias"]
    assert "ignored" in str(load(folder).report)


def test_a_tied_head_that_repeats_the_embedding_is_set_aside_and_another_refused(tmp_path):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}

    def with_head(change):
        head = lambda tensors: {"lm_head.weight": tensors["model.embed_tokens.weight"] + change}
        return lambda tensors: tensors | frequencies | head(tensors)

    folder = rewritten(copied("llama", tmp_path), with_head(0))
    assert_same(weights(folder), weights(GOLDEN / "llama"))
    assert len(load(folder).report.filter("ignored")) == 2
    rewritten(folder, with_head(1))
    with pytest.raises(CheckpointError, match="(?s)lm_head.weight differs.*tie_word_embeddings"):
        load(folder)


@pytest.mark.parametrize(
    ("body", "sight"),
    [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")],
)
def test_the_text_part_of_a_gemma_that_sees_is_the_same_model(tmp_path, body, sight):
    def as_part(tensors):
        text = {name.replace("model.", body, 1): tensor for name, tensor in tensors.items()}
        return text | {sight + "embeddings.weight": np.ones(3, np.float32)}

    folder = rewritten(copied("gemma3", tmp_path), as_part)
    whole = {
        "model_type": "gemma3", "text_config": config_of("gemma3"), "vision_config": {},
        "eos_token_id": [1, 9],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    loaded = load(folder)
    assert loaded.config == load(GOLDEN / "gemma3").config
    assert loaded.token_ids == TokenIds(bos=2, eos=(1, 9), pad=0)
    assert [line.how for line in loaded.report.filter("ignored")] == ["only text is loaded"]
    assert_same(weights(folder), weights(GOLDEN / "gemma3"))


def test_a_sparse_text_config_means_what_transformers_assumes():
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    config = read_config({"model_type": "gemma3", "text_config": text}).config
    assert (config.q_heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context, config.is_tied) == (262208, 131072, True)
    assert config.layer_kinds == ((0,) * 5 + (1,)) * 5 + (0,) * 4
    near, far = config.kinds
    assert (near.window, near.rope.base, near.rope.scaling) == (1024, 1e4, None)
    assert (far.window, far.rope.base, far.rope.scaling) == (None, 1e6, LinearScaling(factor=8))
    assert config.query_scale == 256**-0.5


def test_keys_of_older_files_mean_what_transformers_assumes():
    smollm = config_of("llama") | {"rope_interleaved": False, "rope_scaling": None}
    del smollm["rope_parameters"], smollm["head_dim"], smollm["num_key_value_heads"]
    config = read_config(smollm | {"rope_theta": 100000}).config
    assert (config.kinds[0].rope.base, config.head_dim, config.kv_heads) == (1e5, 8, 6)
    mistral = {key: value for key, value in config_of("mistral").items() if key != "sliding_window"}
    assert read_config(mistral).config.kinds[0].window == 4096
    assert read_config(mistral | {"sliding_window": None}).config.kinds[0].window is None
    unused = config_of("qwen2") | {"sliding_window": 32768, "layer_types": None}
    assert read_config(unused).config.kinds[0].window is None
    long = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yarn = read_config(unused | {"rope_parameters": None, "rope_scaling": long}).config
    assert yarn.kinds[0].rope.scaling == YarnScaling(
        factor=4, original_context=32, attention_factor=1 + 0.1 * np.log(4)
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_files_of_any_float_dtype_are_read(tmp_path, dtype):
    cast = lambda tensors: {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    found = weights(rewritten(copied("gpt2", tmp_path), cast))
    for name, value in weights(GOLDEN / "gpt2").items():
        assert found[name].dtype == jnp.float32
        np.testing.assert_array_equal(found[name], np.asarray(value).astype(dtype), err_msg=name)


def test_weights_and_activations_take_the_dtypes_asked_for():
    loaded = load(GOLDEN / "llama", compute_dtype="bfloat16", param_dtype=jnp.bfloat16)
    leaves = jax.tree.leaves(nnx.state(loaded.model, nnx.Param))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert loaded.model.compute_dtype == jnp.bfloat16
    with pytest.raises(ArgumentError, match="floating-point"):
        load(GOLDEN / "llama", param_dtype="int8")
    with pytest.raises(ArgumentError, match="nonsense"):
        load(GOLDEN / "llama", compute_dtype="nonsense")


def test_a_value_that_the_dtype_cannot_hold_is_refused_by_name(tmp_path):
    def with_a_giant(tensors):
        tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 1e6)
        return tensors

    folder = rewritten(copied("qwen2", tmp_path), with_a_giant)
    with pytest.raises(CheckpointError, match="(?s)model.norm.weight.*float16.*wider param_dtype"):
        load(folder, param_dtype=jnp.float16)


def test_ids_of_special_tokens_come_along(tmp_path):
    folder = copied("llama", tmp_path, eos_token_id=[2, 5], bos_token_id=ABSENT)
    assert load(folder).token_ids == TokenIds(bos=None, eos=(2, 5), pad=None)


SHARDED = textwrap.dedent("""
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from flax import nnx
    from jax.sharding import Mesh
    from safetensors.numpy import load_file
    from xsake.errors import ArgumentError
    from xsake.model.huggingface import load

    golden, refused = sys.argv[1], []
    devices = np.array(jax.devices())
    assert devices.size == 8
    mesh = Mesh(devices.reshape(4, 2), ("data", "tensor"))
    rules = {"vocab": ("data", "tensor"), "mlp": "data", "kv_heads": "tensor", "q_heads": "tensor"}
    alone, spread = load(golden), load(golden, mesh=mesh, rules=rules)
    parts = {
        "embedding": (8, 48), "layers.attention.query": (2, 48, 3, 8),
        "layers.attention.key": (2, 48, 1, 8), "layers.mlp.down": (2, 10, 48),
        "final_norm.weight": (48,),
    }
    single = dict(nnx.to_flat_state(nnx.state(alone.model, nnx.Param)))
    for path, variable in nnx.to_flat_state(nnx.state(spread.model, nnx.Param)):
        name, value = ".".join(path), variable.get_value()
        np.testing.assert_array_equal(value, single[path].get_value())
        assert len(value.sharding.device_set) == 8, name
        if name in parts:
            shapes = {shard.data.shape for shard in value.addressable_shards}
            assert shapes == {parts[name]}, (name, shapes)
    by_default = load(golden, mesh=mesh).model.layers.mlp.up[...]
    assert by_default.sharding.shard_shape(by_default.shape) == (2, 48, 20)
    expected = load_file(golden + "/golden.safetensors")
    graph, state = nnx.split(spread.model)
    quick = {"xla_backend_optimization_level": 0}
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x), compiler_options=quick)
    logits = run(state, expected["tokens"])
    assert np.abs(logits - expected["logits"]).max() < 4e-5
    for wrong in ({"kv_heads": "data"}, {"mlp": "data", "embed": "data"}, {"mlp": "expert"},
                  {"heads": "tensor"}):
        try:
            load(golden, mesh=mesh, rules=wrong)
        except ArgumentError as error:
            refused.append(str(error))
    words = "sharded evenly", "same mesh axis", "not in the mesh", "unknown logical"
    for word, error in zip(words, refused, strict=True):
        assert word in error, error
    print("spread weights agree")
""")


def test_weights_spread_over_eight_devices_are_the_same_and_each_holds_its_slice():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, str(GOLDEN / "llama")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "spread weights agree" in run.stdout, run.stderr[-3000:]


def test_rules_without_a_mesh_are_refused():
    with pytest.raises(ArgumentError, match="XSK-102.rules-mesh"):
        load(GOLDEN / "llama", rules={"mlp": "tensor"})
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    assert load(GOLDEN / "llama", mesh=mesh).model.embedding[...].sharding.mesh == mesh
