"""`explain` reports the kernel, cost and recompilation of calls as they are executed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.attention.dense import draw
from tests.lanes import slow
from xsake.kernels.block_sparse.xla import kernels as xla
from xsake.kernels.row_loop import loop_rows
from xsake.layout import BlockLayout
from xsake.masks import Causal, Full, PerHead, Window

Q = jax.ShapeDtypeStruct((2, 1000, 4, 64), jnp.float32)
K = jax.ShapeDtypeStruct((2, 1000, 2, 64), jnp.float32)
V = jax.ShapeDtypeStruct((2, 1000, 2, 32), jnp.float32)


def test_counts_of_a_causal_call_follow_from_its_sizes():
    told = xsake.explain(Q, K, V, mask=Causal(), implementation="xla")
    planes, blocks = 2 * 4, 8
    listed = planes * blocks * (blocks + 1) // 2
    assert told.implementation == "xla" and told.platform == "cpu"
    assert "reference" in told.declined
    assert told.layout_origin == "from the mask" and told.is_static and told.is_counted
    assert (told.block_q, told.block_kv) == (128, 128)
    assert (told.blocks.listed, told.blocks.visible, told.blocks.budget) == (listed, listed, 1.0)
    assert told.blocks.full + told.blocks.partial == listed
    forward, backward = told.passes
    pairs = 128 * 128
    assert forward.flops == forward.computed * pairs * 2 * (64 + 32)
    assert backward.flops == backward.computed * pairs * 2 * (3 * 64 + 2 * 32)
    assert told.forward_flops == forward.flops
    assert told.backward_flops == backward.flops
    for each in told.passes:
        assert each.listed == listed <= each.computed
    out_and_lse = 2 * 1000 * 4 * (32 + 1) * 4
    assert forward.bytes_written == out_and_lse
    d_keys, d_queries = 2 * 1000 * 2 * (64 + 32) * 4, 2 * 1000 * 4 * 64 * 4
    assert backward.bytes_written == d_keys + d_queries + backward.computed * 128 * 64 * 4


@pytest.mark.parametrize("where", [{"platform": "tpu"}, {"bias": jnp.zeros((1, 1, 1000, 1000))}])
def test_the_backward_pass_is_two_elsewhere_and_under_a_bias(where):
    told = xsake.explain(Q, K, V, mask=Causal(), implementation="xla", **where)
    _, d_q, d_kv = told.passes
    pairs = 128 * 128
    assert d_q.flops == d_q.computed * pairs * 2 * (64 + 32 + 64)
    assert d_kv.flops == d_kv.computed * pairs * 2 * (2 * 64 + 2 * 32)
    assert told.backward_flops == d_q.flops + d_kv.flops


@pytest.mark.parametrize("biased", [False, slow(True)])
@pytest.mark.parametrize("traced", [False, slow(True)])
def test_the_predicted_blocks_are_those_the_passes_really_compute(traced, biased, monkeypatch):
    """Every step of every loop reports how many blocks it computed."""
    counts = []

    def counting_loop(rows, row_body, tiles, *shared, **named):
        counts.append(0)
        mine = len(counts) - 1

        def count(blocks):
            counts[mine] += int(blocks)

        def body(tile, state, shared, step):
            jax.debug.callback(count, jax.tree.leaves(step.items)[0].size)
            return row_body.body(tile, state, shared, step)

        return loop_rows(rows, row_body._replace(body=body), tiles, *shared, **named)

    monkeypatch.setattr(xla, "loop_rows", counting_loop)
    q, k, v = (jnp.asarray(x) for x in draw(batch=2, q_tokens=75, q_heads=4, kv_heads=2))
    mask = PerHead([Causal(), Causal() & Window(20, 0), Full(), Window(3, 3)])
    grid = np.random.default_rng(0).random((4, 10, 10)) < 0.7
    layout = BlockLayout.from_block_mask(
        grid, q_tokens=75, kv_tokens=75, block_q=8, block_kv=8, mask=mask
    )
    layout = layout.traced() if traced else layout
    bias = jnp.ones((1, 4, 75, 75)) if biased else None
    call = {"bias": bias, "layout": layout, "implementation": "xla"}
    run = lambda q, k, v: (xsake.attention(q, k, v, **call) ** 2).sum()
    jax.block_until_ready(jax.grad(run, argnums=(0, 1, 2))(q, k, v))
    jax.effects_barrier()
    told = xsake.explain(q, k, v, **call)
    assert [each.computed for each in told.passes] == [count for count in counts if count]
    assert told.passes[0].computed > told.passes[0].listed  # so that waiting is counted too


def test_tile_sizes_are_those_of_the_backend():
    told = xsake.explain(Q, K, V, mask=Causal(), implementation="xla")
    layout = BlockLayout.from_mask(Causal(), q_tokens=1000)
    assert told.passes[0].tiles == xla.default_sizes(layout, 2 * 4 * 8, "cpu")
    assert told.passes[1].tiles == xla.default_sizes(layout, 2 * 8, "cpu")  # of one batch element


def test_segments_that_are_known_are_counted_and_others_bounded():
    ids = np.repeat(np.arange(4, dtype=np.int32), 250)[None].repeat(2, 0)
    known = xsake.explain(Q, K, V, mask=Causal(), q_segment_ids=ids)
    assert known.pruned_by == ("segment ids",) and not known.is_static and known.is_counted
    assert known.blocks.listed < 2 * 4 * 36
    unknown = xsake.explain(
        Q, K, V, mask=Causal(), q_segment_ids=jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    )
    assert not unknown.is_counted and unknown.blocks.listed == 2 * 4 * 36
    assert unknown.blocks.full is None and unknown.passes[0].computed is None
    assert "known at run time, at most 288" in str(unknown)


def test_traced_layouts_are_counted_outside_jit_and_bounded_inside():
    layout = BlockLayout.from_mask(Causal(), q_tokens=1000).traced(50)
    outside = xsake.explain(Q, K, V, layout=layout)
    assert outside.blocks.listed == 2 * 4 * 36 and not outside.is_static
    assert "capacity than 50" in outside.recompiles and "block list is data" in outside.recompiles
    assert outside.compile_key["layout"]["capacity"] == 50
    told = []
    jax.jit(lambda layout: told.append(xsake.explain(Q, K, V, layout=layout)))(layout)
    assert not told[0].is_counted and told[0].blocks.listed == 2 * 4 * 50


def test_inside_jit_a_static_layout_is_still_counted():
    told = []

    @jax.jit
    def step(x):
        ids = np.zeros((2, 1000), np.int32)
        told.append(xsake.explain(Q, K, V, mask=Causal(), q_segment_ids=ids))
        return x

    step(1.0)
    assert told[0].is_counted and told[0].blocks.listed == 2 * 4 * 36


def test_a_static_layout_says_it_is_part_of_the_program():
    told = xsake.explain(Q, K, V, mask=Causal())
    assert "every other layout" in told.recompiles


def test_the_text_is_one_screen_and_the_dict_is_json():
    mask = Causal() & Window(200, 0)
    told = xsake.explain(Q, K, V, mask=mask, softcap=30.0, scale=0.5, implementation="xla")
    text = str(told)
    assert len(text.splitlines()) <= 15
    words = ("xla on cpu", "not reference", "Window(left=200", "softcap 30", "FLOP", "tiles of")
    for word in words:
        assert word in text
    again = json.loads(json.dumps(told.to_dict()))
    assert again["blocks"]["listed"] == told.blocks.listed
    assert again["passes"][0]["tiles"] == {
        "rows": told.passes[0].tiles.rows,
        "blocks": told.passes[0].tiles.blocks,
    }


def test_the_reference_admits_that_it_computes_everything():
    told = xsake.explain(Q, K, V, mask=Causal(), implementation="reference")
    assert told.implementation == "reference" and "xla" in told.declined
    assert told.passes[0].computed == 2 * 4 * 64
    assert told.passes[0].flops == 2 * 4 * 1000 * 1000 * 2 * (64 + 32)


def test_explaining_computes_no_attention(monkeypatch):
    monkeypatch.setattr(xla, "forward", lambda *_: pytest.fail("explain computed something"))
    q, k, v = draw()
    assert xsake.explain(q, k, v, sinks=np.zeros(2), bias=np.zeros((1, 1, 40, 40))).arrays == {
        "q": "float32[1, 40, 2, 8]",
        "k": "float32[1, 40, 1, 8]",
        "v": "float32[1, 40, 1, 8]",
        "bias": "float32[1, 1, 40, 40]",
        "sinks": "float32[2, 1]",
    }
