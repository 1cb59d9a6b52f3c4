"""Attention with a block indexer against its definition in float64, and what it must not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import xsake
from tests import processes
from xsake import indexed
from xsake.errors import ArgumentError, ShapeError, UnsupportedError
from xsake.masks import Causal

CONFIG = indexed.Config(size=8, count=3)


def arrays(tokens=45, q_heads=6, kv_heads=2, *, batch=1, index_heads=None, dtype=np.float32):
    """q, k, v, index queries, index keys."""
    rng = np.random.default_rng(0)
    draw = lambda heads, dim: jnp.asarray(rng.normal(size=(batch, tokens, heads, dim)), dtype)
    index_heads = kv_heads if index_heads is None else index_heads
    return draw(q_heads, 8), draw(kv_heads, 8), draw(kv_heads, 12), draw(index_heads, 4), draw(1, 4)


def definition(q, k, v, blocks, size):
    """Dense attention over the pairs of the lists, in the dtype of q."""
    tokens, group = k.shape[1], q.shape[2] // k.shape[2]
    key = np.arange(tokens)
    seen = (np.asarray(blocks)[..., None, :] == (key // size)[:, None]).any(-1)
    seen = seen & (key <= np.arange(tokens)[:, None])[None, :, None]
    seen = np.repeat(np.moveaxis(seen, 2, 1), group, axis=1)
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("tokens", [1, 20, 45])
def test_outputs_and_gradients_are_those_of_the_definition_in_float64(group, tokens):
    with jax.enable_x64(True):
        *qkv, index_q, index_k = arrays(tokens, 2 * group, 2, dtype=np.float64)
        run = jax.jit(
            lambda *x: indexed.attention(
                *x, index_q, index_k, config=CONFIG, return_blocks=True, implementation="xla"
            )
        )
        out, blocks = run(*qkv)
        expected = definition(*qkv, blocks, CONFIG.size)
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
        weight = np.random.default_rng(1).normal(size=out.shape)
        gradients = jax.jit(jax.grad(lambda *x: (run(*x)[0] * weight).sum(), (0, 1, 2)))(*qkv)
        wanted = jax.grad(
            lambda *x: (definition(*x, blocks, CONFIG.size) * weight).sum(), (0, 1, 2)
        )(*qkv)
        for found, right in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-10)


def test_all_blocks_are_dense_attention():
    q, k, v, *index = arrays()
    config = indexed.Config(size=8, count=6)
    found = indexed.attention(q, k, v, *index, config=config)
    np.testing.assert_allclose(found, xsake.attention(q, k, v, mask=Causal()), atol=2e-6)


@pytest.mark.parametrize("config", [CONFIG, indexed.Config(8, 3, 1, 1, "mean")])
def test_no_result_depends_on_later_tokens(config):
    before = arrays(batch=2)
    after = [x.at[:, 30:].set(x[:, 30:] * -3 + 1) for x in before]
    one, other = (indexed.attention(*x, config=config) for x in (before, after))
    np.testing.assert_array_equal(one[:, :30], other[:, :30])
    assert (one[:, 30:] != other[:, 30:]).any()


def test_equal_scores_select_the_earlier_blocks():
    q, k, v, index_q, index_k = arrays()
    *_, blocks = indexed.attention(
        q, k, v, index_q, jnp.ones_like(index_k), config=CONFIG, return_blocks=True
    )
    assert {tuple(map(int, x)) for x in np.asarray(blocks)[0, 40:].reshape(-1, 3)} == {(5, 0, 1)}


def test_shared_lists_add_index_heads_with_weights():
    q, k, v, index_q, index_k = arrays(index_heads=5)
    weights = jnp.asarray(np.random.default_rng(2).random((1, 45, 5)), jnp.float32)
    config = indexed.Config(size=8, count=3, has_relu=True, is_shared=True)
    out, blocks = indexed.attention(
        q, k, v, index_q, index_k, index_weights=weights, config=config, return_blocks=True
    )
    assert (blocks[:, :, 0] == blocks[:, :, 1]).all()
    s = jnp.maximum(jnp.einsum("bthd,bsxd->bths", index_q, index_k), 0) * weights[..., None]
    s = np.asarray(s.sum(2))[0, 44]
    best = max(range(5), key=lambda block: s[block * 8 : block * 8 + 8].max())
    assert int(blocks[0, 44, 0, 1]) == best
    np.testing.assert_allclose(out, definition(q, k, v, blocks, 8), atol=3e-6)


def test_moba_selects_by_means_of_keys():
    q, k, v, *_ = arrays()
    config = indexed.Config(size=8, count=2, pooling="mean")
    index = indexed.moba_index(q, k)
    *_, blocks = indexed.attention(q, k, v, *index, config=config, return_blocks=True)
    means = np.asarray(k)[0, :40].reshape(5, 8, 2, 8).mean(1)
    scores = np.einsum("ghd,sgd->gs", np.asarray(q)[0, 44].reshape(2, 3, 8), means)
    np.testing.assert_array_equal(blocks[0, 44, :, 1], scores.argmax(1))


@pytest.mark.parametrize("lengths", [(13, 20, 9), (1, 40), (42,)])
def test_packed_sequences_are_those_alone(lengths):
    tokens = sum(lengths) + 3  # some belong to no sequence
    x = arrays(tokens)
    ends = np.cumsum([0, *lengths])
    out, blocks = indexed.attention(*x, config=CONFIG, cu_seqlens=ends, return_blocks=True)
    for begin, end in zip(ends, ends[1:], strict=False):
        alone = [part[:, begin:end] for part in x]
        wanted, lists = indexed.attention(*alone, config=CONFIG, return_blocks=True)
        np.testing.assert_allclose(out[:, begin:end], wanted, atol=2e-6)
        np.testing.assert_array_equal(blocks[:, begin:end], lists)
    assert not np.asarray(out[:, ends[-1] :]).any()


def test_the_last_queries_of_a_sequence_have_their_positions():
    q, k, v, index_q, index_k = arrays(batch=2)
    whole = indexed.attention(q, k, v, index_q, index_k, config=CONFIG)
    at = np.asarray([[44, 10], [7, 23]])
    pick = lambda x: jnp.take_along_axis(x, at[:, :, None, None], axis=1)
    found = indexed.attention(pick(q), k, v, pick(index_q), index_k, config=CONFIG, q_positions=at)
    np.testing.assert_allclose(found, pick(whole), atol=2e-6)


def compare_on_four_devices() -> None:
    """Compare a mesh with one device, in a process of its own."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
    for is_shared, index_key_heads in ((False, 1), (False, 2), (True, 1)):
        q, k, v, index_q, index_k = arrays(batch=2)
        x = q, k, v, index_q, jnp.repeat(index_k, index_key_heads, axis=2)
        config = indexed.Config(size=8, count=3, is_shared=is_shared)
        run = lambda *x, mesh=None, config=config: indexed.attention(
            *x, config=config, return_blocks=True, mesh=mesh
        )
        whole, spread = run(*x), jax.jit(functools.partial(run, mesh=mesh))(*x)
        np.testing.assert_allclose(spread[0], whole[0], atol=2e-6)
        np.testing.assert_array_equal(spread[1], whole[1])


def test_a_mesh_changes_nothing():
    processes.run(compare_on_four_devices, devices=4)


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        (lambda x: {"index_q": x["index_q"][:, :, :1]}, "index-shapes"),
        (lambda x: {"index_k": x["index_k"][:, :9]}, "index-shapes"),
        (lambda x: {"index_weights": x["index_q"]}, "index-shapes"),
        (lambda x: {"q": x["q"][:, :9], "index_q": x["index_q"][:, :9]}, "indexed-positions"),
        (lambda x: {"cu_seqlens": [0, 45], "q_positions": np.arange(45)}, "packed-positions"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, slug):
    x = dict(zip(("q", "k", "v", "index_q", "index_k"), arrays(), strict=True))
    with pytest.raises((ShapeError, UnsupportedError), match=slug):
        indexed.attention(**x | change(x), config=CONFIG)


@pytest.mark.parametrize(
    "sizes", [{"size": 0}, {"count": 0}, {"local": 0}, {"first": 16}, {"pooling": "median"}]
)
def test_configurations_that_mean_nothing_are_refused(sizes):
    with pytest.raises(ArgumentError, match="indexed-"):
        indexed.Config(**sizes)
