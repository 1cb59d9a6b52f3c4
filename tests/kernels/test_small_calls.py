"""Calls that xla computes without lists of rows: short sequences, few queries of a long cache."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.lanes import gate
from xsake.kernels.block_sparse.xla import decode, dense
from xsake.layout import BlockLayout
from xsake.masks import Causal, PerHead, Window

RNG = np.random.default_rng(0)


class Sizes(NamedTuple):
    """Sizes of a call; blocks stick out at both ends."""

    batch: int
    q_tokens: int
    kv_tokens: int
    block_q: int
    block_kv: int

    def layout(self, heads: int = 1, batch: int = 1, mask: Any = None) -> BlockLayout:
        """A layout that lists about 60% of all blocks."""
        tokens = self._asdict()
        blocks = -(-self.q_tokens // self.block_q), -(-self.kv_tokens // self.block_kv)
        del tokens["batch"]
        return BlockLayout.from_block_mask(
            RNG.random((batch, heads, *blocks)) < 0.6, mask=mask, **tokens
        )

    def operands(self):
        """q, k, v."""
        kv = self.batch, self.kv_tokens, 2
        return draw(self.batch, self.q_tokens, 4, 8), draw(*kv, 8), draw(*kv, 6)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape).astype("float32"))


SHORT = Sizes(5, 19, 19, 9, 9)  # 361 of 729 padded pairs exist
FEW = Sizes(2, 3, 77, 3, 16)


def make_calls(x: Sizes) -> dict[str, dict[str, Any]]:
    """Every kind of list and rule."""
    layout, per_head = x.layout, [Window(n, 9) for n in (3, 50, 7, 70)]
    at = jnp.asarray(RNG.integers(0, x.kv_tokens, (x.batch, x.q_tokens)))
    late = {"q_positions": at, "block_size": (x.block_q, x.block_kv)}
    ids = lambda tokens: jnp.asarray(np.sort(RNG.integers(-1, 3, (x.batch, tokens)), 1))
    segments = {"q_segment_ids": ids(x.q_tokens), "kv_segment_ids": ids(x.kv_tokens)}
    pairs = x.q_tokens, x.kv_tokens
    return {
        "list": {"layout": layout(mask=Causal())},
        "list per kv head": {"layout": layout(heads=2)},
        "list per query head": {"layout": layout(heads=4, mask=Window(5, 2))},
        "list per batch element": {"layout": layout(heads=4, batch=x.batch)},
        "traced list": {"layout": layout(heads=2, batch=x.batch, mask=Causal()).traced()},
        "rule per head": {"mask": PerHead(per_head), "layout": layout(heads=4)},
        "positions": {"mask": Causal(), **late},
        "shared positions": {"mask": Window(20, 0), **late, "q_positions": at[0]},
        "kv positions": {"mask": Causal(), **late, "kv_positions": jnp.arange(x.kv_tokens)[::-1]},
        "segments": {"layout": layout(), **segments},
        "positions and ids": {"mask": Causal(), **late, **segments},
        "bias": {"layout": layout(heads=2), "bias": draw(x.batch, 4, *pairs)},
        "half bias": {"layout": layout(), "bias": draw(1, 4, *pairs).astype("bfloat16")},
        "shared bias": {"layout": layout(), "bias": draw(1, 1, *pairs), "softcap": 2.0},
        "softcap and sinks": {"mask": Causal(), **late, "sinks": draw(4), "softcap": 1.5},
    }


SHORT_CALLS = make_calls(SHORT) | {"one block": {"mask": Causal()}, "no mask": {}}
FEW_CALLS = make_calls(FEW) | {"query blocks": {"layout": FEW._replace(block_q=2).layout(4)}}


def attend(arrays, implementation, **rules):
    """Out and lse."""
    return xsake.attention(*arrays, **rules, return_lse=True, implementation=implementation)


def with_gradients(arrays, rules, implementation):
    """Out, lse and the gradients of q, k, v and the bias."""
    rules = dict(rules)
    bias = {"bias": rules.pop("bias")} if "bias" in rules else {}

    def loss(q, k, v, bias):
        out, lse = attend((q, k, v), implementation, **bias, **rules)
        weighted = out * jnp.cos(jnp.arange(6.0))[None, None, None]
        return weighted.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    return jax.tree.leaves(run(*arrays, bias))


def record_calls(monkeypatch, module):
    """Record the forward passes of a module."""
    jax.clear_caches()  # a call that another test has traced would not be traced again
    seen, forward = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *args: seen.append(args) or forward(*args))
    return seen


def assert_equal_reference(results, name):
    got, expected = results("xla"), results("reference")
    for one, other in zip(got, expected, strict=True):
        one, other = (np.asarray(x, "float32") for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-2 if name == "half bias" else 0, atol=1e-5)


@pytest.mark.parametrize("name", gate(["positions and ids", "shared bias"], SHORT_CALLS))
def test_short_sequences_equal_the_reference(name, monkeypatch):
    """In one step, or in two steps of two batch elements with one element left over."""
    if name in ("positions and ids", "shared bias", "traced list"):
        monkeypatch.setattr(dense, "STEP_LOGITS", 4 * 19**2 * 2)
    seen, arrays = record_calls(monkeypatch, dense), SHORT.operands()
    assert_equal_reference(lambda which: with_gradients(arrays, SHORT_CALLS[name], which), name)
    assert seen


@pytest.mark.parametrize("name", gate(["traced list", "rule per head"], FEW_CALLS))
def test_few_queries_equal_the_reference(name, monkeypatch):
    seen, arrays = record_calls(monkeypatch, decode), FEW.operands()
    run = lambda which: functools.partial(attend, implementation=which, **FEW_CALLS[name])
    assert_equal_reference(lambda which: jax.jit(run(which))(arrays), name)
    assert seen


def test_gradients_of_few_queries_equal_the_reference():
    arrays, rules = FEW.operands(), FEW_CALLS["positions"]
    assert_equal_reference(lambda which: with_gradients(arrays, rules, which), "positions")


def test_bad_numbers_of_padding_reach_no_gradient():
    q, k, v = SHORT.operands()
    ids = jnp.broadcast_to(jnp.array([0] * 15 + [-1] * 4), (SHORT.batch, 19))
    rules = {"mask": Causal(), "softcap": 3.0, "q_segment_ids": ids}
    dirty = q, k.at[:, 15].set(jnp.nan), v.at[:, 17].set(jnp.inf)
    both = (with_gradients(arrays, rules, "xla") for arrays in (dirty, (q, k, v)))
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bad_numbers_of_a_cache_stay_with_the_queries_that_see_them():
    q, k, v = FEW.operands()
    k, v = k.at[:, 64].set(jnp.nan), v.at[:, 75].set(jnp.inf)
    rules = {"mask": Causal(), "q_positions": jnp.array([60, 63, 70]), "block_size": (3, 16)}
    out, _ = attend((q, k, v), "xla", **rules)
    clean, _ = attend((q, *(jnp.nan_to_num(x, posinf=0) for x in (k, v))), "xla", **rules)
    np.testing.assert_array_equal(out[:, :2], clean[:, :2])
    assert np.isnan(out[:, 2]).all()


@pytest.mark.parametrize("sizes", [SHORT, FEW], ids=["short", "few"])
def test_batch_neighbours_change_no_bit(sizes):
    layout, arrays = sizes.layout(heads=4, batch=sizes.batch), sizes.operands()
    mirrored = BlockLayout.from_block_mask(
        layout.to_block_mask()[::-1], q_tokens=sizes.q_tokens, kv_tokens=sizes.kv_tokens,
        block_q=sizes.block_q, block_kv=sizes.block_kv,
    )  # fmt: skip
    run = jax.jit(lambda arrays, layout: attend(arrays, "xla", layout=layout))
    others = run([x[::-1] for x in arrays], mirrored.traced(layout.items))
    for one, other in zip(run(arrays, layout.traced(layout.items)), others, strict=True):
        np.testing.assert_array_equal(one, other[::-1])


@pytest.mark.slow  # quicker: neighbours that change places
def test_few_queries_alone_or_with_a_static_layout_have_the_same_bits():
    layout, arrays = FEW.layout(heads=4, batch=FEW.batch), FEW.operands()
    whole = attend(arrays, "xla", layout=layout)
    for one, other in zip(whole, attend(arrays, "xla", layout=layout.traced()), strict=True):
        np.testing.assert_array_equal(one, other)
    alone = BlockLayout.from_block_mask(
        layout.to_block_mask()[1:], q_tokens=3, kv_tokens=77, block_q=3, block_kv=16
    )
    for one, other in zip(whole, attend([x[1:] for x in arrays], "xla", layout=alone), strict=True):
        np.testing.assert_array_equal(one[1:], other)


@pytest.mark.slow  # quicker: vmap of test_transformations.py
def test_vmap_over_few_queries_equals_a_loop():
    q, k, v = (x[:, None] for x in FEW.operands())
    rules = FEW_CALLS["positions"]
    positions = rules["q_positions"]
    one = lambda q, k, v, at: attend((q, k, v), "xla", **rules | {"q_positions": at})[0]
    got = jax.vmap(one)(q, k, v, positions)
    for element in range(2):
        expected = one(q[element], k[element], v[element], positions[element])
        np.testing.assert_allclose(got[element], expected, atol=2e-6)


def temporary_bytes(function, *arrays):
    program = jax.jit(function).lower(*arrays).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("tokens", [32_768, 32_700])
@pytest.mark.parametrize("rules", gate(["layout"], ["layout", "causal", "window(1023, 0)"]))
def test_temporary_memory_does_not_grow_with_the_cache(tokens, rules):
    """K and V have 67 MB each; cutting them into blocks took 136 MB."""
    q, kv = (jax.ShapeDtypeStruct((1, *x, 64), "float32") for x in ((1, 32), (tokens, 8)))
    chosen = np.ones((1, -(-tokens // 128)), bool)
    blocks = BlockLayout.from_block_mask(
        chosen, q_tokens=1, kv_tokens=tokens, block_q=1, block_kv=128
    )

    def run(q, k, v, at):
        given = {"layout": blocks} if rules == "layout" else {"mask": rules, "q_positions": at}
        return xsake.attention(q, k, v, **given)

    assert temporary_bytes(run, q, kv, kv, jax.ShapeDtypeStruct((1, 1), "int32")) < 8e6


@pytest.mark.parametrize(
    "shape", [(1, 129, 12, 64), (1, 160, 12, 64), (1024, 8, 4, 32), (256, 32, 12, 64)]
)
def test_gradients_need_about_the_memory_of_dense_attention(shape):
    """Blocks of 128 took 2.3 to 2.9 times the temporary bytes of `jax.nn`."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    gradients = lambda attend: jax.grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2))
    own = gradients(lambda *x: xsake.attention(*x, mask=Causal()))
    theirs = gradients(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))
    assert temporary_bytes(own, x, x, x) <= 1.3 * temporary_bytes(theirs, x, x, x)


def test_only_pairs_that_exist_are_computed_just_above_a_block():
    x = jax.ShapeDtypeStruct((1, 129, 12, 64), jnp.float32)
    forward = xsake.explain(x, x, x, mask=Causal(), platform="cpu").passes[0]
    assert forward.flops == 12 * 129**2 * 4 * 64  # 3 blocks of 128 x 128 have 3 times as many
