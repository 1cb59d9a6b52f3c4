"""Few queries against a long cache: K and V are read in place, and results stay right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.kernels.block_sparse.xla import decode
from xsake.layout import BlockLayout
from xsake.masks import Causal, PerHead, Window

RNG = np.random.default_rng(0)


def draw(*shape, dtype="float32"):
    return jnp.asarray(RNG.normal(size=shape).astype(dtype))


def operands(batch=2, q_tokens=3, kv_tokens=77, q_heads=4, kv_heads=2, dtype="float32"):
    q = draw(batch, q_tokens, q_heads, 8, dtype=dtype)
    k = draw(batch, kv_tokens, kv_heads, 8, dtype=dtype)
    return q, k, draw(batch, kv_tokens, kv_heads, 5, dtype=dtype)


def layout(heads=1, batch=1, q_tokens=3, kv_tokens=77, block_q=3, block_kv=16, mask=None):
    shape = batch, heads, -(-q_tokens // block_q), -(-kv_tokens // block_kv)
    return BlockLayout.from_block_mask(
        RNG.random(shape) < 0.6,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        block_q=block_q,
        block_kv=block_kv,
        mask=mask,
    )


POSITIONS = {"q_positions": jnp.array([[60, 61, 62], [20, 21, 22]])}
IDS = {
    "q_segment_ids": jnp.array([[1, 1, -1], [0, 2, 3]]),
    "kv_segment_ids": jnp.asarray(np.sort(RNG.integers(0, 4, (2, 77)), 1)),
}
CALLS = {
    "positions": {"mask": Causal(), **POSITIONS},
    "shared positions": {"mask": Causal() & Window(20, 0), "q_positions": jnp.arange(70, 73)},
    "kv positions": {"mask": Causal(), **POSITIONS, "kv_positions": jnp.arange(77)[::-1]},
    "segments": IDS,
    "segments and positions": {"mask": Causal(), **POSITIONS, **IDS},
    "shared list": {"layout": layout()},
    "list per kv head": {"layout": layout(heads=2)},
    "list per query head": {"layout": layout(heads=4)},
    "list per batch element": {"layout": layout(batch=2, heads=4)},
    "traced list": {"layout": layout(batch=2, heads=2).traced()},
    "query blocks": {"layout": layout(block_q=2, heads=4)},
    "rule per head": {
        "mask": PerHead([Window(n, 9) for n in (3, 50, 7, 70)]),
        "layout": layout(heads=4),
    },
    "bias": {"layout": layout(heads=2), "bias": draw(2, 4, 3, 77)},
    "shared bias": {"layout": layout(block_q=2), "bias": draw(1, 1, 3, 77), "softcap": 2.0},
    "sinks": {"mask": Causal(), **POSITIONS, "sinks": draw(4), "softcap": 3.0},
}


def in_place(monkeypatch):
    """Record the calls that read K and V in place."""
    jax.clear_caches()  # a call that another test has traced would not be traced again
    seen, forward = [], decode.forward
    monkeypatch.setattr(
        decode, "forward", lambda *args: seen.append(args) or forward(*args), raising=True
    )
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_outputs_equal_the_reference(name, monkeypatch):
    seen, arrays = in_place(monkeypatch), operands()
    rules = {"layout": layout(), **CALLS[name]} if "q_positions" not in CALLS[name] else CALLS[name]
    rules = {**rules, "return_lse": True}
    block = xsake.BlockSparseAttention(block_kv=16, implementation="xla")
    truth = xsake.BlockSparseAttention(block_kv=16, implementation="reference")
    got, expected = jax.jit(functools.partial(block, **rules))(*arrays), truth(*arrays, **rules)
    assert seen
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(got[1], expected[1], atol=2e-6)


def test_gradients_equal_the_reference():
    arrays = operands()

    def gradients(implementation):
        attend = xsake.BlockSparseAttention(block_kv=16, implementation=implementation)
        loss = lambda *x: (attend(*x, mask=Causal(), **POSITIONS) ** 2).sum()
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    for got, expected in zip(gradients("xla"), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_values_that_are_not_finite_stay_with_those_who_see_them():
    q, k, v = operands(batch=1, q_tokens=2)
    k, v = k.at[:, 64].set(jnp.nan), v.at[:, 75].set(jnp.inf)
    positions = jnp.array([[63, 70]])
    attend = xsake.BlockSparseAttention(block_kv=16, implementation="xla")
    out = attend(q, k, v, mask=Causal(), q_positions=positions)
    clean = attend(q, *(jnp.nan_to_num(x, posinf=0) for x in (k, v)), mask=Causal(),
                   q_positions=positions)  # fmt: skip
    np.testing.assert_array_equal(out[:, 0], clean[:, 0])
    assert np.isnan(out[:, 1]).all()


def test_a_batch_neighbour_and_a_traced_list_change_no_bit():
    arrays, rules = operands(), layout(batch=2, heads=2)
    attend = functools.partial(xsake.attention, implementation="xla")
    both = attend(*arrays, layout=rules)
    np.testing.assert_array_equal(both, attend(*arrays, layout=rules.traced()))
    grid = rules.to_block_mask()
    for element in range(2):
        own = slice(element, element + 1)
        alone = BlockLayout.from_block_mask(
            grid[own], q_tokens=3, kv_tokens=77, block_q=3, block_kv=16
        )
        one = attend(*(x[own] for x in arrays), layout=alone)
        np.testing.assert_array_equal(one, both[own])


def test_vmap_equals_a_loop():
    q, k, v = (x[:, None] for x in operands())
    positions = POSITIONS["q_positions"]
    one = lambda q, k, v, at: xsake.attention(
        q, k, v, layout=layout_of_all(), mask=Causal(), q_positions=at
    )
    got = jax.vmap(one)(q, k, v, positions)
    for element in range(2):
        expected = one(q[element], k[element], v[element], positions[element])
        np.testing.assert_allclose(got[element], expected, atol=2e-6)


def layout_of_all():
    return BlockLayout.from_block_mask(
        np.ones((1, 5), bool), q_tokens=3, kv_tokens=77, block_q=3, block_kv=16
    )


@pytest.mark.parametrize("kv_tokens", [32_768, 32_700])
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(1023, 0)])
@pytest.mark.parametrize("static", [True, False])
def test_temporary_memory_does_not_grow_with_the_cache(kv_tokens, mask, static):
    """K and V have 67 MB each; cutting them into blocks took 136 MB."""
    q = jax.ShapeDtypeStruct((1, 1, 32, 64), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, kv_tokens, 8, 64), jnp.float32)
    position = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    chosen = np.ones((1, -(-kv_tokens // 128)), bool)
    rules = {"q_tokens": 1, "kv_tokens": kv_tokens, "block_q": 1, "block_kv": 128}
    blocks = BlockLayout.from_block_mask(chosen, **rules)

    def attend(q, k, v, at):
        if static:
            return xsake.attention(q, k, v, layout=blocks)
        return xsake.attention(q, k, v, mask=mask, q_positions=at)

    compiled = jax.jit(attend).lower(q, kv, kv, position).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8e6
