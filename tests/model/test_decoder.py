"""What the decoder promises beyond the goldens: attention is a value, layers scan, dtypes hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xsake
from xsake.errors import ArgumentError
from xsake.masks import Causal, Sinks, Window
from xsake.model import (
    Decoder,
    DecoderConfig,
    DenseAttention,
    LayerKind,
    LayoutAttention,
    MaskedAttention,
    Rope,
)
from xsake.model.attend import LayerCall
from xsake.model.layers import cos_sin_tables, rotate

CONFIG = DecoderConfig.tiny()
TOKENS = jax.random.randint(jax.random.key(1), (2, 50), 0, CONFIG.vocab_size)
LOGICAL = {
    "vocab", "position", "embed", "layer", "q_heads", "kv_heads", "head_dim", "mlp"
}  # fmt: skip


# The boring implementation compiles fastest, and which one runs is not what is tested here.
OPERATOR = xsake.BlockSparseAttention(implementation="reference")


def decoder(config=CONFIG, **options) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0), **options)


def logits(model, attend=DenseAttention(OPERATOR)):  # noqa: B008 (frozen)
    return nnx.jit(lambda model, tokens: model(tokens, attend=attend))(model, TOKENS)


def largest(x) -> float:
    assert np.isfinite(x).all()
    return float(np.abs(x).max())


def windowed(window: int | None) -> DecoderConfig:
    return CONFIG.model_copy(update={"kinds": (LayerKind(window=window, rope=Rope()),)})


def test_a_mask_as_attention_is_the_same_as_the_mask_in_the_model():
    own = logits(decoder(windowed(9)))
    given = logits(decoder(), attend=MaskedAttention(Window(left=8, right=0), OPERATOR))
    assert largest(own - given) < 1e-5
    assert largest(own - logits(decoder())) > 1e-2, "the window changes nothing here"


def test_the_models_own_rule_holds_whatever_mask_is_given():
    model = decoder(windowed(9))
    wide = MaskedAttention(Window(left=40, right=40) | Sinks(2), OPERATOR)
    assert largest(logits(model, attend=wide) - logits(model)) < 1e-5


@pytest.mark.slow  # quicker: layers of one kind
def test_one_layout_for_all_layers_is_scanned_and_one_each_is_unrolled():
    sizes = {"q_tokens": 50, "block_q": 16, "block_kv": 16}
    layouts = [
        xsake.BlockLayout.from_mask(Causal() & Window(left=left, right=0), **sizes)
        for left in (7, 20, 49)
    ]
    model = decoder()
    assert (
        largest(logits(model, attend=LayoutAttention(layouts[2], OPERATOR)) - logits(model)) < 1e-5
    )
    same = LayoutAttention((layouts[2],) * 3, OPERATOR)
    assert largest(logits(model, attend=same) - logits(model)) < 1e-5

    def by_hand(q, k, v, call: LayerCall):
        return OPERATOR(q, k, v, layout=layouts[call.layer])

    by_hand.needs_layer_number = True
    found = logits(model, attend=LayoutAttention(tuple(layouts), OPERATOR))
    assert largest(found - logits(model, attend=by_hand)) < 1e-5
    assert largest(found - logits(model)) > 1e-2, "the layouts skip nothing that matters"


def test_too_few_layouts_are_refused_by_name():
    layout = xsake.BlockLayout.from_mask(Causal(), q_tokens=50)
    with pytest.raises(xsake.XsakeError, match="2 layouts, layer 2"):
        logits(decoder(), attend=LayoutAttention((layout, layout), OPERATOR))


def test_any_function_can_be_the_attention():
    def plain(q, k, v, call: LayerCall):
        return jax.nn.dot_product_attention(q, k, v, scale=call.scale, is_causal=True)

    model = decoder()
    assert largest(logits(model, attend=plain) - logits(model, attend=DenseAttention())) < 1e-5


@pytest.mark.slow  # quicker: layers of one kind
def test_layers_of_two_kinds_scan_like_they_unroll():
    kinds = (LayerKind(window=6, rope=Rope(base=100.0)), LayerKind(rope=Rope()))
    config = CONFIG.model_copy(update={"kinds": kinds, "kind_of_layer": (0, 1, 0)})
    model = decoder(config)

    @dataclasses.dataclass(frozen=True)
    class Unrolled(DenseAttention):
        needs_layer_number: bool = True

    assert largest(logits(model, attend=Unrolled(OPERATOR)) - logits(model)) < 1e-5
    others = CONFIG.model_copy(update={"kinds": kinds, "kind_of_layer": (1, 1, 0)})
    assert largest(logits(decoder(others)) - logits(model)) > 1e-2


def test_a_layer_without_rope_rotates_nothing_next_to_one_that_does():
    x = jnp.arange(2 * 3 * 4, dtype=jnp.float32).reshape(1, 2, 3, 4)
    without, with_rope = cos_sin_tables((None, Rope()), 4, jnp.asarray([[0, 5]]))
    np.testing.assert_array_equal(rotate(x, without), x)
    np.testing.assert_array_equal(rotate(x, with_rope)[:, 0], x[:, 0])  # position 0
    assert largest(rotate(x, with_rope)[:, 1] - x[:, 1]) > 0.1


def test_packed_documents_do_not_see_each_other():
    model = decoder()
    first, second = TOKENS[:1, :20], TOKENS[1:, :30]
    packed = jnp.concatenate([first, second], axis=1)
    ids = jnp.asarray([[0] * 20 + [1] * 30])
    positions = jnp.concatenate([jnp.arange(20), jnp.arange(30)])[None]
    dense = DenseAttention(OPERATOR)
    found = model(packed, attend=dense, positions=positions, segment_ids=ids)
    assert largest(found[:, :20] - model(first, attend=dense)) < 1e-5
    assert largest(found[:, 20:] - model(second, attend=dense)) < 1e-5


def loss_and_gradients(model):
    def loss(model):
        found = model(TOKENS, attend=DenseAttention(OPERATOR))
        picked = jnp.take_along_axis(found[:, :-1], TOKENS[:, 1:, None], axis=-1)
        return -jax.nn.log_softmax(picked, axis=1).mean()

    return nnx.jit(nnx.value_and_grad(loss))(model)


@pytest.mark.slow  # quicker: layers of one kind
def test_rematerialised_layers_give_the_same_gradients():
    kept = loss_and_gradients(decoder())
    again = loss_and_gradients(decoder(remat=True))
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        assert largest(one - other) <= 1e-6 * max(1.0, largest(one))
    assert all(largest(leaf) > 0 for leaf in jax.tree.leaves(kept[1])), "a parameter is not used"


def test_bfloat16_computes_on_float32_parameters():
    model = decoder(compute_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    assert model.hidden(TOKENS, attend=DenseAttention(OPERATOR)).dtype == jnp.bfloat16
    found = logits(model)
    assert found.dtype == jnp.float32
    exact = logits(decoder())
    assert 0 < largest(found - exact) < 0.1 * largest(exact)
    _, gradients = loss_and_gradients(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


EVERYTHING = {
    "norm": "layer", "has_learned_positions": True, "has_qk_norm": True, "has_post_norms": True,
    "has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True, "is_tied": False,
}  # fmt: skip


def test_every_axis_of_every_parameter_has_a_logical_name():
    model = decoder(DecoderConfig.tiny(**EVERYTHING))
    params = nnx.to_flat_state(nnx.state(model))
    assert len(params) >= 20
    for path, param in params:
        names = param.get_metadata("out_sharding")
        assert len(names) == param[...].ndim, path
        assert set(names) <= LOGICAL, path
        assert (names[0] == "layer") == (path[0] == "layers"), path


def test_an_abstract_decoder_costs_no_memory():
    huge = DecoderConfig.tiny(vocab_size=2**17, width=2**13, mlp_width=2**15, layers=80)
    model = nnx.eval_shape(lambda: Decoder(huge, rngs=nnx.Rngs(0)))
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model))]
    assert sum(sizes) > 5e10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_heads": 4}, "q_heads"),
        ({"kinds": ()}, "kinds must not be empty"),
        ({"kind_of_layer": (0, 0)}, "layers=3"),
        ({"kind_of_layer": (0, 0, 1)}, "beyond the 1"),
        ({"head_dim": 7}, "even"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        DecoderConfig.tiny(**change)


def test_tokens_and_positions_that_the_tables_lack_are_refused():
    config = CONFIG.model_copy(update={"has_learned_positions": True, "context": 64})
    model, context = Decoder(config, rngs=nnx.Rngs(0)), config.context
    known = jnp.zeros((1, 3), jnp.int32)
    for bad in (-1, config.vocab_size):
        with pytest.raises(ArgumentError, match="token ids are outside the vocabulary"):
            model(known.at[0, 1].set(bad))
        run = nnx.jit(lambda model, tokens: model(tokens, attend=DenseAttention(OPERATOR)))
        found = run(model, known.at[0, 1].set(bad))
        assert np.isnan(found[0, 1]).all() and np.isfinite(found[0, 0]).all()
    long = jnp.zeros((1, context + 1), jnp.int32)
    with pytest.raises(ArgumentError, match="positions are outside the learned positions"):
        nnx.eval_shape(lambda model: model(long), model)
    with pytest.raises(ArgumentError, match="positions are outside the learned positions"):
        model(known, positions=jnp.array([[0, 1, context]]))
