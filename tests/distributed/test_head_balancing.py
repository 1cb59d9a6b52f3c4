"""Balanced heads: a true permutation, never worse, close to the mean, and the same function."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xsake
from xsake.distributed.head_balancing import place_heads, reorder_heads
from xsake.errors import ArgumentError, UnsupportedError
from xsake.layout import BlockLayout
from xsake.masks import Causal, PerHead, Window
from xsake.model import Decoder, DecoderConfig
from xsake.model.attend import LayoutAttention

N = 64
VISIBLE = N * (N + 1) // 2


@st.composite
def plans(draw):
    """Blocks of each head under budgets from 10% to 90%, for models of usual sizes."""
    kv_heads, group, shards = draw(st.sampled_from([(8, 4, 2), (16, 1, 4), (32, 1, 4), (32, 1, 8)]))
    seed = draw(st.integers(0, 2**32 - 1))
    budget = np.random.default_rng(seed).uniform(0.1, 0.9, (3, kv_heads * group))
    return (budget * VISIBLE).astype(np.int64), kv_heads, shards


@hypothesis.given(plans())
def test_usual_plans_end_within_a_twentieth_of_the_mean(plan):
    work, kv_heads, shards = plan
    placement = place_heads(work, kv_heads=kv_heads, shards=shards)
    assert 1 <= placement.excess_after <= 1.05
    assert placement.excess_after <= placement.excess_before


@hypothesis.given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.randoms()
)
def test_a_placement_is_a_permutation_that_is_never_worse(layers, shards, each, group, random):
    kv_heads = shards * each
    work = [[random.randrange(100) for _ in range(kv_heads * group)] for _ in range(layers)]
    placement = place_heads(np.array(work), kv_heads=kv_heads, shards=shards)
    assert (np.sort(placement.kv_order, axis=1) == np.arange(kv_heads)).all()
    assert (np.sort(placement.q_order, axis=1) == np.arange(kv_heads * group)).all()
    assert (placement.q_order[:, ::group] // group == placement.kv_order).all()
    assert (placement.after.max(1) <= placement.before.max(1)).all()
    moved = reorder_heads(np.array(work), placement.q_order, axis=1)
    np.testing.assert_array_equal(
        moved.reshape(layers, shards, -1).sum(-1), placement.after.astype(int)
    )
    back = placement.inverse()
    np.testing.assert_array_equal(reorder_heads(moved, back.q_order, axis=1), work)


def test_sorted_heads_are_the_worst_order_and_end_balanced():
    work = np.sort(np.linspace(0.1, 0.9, 32))[None].repeat(2, 0) * VISIBLE
    placement = place_heads(work, kv_heads=32, shards=4)
    assert placement.excess_before > 1.5 and placement.excess_after < 1.001
    assert "2 of 2 layers differ" in str(placement)


def test_equal_heads_stay_where_they_are():
    placement = place_heads(np.ones((2, 8)), kv_heads=4, shards=2)
    assert (placement.kv_order == np.arange(4)).all() and placement.excess_after == 1
    assert place_heads(np.zeros((1, 4)), kv_heads=4, shards=2).excess_after == 1


def ragged(layers: int, heads: int, tokens: int, block: int) -> list[BlockLayout]:
    rng = np.random.default_rng(3)
    blocks = tokens // block
    share = rng.permuted(np.tile(np.linspace(0.05, 0.95, heads), (layers, 1)), axis=1)
    chosen = rng.random((layers, heads, blocks, blocks)) < share[:, :, None, None]
    chosen |= np.eye(blocks, dtype=bool)
    sizes = {"block_q": block, "block_kv": block, "mask": Causal()}
    return [BlockLayout.from_block_mask(grid, **sizes) for grid in chosen]


@pytest.mark.slow  # training/test_balanced.py has it with a plan
def test_a_placed_decoder_computes_the_same_function():
    config = DecoderConfig.tiny(layers=2, q_heads=8, kv_heads=4, has_qkv_bias=True)
    model = Decoder(config, rngs=nnx.Rngs(0))
    layouts = ragged(2, 8, 32, 8)
    work = np.stack([np.diff(x.row_starts).reshape(8, -1).sum(-1) for x in layouts])
    placement = place_heads(work, kv_heads=4, shards=2)
    assert (placement.kv_order != np.arange(4)).any()
    graph, state = nnx.split(model)

    def spread(variable):
        names = variable.get_metadata()["out_sharding"]
        return variable.replace(placement.apply(variable[...], names))

    moved = jax.tree.map(spread, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert jnp.abs(moved["layers"]["attention"]["query"][...] - model.layers.attention.query).max()
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, config.vocab_size)
    placed = tuple(placement.layout(x, i) for i, x in enumerate(layouts))
    operator = xsake.BlockSparseAttention(implementation="reference")

    def logits(state, layouts):
        run = lambda state: nnx.merge(graph, state)(
            tokens, attend=LayoutAttention(layouts, operator)
        )
        return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(state)

    expected, found = logits(state, tuple(layouts)), logits(moved, placed)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_layouts_move_with_their_heads_and_back():
    layout = ragged(1, 4, 32, 8)[0]
    placement = place_heads(np.array([[1, 9, 8, 2]]), kv_heads=4, shards=2)
    order = placement.kv_order[0]
    for one in (layout, layout.traced()):
        moved = placement.layout(one, 0)
        np.testing.assert_array_equal(moved.to_block_mask(), one.to_block_mask()[:, order])
        again = placement.inverse().layout(moved, 0)
        np.testing.assert_array_equal(again.to_block_mask(), one.to_block_mask())
    shared = BlockLayout.from_mask(Causal(), q_tokens=32)
    assert placement.layout(shared, 0) is shared


def test_heads_and_dimensions_on_one_axis_move_together():
    x = np.arange(2 * 3 * 8).reshape(2, 3, 8)
    order = np.array([[2, 0, 1, 3], [0, 1, 3, 2]])
    expected = reorder_heads(x.reshape(2, 3, 4, 2), order, axis=2).reshape(2, 3, 8)
    np.testing.assert_array_equal(reorder_heads(x, order, axis=2, head_dim=2), expected)
    np.testing.assert_array_equal(
        reorder_heads(jnp.asarray(x), order, axis=2, head_dim=2), expected
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="4 kv heads, 3 shards"):
        place_heads(np.ones((1, 8)), kv_heads=4, shards=3)
    with pytest.raises(ArgumentError, match="kv_heads=3"):
        place_heads(np.ones((1, 8)), kv_heads=3, shards=1)
    placement = place_heads(np.ones((2, 8)), kv_heads=4, shards=2)
    with pytest.raises(ArgumentError, match="XSK-102.order-shape"):
        reorder_heads(np.ones((2, 3)), placement.q_order, axis=1)
    with pytest.raises(ArgumentError, match="XSK-102.order-layers"):
        placement.apply(np.ones((8, 2)), ("q_heads", "head_dim"))
    with pytest.raises(ArgumentError, match="3 heads"):
        placement.layout(ragged(1, 3, 16, 8)[0], 0)
    rules = PerHead([Window(i + 1, 0) for i in range(8)])
    with pytest.raises(UnsupportedError, match="XSK-401.permute-per-head-mask"):
        placement.layout(BlockLayout.from_mask(rules, q_tokens=32), 0)
