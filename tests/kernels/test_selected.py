"""Selected attention: every backend against float64, and what no other query may change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.error_budget import failures
from tests.lanes import gate, slow
from xsake.errors import ArgumentError
from xsake.kernels.selected import selected_attention, xla
from xsake.kernels.selected.api import OP
from xsake.kernels.selected.chunking import SelectedTuning, chunk_sizes, max_tiles, route_queries
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.kernels.selected.xla import CPU

# The reference is compared with float64 at every commit too, through the whole of native sparse
# attention; apart from that it belongs to the nightly lane.
NATIVE = pytest.param(
    "native_cpu",
    marks=pytest.mark.skipif(
        OP.implementations()["native_cpu"] is not None, reason="xsake-cpu is not installed"
    ),
)
each_implementation = pytest.mark.parametrize("implementation", ["xla", NATIVE, slow("reference")])


def drawn(tokens, q_heads, kv_heads, *, block, slots, batch=1, dim=8, dtype=np.float32, seed=0):
    """(q, k, v), lists of distinct blocks that are not of the future, -1 where there are none."""
    rng = np.random.default_rng(seed)
    draw = lambda heads, dim: rng.normal(size=(batch, tokens, heads, dim)).astype(dtype)
    blocks = np.full((batch, tokens, kv_heads, slots), -1, np.int32)
    for b, t, h in np.ndindex(batch, tokens, kv_heads):
        found = rng.permutation(t // block + 1)[: rng.integers(1, slots + 1)]
        blocks[b, t, h, rng.permutation(slots)[: found.size]] = found
    return (draw(q_heads, dim), draw(kv_heads, dim), draw(kv_heads, dim + 4)), blocks


def allowed(blocks, block, group, kv_tokens, positions=None):
    """bool [B, Hq, Tq, Tk], pair by pair."""
    batch, tokens, heads, _ = blocks.shape
    found = np.zeros((batch, heads, tokens, kv_tokens), bool)
    for b, t, h in np.ndindex(batch, tokens, heads):
        at = t if positions is None else positions[b, t]
        for key in range(min(at + 1, kv_tokens)):
            found[b, h, t, key] = key // block in blocks[b, t, h]
    return np.repeat(found, group, axis=1)


CASES = {
    "group_1": ((61, 2, 2), {"block": 8, "slots": 3, "batch": 2}),
    "group_3": ((75, 6, 2), {"block": 16, "slots": 4}),
    "group_4_narrow": ((40, 4, 1), {"block": 7, "slots": 5, "dtype": jnp.bfloat16}),
    "group_16": ((33, 16, 1), {"block": 4, "slots": 2}),
    "more_slots_than_blocks": ((29, 3, 1), {"block": 16, "slots": 6}),
    "one_token": ((1, 3, 1), {"block": 64, "slots": 2}),
}


@each_implementation
@pytest.mark.parametrize(
    "name", gate(["group_3", "group_4_narrow", "more_slots_than_blocks"], CASES)
)
def test_outputs_and_gradients_are_within_the_error_budget(name, implementation):
    (tokens, q_heads, kv_heads), more = CASES[name]
    arrays, blocks = drawn(tokens, q_heads, kv_heads, **more)
    problem = SelectedConfig(more["block"], 0.4)
    pairs = allowed(blocks, more["block"], q_heads // kv_heads, tokens)
    call = lambda *x: selected_attention(
        SelectedInputs(*x, blocks), problem, implementation=implementation
    )
    dtype = np.dtype(more.get("dtype", np.float32)).name
    assert failures(call, arrays, pairs, 0.4, dtype) == []


@each_implementation
def test_queries_may_be_anywhere_in_the_keys(implementation):
    (q, k, v), _ = drawn(50, 6, 2, block=8, slots=3, batch=2)
    positions = np.asarray([[49, 3], [17, 30]], np.int32)
    blocks = np.asarray([[[[6, 0, -1]] * 2, [[0, -1, -1]] * 2], [[[2, 1, 0]] * 2, [[3, 5, 1]] * 2]])
    blocks = blocks.astype(np.int32)  # block 5 is of the future of its query: it adds nothing
    pairs = allowed(blocks, 8, 3, 50, positions)
    call = lambda *x: selected_attention(
        SelectedInputs(*x, blocks, positions), SelectedConfig(8, 0.3), implementation=implementation
    )
    assert failures(call, (q[:, :2], k, v), pairs, 0.3) == []


@pytest.mark.parametrize("implementation", ["xla", slow("reference")])
def test_float64_is_computed_in_float64(implementation):
    with jax.enable_x64(True):
        arrays, blocks = drawn(37, 3, 1, block=8, slots=3, dtype=np.float64)
        pairs = allowed(blocks, 8, 3, 37)
        call = lambda *x: selected_attention(
            SelectedInputs(*x, jnp.asarray(blocks)),
            SelectedConfig(8, 0.4),
            implementation=implementation,
        )
        assert failures(call, arrays, pairs, 0.4, "float64") == []


@pytest.mark.slow  # quicker: outputs, gradients, vmap, jit
def test_chunks_and_tiles_change_nothing(monkeypatch):
    arrays, blocks = drawn(75, 6, 2, block=8, slots=4, batch=2)
    operands = SelectedInputs(*map(jnp.asarray, (*arrays, blocks)))
    problem = SelectedConfig(8, 0.4)
    d_out = np.random.default_rng(1).normal(size=(2, 75, 6, 12)).astype(np.float32)
    found = []
    for tuning in (
        CPU,
        SelectedTuning(rows=12, tiles=3, queries=1),
        SelectedTuning(rows=24, tiles=2, queries=20),
    ):
        monkeypatch.setattr(xla, "CPU", tuning)
        cut = chunk_sizes(operands, problem, tuning)
        forward = jax.jit(lambda *x: xla.forward(SelectedInputs(*x), problem, "cpu"))
        out, lse = forward(*operands)
        back = jax.jit(lambda x, *rest: xla.backward(SelectedInputs(*x), problem, "cpu", *rest))
        grads = back(tuple(operands), out, lse, jnp.asarray(d_out), jnp.zeros_like(lse))
        found.append((out, lse, *grads[:3]))
    assert chunk_sizes(operands, problem, CPU).chunks == 1 and cut.chunks > 1
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kv_blocks", "slots", "tile"), [(9, 4, 3), (1, 1, 5), (4, 6, 1), (7, 3, 4)]
)
def test_tiles_hold_every_chosen_pair_once(kv_blocks, slots, tile):
    rng, queries = np.random.default_rng(tile), 40
    blocks = np.full((queries, slots), -1, np.int32)
    for t in range(queries):
        found = rng.permutation(kv_blocks)[: rng.integers(0, slots + 1)]
        blocks[t, : found.size] = found
    room = max_tiles(queries, slots, kv_blocks, tile)
    find = jax.jit(route_queries, static_argnums=(1, 2, 3))
    tiles = jax.tree.map(np.asarray, find(jnp.asarray(blocks), kv_blocks, tile, room))
    wanted = {(t, b) for t in range(queries) for b in blocks[t] if b >= 0}
    held = [
        (q, b)
        for w, b in enumerate(tiles.block[: tiles.total])
        for q in tiles.query[w]
        if q < queries
    ]
    assert len(held) == len(wanted) and set(held) == wanted
    assert (tiles.query[int(tiles.total) :] == queries).all()
    for t, s in np.ndindex(blocks.shape):
        at = divmod(tiles.place[t, s], tile)
        if blocks[t, s] < 0:
            assert tiles.place[t, s] == room * tile
        else:
            assert (tiles.query[at], tiles.block[at[0]]) == (t, blocks[t, s])


@each_implementation
def test_what_is_not_selected_changes_no_bit(implementation):
    (q, k, v), blocks = drawn(64, 6, 2, block=8, slots=3)
    blocks[blocks == 3] = -1  # nobody selects block 3
    run = lambda k, v: _with_gradients(q, k, v, blocks, SelectedConfig(8, 0.4), implementation)
    clean = run(k, v)
    for bad in (np.nan, np.inf, 1e30):
        k2, v2 = k.copy(), v.copy()
        k2[:, 24:32], v2[:, 24:32] = bad, bad
        for x, y in zip(clean, run(k2, v2), strict=True):
            np.testing.assert_array_equal(x, y)
    assert all((clean[3 + i][:, 24:32] == 0).all() for i in range(2))


@each_implementation
def test_the_future_changes_no_bit_of_the_past(implementation):
    (q, k, v), blocks = drawn(64, 6, 2, block=8, slots=3)
    problem, past = SelectedConfig(8, 0.4), 43
    call = lambda *x: selected_attention(SelectedInputs(*x), problem, implementation=implementation)
    before = call(q, k, v, blocks)
    (q2, k2, v2), blocks2 = drawn(64, 6, 2, block=8, slots=3, seed=9)
    parts = zip((q, k, v, blocks), (q2, np.full_like(k, np.nan), v2, blocks2), strict=True)
    after = call(*(np.concatenate([x[:, :past], y[:, past:]], axis=1) for x, y in parts))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, :past], y[:, :past])


@each_implementation
def test_a_query_without_blocks_gets_zeros_and_gives_none(implementation):
    (q, k, v), blocks = drawn(64, 6, 2, block=8, slots=3)
    blocks[:, 5] = -1
    out, lse, d_q, *_ = _with_gradients(q, k, v, blocks, SelectedConfig(8, 0.4), implementation)
    assert (out[:, 5] == 0).all() and (lse[:, 5] == -np.inf).all() and (d_q[:, 5] == 0).all()


@each_implementation
def test_it_works_under_vmap_and_jit(implementation):
    arrays, blocks = drawn(20, 4, 2, block=8, slots=2, batch=3)
    call = lambda *x: selected_attention(
        SelectedInputs(*x), SelectedConfig(8, 0.4), implementation=implementation
    )
    whole = call(*arrays, blocks)[0]
    split = jax.jit(jax.vmap(lambda *x: call(*(a[None] for a in x))[0][0]))(*arrays, blocks)
    np.testing.assert_allclose(whole, split, rtol=1e-5, atol=1e-6)


def test_an_unknown_name_is_refused():
    arrays, blocks = drawn(4, 1, 1, block=2, slots=1)
    with pytest.raises(ArgumentError, match="XSK-102.implementation-name"):
        selected_attention(
            SelectedInputs(*arrays, blocks), SelectedConfig(2, 1.0), implementation="fast"
        )


def _with_gradients(q, k, v, blocks, problem, implementation):
    call = lambda q, k, v: selected_attention(
        SelectedInputs(q, k, v, blocks), problem, implementation=implementation
    )
    (out, lse), pull = jax.vjp(call, q, k, v)
    return out, lse, *pull((jnp.cos(jnp.arange(out.size)).reshape(out.shape), jnp.zeros_like(lse)))
