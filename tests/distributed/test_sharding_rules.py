"""The rules: names of axes to mesh axes, for a decoder and its optimizer, and every refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from tests.distributed.devices import machines
from xsake.distributed.mesh import MeshShape, make_mesh
from xsake.distributed.sharding_rules import (
    DEFAULT_RULES,
    NamedShape,
    batch_sharding,
    logical_sharding,
    tree_shardings,
)
from xsake.errors import ArgumentError
from xsake.model import Decoder, DecoderConfig

ONE = make_mesh(MeshShape(), jax.devices()[:1])


def decoder(**changes):
    return nnx.eval_shape(lambda: Decoder(DecoderConfig.tiny(**changes), rngs=nnx.Rngs(0)))


def test_every_parameter_of_a_decoder_has_rules_for_its_axes():
    everything = {
        "has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True, "has_qk_norm": True,
        "has_post_norms": True, "has_learned_positions": True, "is_tied": False, "norm": "layer"
    }  # fmt: skip
    found = tree_shardings(nnx.state(decoder(**everything), nnx.Param), ONE)
    attention, mlp = found["layers"]["attention"], found["layers"]["mlp"]
    assert found["embedding"].spec == PartitionSpec("tensor", "fsdp")
    assert attention["query"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert attention["out"].spec == PartitionSpec(None, "tensor", None, "fsdp")
    assert attention["query_norm"]["weight"].spec == PartitionSpec(None, None)
    assert mlp["down"].spec == PartitionSpec(None, "tensor", "fsdp")


def test_an_optimizer_lies_like_the_parameters_it_keeps_numbers_for():
    state = nnx.state(decoder(), nnx.Param)
    optimizer = jax.eval_shape(optax.adamw(1e-3).init, state)
    found = tree_shardings({"parameters": state, "optimizer": optimizer, "step": jnp.int32(0)}, ONE)
    moments = found["optimizer"][0]
    assert moments.mu["layers"]["mlp"]["up"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert moments.count.spec == found["step"].spec == PartitionSpec()


def test_what_comes_out_is_what_device_put_takes():
    weight = nnx.Param(jnp.ones((4, 2)), out_sharding=("embed", "mlp"), eager_sharding=False)
    state = {"weight": weight, "step": jnp.int32(3)}
    placed = jax.device_put(state, tree_shardings(state, ONE))
    np.testing.assert_array_equal(placed["weight"][...], np.ones((4, 2)))
    assert placed["weight"][...].sharding.spec == PartitionSpec("fsdp", "tensor")


def test_arrays_with_axes_but_no_names_are_refused_until_a_rule_is_given():
    tree = {"guard": {"losses": jnp.zeros(8)}}
    with pytest.raises(ArgumentError, match="guard.losses has axes without names"):
        tree_shardings(tree, ONE)
    found = tree_shardings(tree, ONE, unnamed=PartitionSpec())
    assert found["guard"]["losses"].spec == PartitionSpec()
    with pytest.raises(ArgumentError, match="weight is a variable whose axes have no names"):
        tree_shardings({"weight": nnx.Param(jnp.zeros(8))}, ONE)


def test_a_batch_is_split_by_rows_and_activations_by_tokens_too():
    assert tuple(batch_sharding(ONE).spec) == (("data", "fsdp"),)
    names = ("batch", "tokens")
    assert tuple(batch_sharding(ONE, names).spec) == (("data", "fsdp"), "context")


@pytest.mark.parametrize(
    ("names", "shape", "rules", "message"),
    [
        (("experts",), (4,), DEFAULT_RULES, "no rule for the axis 'experts' of layers.up"),
        (("mlp",), (4, 4), DEFAULT_RULES, "different number of axes"),
        (("mlp", "q_heads"), (4, 4), DEFAULT_RULES, "layers.up map to the same mesh axis"),
        (("mlp",), (4,), {"mlp": "expert"}, "names an axis that is not in the mesh"),
    ],
)
def test_invalid_rules_raise_with_the_name(names, shape, rules, message):
    with pytest.raises(ArgumentError, match=message):
        logical_sharding(NamedShape("layers.up", names, shape), ONE, rules)


def test_parameters_are_cut_over_eight_devices_or_the_refusal_says_which_cannot_be():
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=2), machines(1, 8))
    state = nnx.state(decoder(), nnx.Param)
    parts = jax.tree.map(
        lambda sharding, leaf: sharding.shard_shape(leaf.shape),
        nnx.to_pure_dict(tree_shardings(state, mesh)), nnx.to_pure_dict(state),
    )  # fmt: skip
    assert parts["embedding"] == (48, 24)
    assert parts["layers"]["attention"]["key"] == (3, 24, 1, 8)
    assert parts["final_norm"]["weight"] == (24,)
    assert batch_sharding(mesh).shard_shape((8, 33)) == (2, 33)

    wide = make_mesh(MeshShape(tensor=8), machines(1, 8))
    with pytest.raises(ArgumentError, match="'kv_heads' of layers.attention.key cannot") as error:
        tree_shardings(state, wide)
    assert "2 over 8 devices (tensor)" in str(error.value)
    kept = {**DEFAULT_RULES, "kv_heads": None, "q_heads": None}
    assert tuple(tree_shardings(state, wide, kept)["layers"]["attention"]["key"].spec) == (
        None, "fsdp", None, None
    )  # fmt: skip
