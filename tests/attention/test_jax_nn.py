"""Arguments of `jax.nn.dot_product_attention`: the same values and gradients by both functions."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.lanes import gate, slow
from xsake.masks import Window

B, T, H, K, D = 2, 70, 4, 2, 16
KEYS = jax.random.split(jax.random.key(0), 5)
Q, COTANGENT = (jax.random.normal(key, (B, T, H, D)) for key in KEYS[:2])
KEY, VALUE = (jax.random.normal(key, (B, T, K, D)) for key in KEYS[2:4])
BIAS = jax.random.normal(KEYS[4], (1, H, T, T))
# The diagonal keeps every query busy: jax.nn averages all values where no key is allowed.
DRAWN = np.random.default_rng(0).random((B, H, T, T)) < 0.3
ALLOWED = DRAWN | np.eye(T, dtype=bool)
SIZES = {"block_size": 16}


def check(ours, theirs, *arrays):
    """Compare values and gradients of two functions of arrays."""
    results = []
    for function in (ours, theirs):
        out, pull = jax.jit(lambda *x, f=function: jax.vjp(f, *x))(*arrays)
        results.append([out, *pull(COTANGENT.reshape(-1)[: out.size].reshape(out.shape))])
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)


def jax_nn(**arguments):
    return lambda *x: jax.nn.dot_product_attention(*x[:3], *x[3:4], **arguments)


SHAPES = [(T, T), (H, T, T), (B, 1, T, T), (B, H, T, T), (B, 1, 1, T), (1, 1, 1, T)]


@pytest.mark.parametrize(
    ("shape", "traced"),
    [
        (SHAPES[0], True),
        *(slow(shape, False) for shape in SHAPES),
        *(slow(SHAPES[n], True) for n in (3, 4)),
    ],
    ids=str,
)
def test_a_boolean_array_of_any_shape(shape, traced):
    mask = jnp.asarray(ALLOWED[tuple(slice(0, n) for n in (1,) * (4 - len(shape)) + shape)])
    mask = mask.reshape(shape).at[..., 0].set(True)
    full = mask.reshape((1,) * (4 - len(shape)) + shape)
    if traced:  # the mask is an argument of the compiled function
        ours = lambda q, k, v: jax.jit(
            lambda q, k, v, m: xsake.attention(q, k, v, mask=m, **SIZES)
        )(q, k, v, mask)
    else:
        ours = lambda q, k, v: xsake.attention(q, k, v, mask=mask, **SIZES)
    check(ours, jax_nn(mask=full), Q, KEY, VALUE)


# Further down, `xsake.dot_product_attention` calls with the arguments that have the same names.
CAUSAL_WINDOW = {"is_causal": True, "local_window_size": (20, 0)}
CAUSAL_BOOLEANS = {"mask": ALLOWED[:, :1], "is_causal": True}
ARGUMENTS = {
    "causal window": ({"is_causal": True, "window": (20, 0)}, CAUSAL_WINDOW),
    "expression": ({"mask": "causal & window(20, 0)"}, CAUSAL_WINDOW),
    "mask and causal": ({"mask": Window(20, None), "is_causal": True}, CAUSAL_WINDOW),
    "booleans and causal": (CAUSAL_BOOLEANS, CAUSAL_BOOLEANS),
}


@pytest.mark.parametrize("name", gate(["causal window", "expression"], ARGUMENTS))
def test_arguments_that_both_have(name):
    ours, theirs = ARGUMENTS[name]
    check(lambda *x: xsake.attention(*x, **SIZES, **ours), jax_nn(**theirs), Q, KEY, VALUE)


def test_booleans_with_a_bias_that_is_learned():
    mask = jnp.asarray(ALLOWED[:, :1])
    ours = lambda q, k, v, bias: xsake.attention(q, k, v, bias=bias, mask=mask, **SIZES)
    theirs = lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias, mask)
    check(ours, theirs, Q, KEY, VALUE, BIAS)


@pytest.mark.parametrize("shape", [(1, 1, 1, T), (H, T, 1), (B, 1, T, T)])
def test_a_bias_that_broadcasts(shape):
    bias = jax.random.normal(KEYS[4], shape)
    ours = lambda q, k, v, bias: xsake.attention(q, k, v, bias=bias, is_causal=True)
    theirs = lambda q, k, v, bias: jax.nn.dot_product_attention(
        q, k, v, bias.reshape((1,) * (4 - bias.ndim) + bias.shape), is_causal=True
    )
    check(ours, theirs, Q, KEY, VALUE, bias)


def test_a_traced_scale_and_its_gradient():
    ours = lambda q, k, v, scale: xsake.attention(q, k, v, is_causal=True, scale=scale)
    theirs = lambda q, k, v, scale: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, scale=scale
    )
    check(jax.jit(ours), jax.jit(theirs), Q, KEY, VALUE, jnp.float32(0.3))


def test_arrays_without_a_batch():
    arrays = Q[0], KEY[0], VALUE[0]
    check(lambda *x: xsake.attention(*x, is_causal=True), jax_nn(is_causal=True), *arrays)
    ids = jnp.arange(T) // 30
    out, lse = xsake.attention(*arrays, q_segment_ids=ids, return_lse=True)
    whole = xsake.attention(Q[:1], KEY[:1], VALUE[:1], q_segment_ids=ids[None], return_lse=True)
    np.testing.assert_array_equal(out, whole[0][0])
    np.testing.assert_array_equal(lse, whole[1][0])
    assert xsake.explain(*arrays, is_causal=True).arrays["q"] == f"float32[1, {T}, {H}, {D}]"


def test_booleans_on_keys_join_segment_ids():
    ids, keys = np.repeat([[0, 1], [0, 0]], T // 2, axis=1), np.arange(T) % 3 > 0
    ours = xsake.attention(Q, KEY, VALUE, mask=keys, q_segment_ids=ids, **SIZES)
    same = (ids[:, :, None] == ids[:, None])[:, None] & keys
    np.testing.assert_allclose(
        ours, jax.nn.dot_product_attention(Q, KEY, VALUE, mask=jnp.asarray(same)), atol=2e-5
    )
    with pytest.raises(xsake.XsakeError, match="XSK-102.segment-ids-pair"):
        xsake.attention(Q[:, :9], KEY, VALUE, mask=keys, q_segment_ids=ids[:, :9])


def test_a_bias_is_checked_before_booleans_join_it():
    mask = jnp.asarray(ALLOWED[:, :1])
    for wrong in (np.zeros((1, 1, T, T), int), np.zeros((3, 1, T, T), np.float32)):
        with pytest.raises(xsake.XsakeError, match="XSK-101.bias-shape"):
            xsake.attention(Q, KEY, VALUE, mask=mask, bias=wrong)


def test_booleans_do_not_move_with_positions():
    at = {"q_positions": jnp.arange(T)[::-1], "kv_positions": jnp.arange(T)[::-1]}
    mask = ALLOWED[0, 0]
    expected = xsake.attention(Q, KEY, VALUE, mask=mask)
    np.testing.assert_allclose(xsake.attention(Q, KEY, VALUE, mask=mask, **at), expected, atol=1e-5)


def test_booleans_skip_blocks_and_explain_says_so():
    mask = np.zeros((B, 1, T, T), bool)
    mask[:, :, :, 48:64] = True
    mask[1, :, :16] = False
    report = xsake.explain(Q, KEY, VALUE, mask=mask, block_size=16)
    assert report.blocks.listed == H * (5 + 4) and report.blocks.visible == B * H * 25
    same = xsake.explain(Q, KEY, VALUE, mask=mask[0], block_size=16)
    assert same.is_static and same.blocks.listed == B * H * 5 and "Explicit" in same.mask
    seen = []
    jax.eval_shape(lambda m: seen.append(xsake.explain(Q, KEY, VALUE, mask=m)), mask)
    assert not seen[0].is_counted and not seen[0].is_static


def test_explain_shows_a_traced_scale():
    seen = []
    jax.eval_shape(lambda s: seen.append(xsake.explain(Q, KEY, VALUE, scale=s)), jnp.float32(1))
    assert seen[0].scale is None and "scale traced" in str(seen[0])


class TestDotProductAttention:
    """`xsake.dot_product_attention`: only the import changes."""

    def test_the_signature_is_that_of_jax_nn(self):
        ours, theirs = map(
            inspect.signature, (xsake.dot_product_attention, jax.nn.dot_product_attention)
        )
        both = [
            [(x.name, x.kind, x.default) for x in each.parameters.values()]
            for each in (ours, theirs)
        ]
        assert both[0] == both[1]

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"is_causal": True},
            {"mask": jnp.asarray(ALLOWED[:1])},
            {"bias": BIAS, "scale": 0.5},
            {"local_window_size": (5, 9)},
            {"local_window_size": 5, "is_causal": True},
            {"implementation": "xla"},
        ],
        ids=str,
    )
    def test_values_and_gradients(self, arguments):
        bind = lambda f: lambda *x: f(*x, **arguments)
        check(bind(xsake.dot_product_attention), bind(jax.nn.dot_product_attention), Q, KEY, VALUE)

    @pytest.mark.parametrize("which", ["query", "key_value", "both"])
    def test_lengths_of_sequences(self, which):
        lengths = {
            "query_seq_lengths": jnp.array([50, 70], jnp.int32),
            "key_value_seq_lengths": jnp.array([33, 60], jnp.int32),
        }
        given = {
            name: x for name, x in lengths.items() if which == "both" or name.startswith(which)
        }
        bind = lambda f: lambda *x: f(*x, **given)
        check(bind(xsake.dot_product_attention), bind(jax.nn.dot_product_attention), Q, KEY, VALUE)

    def test_the_residual_and_arrays_without_a_batch(self):
        for arrays in ((Q, KEY, VALUE), (Q[0], KEY[0], VALUE[0])):
            both = [
                f(*arrays, is_causal=True, return_residual=True)
                for f in (xsake.dot_product_attention, jax.nn.dot_product_attention)
            ]
            for one, other in zip(*both, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)

    def test_cudnn_is_refused(self):
        with pytest.raises(xsake.XsakeError, match="XSK-102.implementation-name"):
            xsake.dot_product_attention(Q, KEY, VALUE, implementation="cudnn")
