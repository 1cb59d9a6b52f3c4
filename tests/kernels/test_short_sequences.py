"""Sequences of one block, or just above one: all pairs at once, as right as the walk over lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.kernels.block_sparse.xla import dense
from xsake.layout import BlockLayout
from xsake.masks import Causal, PerHead, Window

RNG = np.random.default_rng(0)
BATCH, TOKENS = 5, 19


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape).astype("float32"))


def layout(heads=1, batch=1, mask=None):
    """3 x 3 blocks of which the last sticks out: 361 of 729 padded pairs exist."""
    chosen = RNG.random((batch, heads, 3, 3)) < 0.6
    sizes = {"q_tokens": TOKENS, "kv_tokens": TOKENS, "block_q": 9, "block_kv": 9}
    return BlockLayout.from_block_mask(chosen, mask=mask, **sizes)


POSITIONS = {"q_positions": jnp.arange(TOKENS) + 3, "kv_positions": jnp.arange(TOKENS)[::-1]}
OWN = {"q_positions": jnp.asarray(RNG.integers(0, TOKENS, (BATCH, TOKENS)))}
IDS = {"q_segment_ids": jnp.asarray(np.sort(RNG.integers(-1, 3, (BATCH, TOKENS)), 1))}
CALLS = {
    "one block": {"mask": Causal()},
    "no mask": {},
    "lists": {"layout": layout(mask=Causal())},
    "list per kv head": {"layout": layout(heads=2)},
    "list per query head": {"layout": layout(heads=4, mask=Window(5, 2))},
    "list per batch element": {"layout": layout(heads=4, batch=BATCH, mask=Causal())},
    "traced list": {"layout": layout(heads=2, batch=BATCH, mask=Causal()).traced()},
    "rule per head": {"mask": PerHead([Window(n, 9) for n in (3, 15, 7, 0)])},
    "positions": {"mask": Causal(), **POSITIONS},
    "positions and ids": {"mask": Causal(), **OWN, **IDS, "layout": layout()},
    "segments": IDS,
    "bias": {"mask": Causal(), "bias": draw(BATCH, 4, TOKENS, TOKENS)},
    "half bias": {"mask": Causal(), "bias": draw(1, 4, TOKENS, TOKENS).astype("bfloat16")},
    "shared bias": {"layout": layout(), "bias": draw(1, 1, TOKENS, TOKENS), "softcap": 2.0},
    "softcap and sinks": {"mask": Causal(), "softcap": 1.5, "sinks": draw(4)},
}


def operands():
    return draw(BATCH, TOKENS, 4, 8), draw(BATCH, TOKENS, 2, 8), draw(BATCH, TOKENS, 2, 6)


def gradients(arrays, rules, implementation):
    rules = dict(rules)
    extra = {"bias": rules.pop("bias")} if "bias" in rules else {}
    weight = jnp.cos(jnp.arange(6.0))[None, None, None]

    def loss(q, k, v, extra):
        out, lse = xsake.attention(
            q, k, v, **extra, **rules, return_lse=True, implementation=implementation
        )
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    return jax.tree.leaves(run(*arrays, extra))


@pytest.mark.parametrize(
    ("name", "step"),
    [(name, dense.STEP_LOGITS) for name in CALLS]
    + [(name, 4 * TOKENS**2 * 2) for name in ("traced list", "positions and ids", "shared bias")],
)
def test_results_and_gradients_equal_the_reference(name, step, monkeypatch):
    """In one step, and in two steps of two batch elements with one element left over."""
    jax.clear_caches()  # the size of a step is no part of what jit compares
    seen, forward = [], dense.forward
    monkeypatch.setattr(dense, "STEP_LOGITS", step)
    monkeypatch.setattr(dense, "forward", lambda *x: seen.append(x) or forward(*x))
    arrays, rules = operands(), CALLS[name]
    got, expected = (gradients(arrays, rules, x) for x in ("xla", "reference"))
    assert seen
    for one, other in zip(got, expected, strict=True):
        one, other = (np.asarray(x, "float32") for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-2 if name == "half bias" else 0, atol=1e-5)


def test_bad_numbers_of_padding_reach_no_gradient():
    q, k, v = operands()
    rules = {
        "mask": Causal(),
        "softcap": 3.0,
        "q_segment_ids": jnp.broadcast_to(jnp.array([0] * 15 + [-1] * 4), (BATCH, TOKENS)),
    }
    dirty = k.at[:, 15].set(jnp.nan), v.at[:, 17].set(jnp.inf)
    got, expected = (gradients((q, *x), rules, "xla") for x in (dirty, (k, v)))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_batch_neighbours_change_no_bit():
    lists, arrays = layout(heads=4, batch=BATCH, mask=Causal()), operands()
    whole = gradients(arrays, {"layout": lists}, "xla")
    order = np.random.default_rng(1).permutation(BATCH)
    moved = BlockLayout.from_block_mask(
        lists.to_block_mask()[order], mask=Causal(), q_tokens=TOKENS, kv_tokens=TOKENS,
        block_q=9, block_kv=9,
    )  # fmt: skip
    others = gradients([x[order] for x in arrays], {"layout": moved}, "xla")
    for one, other in zip(whole, others, strict=True):
        np.testing.assert_array_equal(one[order], other)


@pytest.mark.parametrize(
    "shape", [(1, 129, 12, 64), (1, 160, 12, 64), (1024, 8, 4, 32), (256, 32, 12, 64)]
)
def test_gradients_need_about_the_memory_of_dense_attention(shape):
    """Blocks of 128 took 2.3 to 2.9 times the temporary bytes of `jax.nn`."""

    def temporary(attend):
        loss = lambda *x: (attend(*x) ** 2).sum()
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    own = temporary(lambda *x: xsake.attention(*x, mask=Causal()))
    dense = temporary(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))
    assert own <= 1.3 * dense


def test_only_pairs_that_exist_are_computed_just_above_a_block():
    x = jax.ShapeDtypeStruct((1, 129, 12, 64), jnp.float32)
    forward = xsake.explain(x, x, x, mask=Causal(), platform="cpu").passes[0]
    assert forward.flops == 12 * 129**2 * 4 * 64  # 3 blocks of 128 x 128 have 3 times as many
