"""`attention_fn` inside flax layers: the same as flax where semantics agree, an error elsewhere."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import xsake
from tests.attention.dense import attend, draw
from xsake.attention.adapters.flax import attention_fn
from xsake.attention.types import AttentionArgs
from xsake.attention.validation import convert_booleans
from xsake.errors import ShapeError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.masks import Causal, Explicit

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 20, 16)), jnp.float32)
TRIL = np.tril(np.ones((20, 20), bool))


def nnx_layer(fn=None, **settings):
    """The same parameters every time; flax's own attention if `fn` is None."""
    own = {} if fn is None else {"attention_fn": fn}
    settings = {"decode": False, **settings}
    return nnx.MultiHeadAttention(num_heads=2, in_features=16, rngs=nnx.Rngs(0), **own, **settings)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_nnx_layers_agree_with_flax(arguments):
    if not arguments.keys() <= inspect.signature(nnx.MultiHeadAttention.__call__).parameters.keys():
        pytest.skip("layers of this flax, 0.12.6 or older, have no is_causal")
    theirs = nnx_layer()(X, **arguments)
    ours = nnx_layer(attention_fn())(X, **arguments)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_linen_layers_agree_with_flax_under_a_traced_mask():
    theirs = linen.MultiHeadDotProductAttention(num_heads=2)
    ours = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn())
    parameters = theirs.init(jax.random.key(0), X)
    mask = linen.combine_masks(linen.make_causal_mask(X[..., 0]), X[:, None, None, :, 0] < 1)
    run = lambda layer: jax.jit(lambda x, mask: layer.apply(parameters, x, mask=mask))
    sees = np.asarray(mask).any(-1).all(1)  # flax averages where nothing is visible
    assert sees.sum() > 30
    got, expected = run(ours)(X, mask), run(theirs)(X, mask)
    np.testing.assert_allclose(got[sees], expected[sees], atol=1e-6)


def test_cached_decoding_step_by_step_equals_the_whole():
    layer = nnx_layer(attention_fn(), decode=True)
    layer.init_cache((2, 20, 16))
    whole = nnx_layer()(X, mask=jnp.asarray(TRIL)[None, None])

    @nnx.jit
    def step(layer, x):
        return layer(x)

    for i in range(3):
        np.testing.assert_allclose(step(layer, X[:, i : i + 1])[:, 0], whole[:, i], atol=1e-6)


def test_a_rule_without_a_position_to_apply_it_at_is_refused():
    layer = nnx_layer(attention_fn(mask=Causal()), decode=True)
    layer.init_cache((2, 20, 16))
    with pytest.raises(UnsupportedError, match="XSK-401.flax-decode-position"):
        layer(X[:, :1])


@pytest.mark.parametrize(
    ("shape", "jit"),
    [
        ((1, 2, 20, 20), False),
        ((2, 1, 20, 20), False),
        ((2, 1, 20, 20), True),
        ((2, 1, 1, 20), True),
    ],
)
def test_boolean_masks_are_honoured_known_or_traced(shape, jit):
    q, k, v = draw(batch=2, q_tokens=20)
    mask = np.random.default_rng(1).random(shape) < 0.5
    run = lambda mask: attention_fn()(q, k, v, mask=mask)
    got = (jax.jit(run) if jit else run)(mask)
    np.testing.assert_allclose(got, attend(q, k, v, mask), atol=3e-6)


def test_a_known_mask_skips_blocks_and_a_padding_mask_does_so_while_traced():
    convert = lambda mask, **more: convert_booleans(
        AttentionArgs(mask=mask, **more), (2, 2, 20, 20), (8, 8)
    )
    same = np.broadcast_to(TRIL, (2, 1, 20, 20))
    assert convert(same) == AttentionArgs(mask=Explicit(TRIL))
    padding = convert(jax.ShapeDtypeStruct((2, 1, 1, 20), bool), softcap=5.0)
    assert padding.kv_segment_ids.shape == (2, 20) and padding.bias is None
    with pytest.raises(UnsupportedError, match="XSK-401.softcap-with-booleans"):
        convert(jax.ShapeDtypeStruct((2, 1, 20, 20), bool), softcap=5.0)
    with pytest.raises(ShapeError, match="XSK-101.boolean-mask-shape"):
        convert(np.ones((3, 1, 20, 20), bool))


def test_more_or_fewer_batch_axes_and_a_bias():
    q, k, v = draw(batch=4, q_tokens=20)
    bias = np.random.default_rng(2).normal(size=(2, 2, 1, 20, 20)).astype(np.float32)
    mask = np.random.default_rng(3).random((1, 2, 1, 1, 20)) < 0.7
    split = lambda x: x.reshape(2, 2, *x.shape[1:])
    ours = attention_fn()(*(split(x) for x in (q, k, v)), bias=bias, mask=mask)
    flat = np.broadcast_to(mask, (2, 2, 1, 1, 20)).reshape(4, 1, 1, 20)
    expected = attend(q, k, v, flat, bias.reshape(4, 1, 20, 20))
    np.testing.assert_allclose(ours, split(expected), atol=3e-6)
    alone = attention_fn(mask=Causal())(q[0], k[0], v[0])
    np.testing.assert_allclose(alone, attend(q[:1], k[:1], v[:1], TRIL)[0], atol=3e-6)


def test_dtype_layout_softcap_and_operator_reach_attention():
    q, k, v = draw(q_tokens=20)
    layout = BlockLayout.from_mask(Causal(), q_tokens=20, block_q=8, block_kv=8)
    operator = xsake.BlockSparseAttention(scale=0.2, implementation="reference")
    ours = attention_fn(layout=layout, softcap=2.0, operator=operator)(
        q, k, v, dtype=jnp.bfloat16, precision="highest", deterministic=True, dropout_rate=0.1
    )
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    expected = xsake.attention(
        *low, layout=layout, softcap=2.0, scale=0.2, implementation="reference"
    )
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"dropout_rate": 0.1, "deterministic": False}, "attention dropout"),
        ({"module": nnx.Module()}, "sown attention weights"),
        ({"precision": "BF16_BF16_F32"}, "precision"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum"),
        ({"input_positions": np.arange(20)}, "input_positions"),
    ],
)
def test_unsupported_arguments_raise(call, message):
    with pytest.raises(UnsupportedError, match=message):
        attention_fn()(*draw(q_tokens=20), **call)


def test_an_unknown_argument_raises():
    with pytest.raises(TypeError, match="novelty"):
        attention_fn()(*draw(q_tokens=20), novelty=1)
