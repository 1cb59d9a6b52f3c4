"""The rules: names of axes to mesh axes, for a decoder and its optimizer, and every refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from tests.distributed.devices import run_on_eight_devices
from xsake.distributed.mesh import MeshShape, make_mesh
from xsake.distributed.rules import (
    DEFAULT_RULES,
    NamedShape,
    batch_sharding,
    named_shapes,
    sharding_of,
    shardings_by_path,
    shardings_of,
)
from xsake.errors import ArgumentError
from xsake.model import Decoder, DecoderConfig

ONE = make_mesh(MeshShape(), jax.devices()[:1])


def decoder(**changes):
    return nnx.eval_shape(lambda: Decoder(DecoderConfig.tiny(**changes), rngs=nnx.Rngs(0)))


def test_every_parameter_of_a_decoder_has_rules_for_its_axes():
    everything = {
        "has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True, "has_qk_norm": True,
        "has_post_norms": True, "has_learned_positions": True, "is_tied": False, "norm": "layer",
    }  # fmt: skip
    state = nnx.state(decoder(**everything), nnx.Param)
    found = named_shapes(state)
    assert len(found) == len(jax.tree.leaves(state))
    specs = {path: tuple(x.spec) for path, x in shardings_by_path(found, ONE).items()}
    assert specs["embedding"] == ("tensor", "fsdp")
    assert specs["layers.attention.query"] == (None, "fsdp", "tensor", None)
    assert specs["layers.attention.out"] == (None, "tensor", None, "fsdp")
    assert specs["layers.mlp.down"] == (None, "tensor", "fsdp")
    assert specs["layers.attention.query_norm.weight"] == (None, None)


def test_an_optimizer_lies_like_the_parameters_it_keeps_numbers_for():
    state = nnx.state(Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0)), nnx.Param)
    whole = {"parameters": state, "optimizer": optax.adamw(1e-3).init(state), "step": jnp.int32(0)}
    found = shardings_of(whole, ONE)
    moments = found["optimizer"][0]
    assert moments.mu["layers"]["mlp"]["up"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert moments.count.spec == found["step"].spec == PartitionSpec()
    placed = jax.device_put(whole, found)
    np.testing.assert_array_equal(
        placed["parameters"]["embedding"][...], whole["parameters"]["embedding"][...]
    )


def test_arrays_with_axes_but_no_names_are_refused_until_a_rule_is_given():
    tree = {"guard": {"losses": jnp.zeros(8)}}
    with pytest.raises(ArgumentError, match="guard.losses has axes without names"):
        shardings_of(tree, ONE)
    found = shardings_of(tree, ONE, unnamed=PartitionSpec())
    assert found["guard"]["losses"].spec == PartitionSpec()
    with pytest.raises(ArgumentError, match="weight is a variable whose axes have no names"):
        shardings_of({"weight": nnx.Param(jnp.zeros(8))}, ONE)


def test_a_batch_is_split_by_rows_and_activations_by_tokens_too():
    assert tuple(batch_sharding(ONE).spec) == (("data", "fsdp"),)
    names = ("batch", "tokens")
    assert tuple(batch_sharding(ONE, names).spec) == (("data", "fsdp"), "context")


@pytest.mark.parametrize(
    ("names", "shape", "rules", "words"),
    [
        (("experts",), (4,), DEFAULT_RULES, "no rule for the axis 'experts' of layers.up"),
        (("mlp",), (4, 4), DEFAULT_RULES, "another number of axes"),
        (("mlp", "q_heads"), (4, 4), DEFAULT_RULES, "layers.up would take the same mesh axis"),
        (("mlp",), (4,), {"mlp": "expert"}, "names an axis that the mesh lacks"),
    ],
)
def test_what_rules_cannot_say_is_refused_by_name(names, shape, rules, words):
    with pytest.raises(ArgumentError, match=words):
        sharding_of(NamedShape("layers.up", names, shape), ONE, rules)


ON_EIGHT = """
    import pytest
    from flax import nnx
    from xsake.distributed import DEFAULT_RULES, MeshShape, NamedShape, make_mesh
    from xsake.distributed import batch_sharding, sharding_of, shardings_of
    from xsake.errors import ArgumentError
    from xsake.model import Decoder, DecoderConfig

    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    state = nnx.state(Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0)), nnx.Param)
    spread = jax.device_put(state, shardings_of(state, mesh))
    shape_of = lambda x: x[...].addressable_shards[0].data.shape
    assert shape_of(spread["embedding"]) == (48, 24)
    assert shape_of(spread["layers"]["attention"]["key"]) == (3, 24, 1, 8)
    assert shape_of(spread["final_norm"]["weight"]) == (24,)
    tokens = jax.device_put(jnp.zeros((8, 33), jnp.int32), batch_sharding(mesh))
    assert tokens.addressable_shards[0].data.shape == (2, 33)

    wide = make_mesh(MeshShape(tensor=8))
    with pytest.raises(ArgumentError, match="'kv_heads' of layers.attention.key cannot") as e:
        shardings_of(state, wide)
    assert "2 over 8 devices (tensor)" in str(e.value), e.value
    kept = {**DEFAULT_RULES, "kv_heads": None, "q_heads": None}
    found = shardings_of(state, wide, kept)
    assert tuple(found["layers"]["attention"]["key"].spec) == (None, "fsdp", None, None)
    print("rules hold on eight devices")
"""


def test_parameters_spread_over_eight_devices_by_the_rules():
    run_on_eight_devices(ON_EIGHT, "rules hold on eight devices")
