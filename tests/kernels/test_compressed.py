"""Pooled attention: every backend against float64, the weights of scores, and who is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.error_budget import failures
from tests.lanes import slow
from xsake.kernels.block_selection import BlockSelection, select_blocks
from xsake.kernels.compressed import compressed_attention, reference
from xsake.kernels.compressed import xla as pooled_xla
from xsake.kernels.compressed.summaries import (
    block_scores,
    means,
    num_summaries,
    runs,
)
from xsake.kernels.compressed.types import CompressedConfig, CompressedInputs

# The reference is compared with float64 at every commit too, through the whole of native sparse
# attention; apart from that it belongs to the nightly lane.
each_implementation = pytest.mark.parametrize("implementation", ["xla", slow("reference")])
LENGTH, STRIDE, BLOCK = 8, 4, 16


def drawn(tokens, q_heads, kv_heads, *, batch=1, dim=8, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    number = num_summaries(tokens, LENGTH, STRIDE)
    draw = lambda length, heads, dim: rng.normal(size=(batch, length, heads, dim)).astype(dtype)
    return draw(tokens, q_heads, dim), draw(number, kv_heads, dim), draw(number, kv_heads, dim + 4)


def asking(tokens, slots=4, **more):
    choosing = BlockSelection(BLOCK, -(-tokens // BLOCK), slots, **more)
    return CompressedConfig(LENGTH, STRIDE, 0.4, choosing)


def allowed(q, k, positions=None, starts=None):
    """bool [B, Hq, Tq, Nc], pair by pair."""
    batch, tokens, heads, _ = q.shape
    found = np.zeros((batch, heads, tokens, k.shape[1]), bool)
    for b, t, i in np.ndindex(batch, tokens, k.shape[1]):
        at = t if positions is None else positions[b][t]
        start = 0 if starts is None else starts[b][t]
        found[b, :, t, i] = i * STRIDE >= start and i * STRIDE + LENGTH <= at + 1
    return found


CASES = {
    "group_1": ((61, 2, 2), {"batch": 2}),
    "group_3": ((75, 6, 2), {}),
    "group_4_narrow": ((40, 4, 1), {"dtype": jnp.bfloat16}),
    "group_16": ((33, 16, 1), {}),
    "shorter_than_a_summary": ((5, 3, 1), {}),
}


@each_implementation
@pytest.mark.parametrize("name", [*list(CASES)[1:], slow("group_1")])
def test_outputs_and_gradients_are_within_the_error_budget(name, implementation):
    sizes, more = CASES[name]
    arrays = drawn(*sizes, **more)
    problem = asking(sizes[0])
    call = lambda *x: compressed_attention(
        CompressedInputs(*x), problem, implementation=implementation
    )[:2]
    dtype = np.dtype(more.get("dtype", np.float32)).name
    assert failures(call, arrays, allowed(*arrays[:2]), 0.4, dtype) == []


@each_implementation
def test_positions_and_starts_say_who_sees_what(implementation):
    q, k, v = drawn(60, 6, 2, batch=2)
    positions = np.asarray([[59, 3, 20], [17, 30, 40]], np.int32)
    starts = np.asarray([[0, 0, 16], [0, 16, 32]], np.int32)
    pairs = allowed(q[:, :3], k, positions, starts)
    call = lambda *x: compressed_attention(
        CompressedInputs(*x, positions, starts), asking(60), implementation=implementation
    )
    assert failures(lambda *x: call(*x)[:2], (q[:, :3], k, v), pairs, 0.4) == []
    blocks = np.asarray(call(q[:, :3], k, v)[2])
    assert {int(x) for x in blocks[1, 2].ravel()} == {2, -1}  # its sequence has one block yet


def overlaps(length, stride, block, summaries, number):
    """How many strides summary i shares with block j, counted token by token."""
    found = np.zeros((summaries, number), int)
    for i, j in np.ndindex(summaries, number):
        mine = set(range(i * stride, i * stride + length))
        found[i, j] = len(mine & set(range(j * block, (j + 1) * block)))
    assert not (found % stride).any()
    return found // stride


def test_score_weights_are_integer_overlaps_for_200_random_sizes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        stride = int(rng.integers(1, 7))
        length, block = (stride * int(x) for x in rng.integers(1, 7, 2))
        tokens = int(rng.integers(1, 90))
        summaries, number = num_summaries(tokens, length, stride), -(-tokens // block)
        problem = CompressedConfig(length, stride, 1.0, BlockSelection(block, number, 1))
        found = block_scores(np.eye(summaries), problem, number)
        np.testing.assert_array_equal(found, overlaps(length, stride, block, summaries, number))


@pytest.mark.parametrize(("first", "local", "spare"), [(1, 2, 3), (0, 1, 0), (3, 4, 5), (2, 1, 1)])
def test_choice_is_the_sorted_one(first, local, spare):
    rng, number = np.random.default_rng(first), 9
    scores = rng.random((20, number)).astype(np.float32)
    position = rng.integers(0, number * 4, 20).astype(np.int32)
    start = (rng.integers(0, position + 1) // 4 * 4).astype(np.int32)
    slots = first + local + spare
    found = np.asarray(
        select_blocks(
            *map(jnp.asarray, (scores, position, start)),
            BlockSelection(4, number, slots, first, local),
        )
    )
    for t in range(20):
        own, zero = position[t] // 4, start[t] // 4
        always = [x for x in range(own, own - local, -1) if x >= zero]
        always += [x for x in range(zero, min(zero + first, own + 1)) if x not in always]
        rest = [x for x in range(zero, own + 1) if x not in always]
        wanted = (always + sorted(rest, key=lambda x: -scores[t, x]))[:slots]
        assert found[t].tolist() == wanted + [-1] * (slots - len(wanted))


@each_implementation
def test_the_group_chooses_by_the_sum_of_its_heads(implementation):
    q, k, v = drawn(90, 6, 2)
    blocks = compressed_attention(
        CompressedInputs(q, k, v), asking(90, slots=4), implementation=implementation
    )[2]
    pairs = allowed(q, k)
    weights = overlaps(LENGTH, STRIDE, BLOCK, k.shape[1], 6)
    for t, h in np.ndindex(90, 2):
        total = np.zeros(6)
        for g in range(3):
            seen = pairs[0, 3 * h + g, t]
            p = np.exp(0.4 * k[0, seen, h].astype(float) @ q[0, t, 3 * h + g])
            total += (p / p.sum()) @ weights[seen] if seen.any() else 0
        own = t // BLOCK
        always = list(dict.fromkeys(x for x in (own, own - 1, 0) if x >= 0))
        rest = [x for x in range(own + 1) if x not in always]
        wanted = (always + sorted(rest, key=lambda x: -total[x]))[:4]
        assert np.asarray(blocks[0, t, h]).tolist() == wanted + [-1] * (4 - len(wanted))


@pytest.mark.slow  # quicker: outputs and gradients of one chunk
def test_backends_and_spans_agree_on_many_chunks(monkeypatch):
    arrays = tuple(map(jnp.asarray, drawn(200, 6, 2, batch=2)))
    right = reference.forward(CompressedInputs(*arrays), asking(200), "cpu")
    tuning = pooled_xla.CompressedTuning(logits=1, queries=16, spans=4)
    monkeypatch.setattr(pooled_xla, "CPU", tuning)
    forward = jax.jit(lambda *x: pooled_xla.forward(CompressedInputs(*x), asking(200), "cpu"))
    found = forward(*arrays)
    for x, y in zip(right, found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    d_out = jnp.cos(jnp.arange(found[0].size)).reshape(found[0].shape)
    given = d_out, jnp.zeros_like(found[1])
    right = reference.backward(CompressedInputs(*arrays), asking(200), "cpu", *found[:2], *given)
    backward = jax.jit(
        lambda x, *rest: pooled_xla.backward(CompressedInputs(*x), asking(200), "cpu", *rest)
    )
    found = backward(arrays, *found[:2], *given)
    for x, y in zip(right[:3], found[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@each_implementation
def test_the_future_changes_no_bit_of_the_past(implementation):
    q, k, v = drawn(80, 6, 2)
    call = lambda *x: compressed_attention(
        CompressedInputs(*x), asking(80), implementation=implementation
    )
    past = 42
    whole = (past - LENGTH) // STRIDE + 1  # summaries that a query of the past may see
    bad = lambda x, at: np.concatenate([x[:, :at], np.full_like(x[:, at:], np.nan)], axis=1)
    after = call(bad(q, past), bad(k, whole), bad(v, whole))
    for x, y in zip(call(q, k, v), after, strict=True):
        np.testing.assert_array_equal(x[:, :past], y[:, :past])


@each_implementation
def test_no_gradient_flows_through_the_choice(implementation):
    arrays = drawn(40, 3, 1)
    call = lambda *x: compressed_attention(
        CompressedInputs(*x), asking(40), implementation=implementation
    )[2]
    taken = lambda *x: jnp.take(jnp.arange(1.0, 9.0), call(*x), mode="clip").sum()
    assert all((x == 0).all() for x in jax.grad(taken, (0, 1, 2))(*arrays))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 2, 19), (3, 3, 30), (2, 5, 7)])
def test_runs_and_means_are_what_they_say(sizes):
    stride, per_summary, tokens = sizes
    length = stride * per_summary
    x = np.random.default_rng(0).normal(size=(1, tokens, 2, 3)).astype(np.float32)
    found, mean = (make(jnp.asarray(x), length, stride) for make in (runs, means))
    for i in range((tokens - length) // stride + 1):
        right = x[:, i * stride : i * stride + length]
        np.testing.assert_array_equal(found[:, i], right)
        np.testing.assert_allclose(mean[:, i], right.mean(1), rtol=1e-5, atol=1e-6)
    assert found.shape[1] == mean.shape[1] == num_summaries(tokens, length, stride)
