"""Native sparse attention against its definition in float64, and the traps of other ports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import nsa
from xsake.errors import ArgumentError, ShapeError

SIZES = nsa.Config(length=8, stride=4, size=8, count=4, window=10)
TOKENS = 45


def drawn(tokens=TOKENS, q_heads=6, kv_heads=2, *, seed=0, dtype=np.float32):
    """q, keys and values of every branch, gates."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(1, tokens, *shape)).astype(dtype))
    k, v = (nsa.KV(*(draw(kv_heads, 8) for _ in range(3))) for _ in range(2))
    return draw(q_heads, 8), k, v, nsa.Gates.sigmoid(draw(q_heads, 3))


def only(branch, q):
    """A gate of one for one branch; the others are not computed."""
    return nsa.Gates(None, None, None)._replace(**{branch: jnp.ones(q.shape[:3])})


def softmax(q, k, v, seen, xp):
    """Dense attention over the pairs `seen` [Hk, Tq, Tk], in the dtype of q; plain autodiff."""
    group = q.shape[1] // k.shape[1]
    k, v, seen = (xp.repeat(x, group, a) for x, a in ((k, 1), (v, 1), (seen, 0)))
    s = xp.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    s = xp.where(seen, s, -1e30)
    p = xp.where(seen, xp.exp(s - s.max(-1, keepdims=True)), 0)
    p = p / xp.where(p.sum(-1, keepdims=True) == 0, 1, p.sum(-1, keepdims=True))
    return xp.einsum("hqk,khd->qhd", p, v), p


def definition(q, k, v, gates, sizes, listed=None, xp=np):
    """The paper, token by token where it chooses: (out [T, Hq, D], blocks [T, Hk] as sets)."""
    q, k, v, gates = jax.tree.map(lambda x: xp.asarray(x[0]), (q, k, v, gates))
    tokens, heads = k.selected.shape[:2]
    t = np.arange(tokens)
    begins = np.arange(0, tokens - sizes.length + 1, sizes.stride)
    pool = lambda x: xp.stack([x[i : i + sizes.length].mean(0) for i in begins])
    whole = np.broadcast_to(begins[None] + sizes.length <= t[:, None] + 1, (tokens, begins.size))
    pooled = pool(k.compressed), pool(v.compressed)
    compressed, p = softmax(q, *pooled, whole[None].repeat(heads, 0), xp)
    if listed is None:
        listed = chosen(np.asarray(p).reshape(heads, -1, *p.shape[1:]).sum(1), begins, sizes)
    seen = np.zeros((heads, tokens, tokens), bool)
    for h, i in np.ndindex(heads, tokens):
        for j in listed[i][h]:
            seen[h, i, j * sizes.size : (j + 1) * sizes.size] = True
    causal = t[None] <= t[:, None]
    chosen_out, _ = softmax(q, k.selected, v.selected, seen & causal, xp)
    near = causal & (t[:, None] - t[None] < sizes.window)
    window, _ = softmax(q, k.window, v.window, near[None].repeat(heads, 0), xp)
    parts = zip(gates, (compressed, chosen_out, window), strict=True)
    return sum(gate[..., None] * x for gate, x in parts), listed


def chosen(weight, begins, sizes):
    """Sets of blocks by the tokens that summaries and blocks share."""
    heads, tokens, _ = weight.shape
    found = []
    for i in range(tokens):
        own, lists = i // sizes.size, []
        for h in range(heads):
            score = np.zeros(own + 1)
            for j, b in np.ndindex(own + 1, begins.size):
                run = range(begins[b], begins[b] + sizes.length)
                shared = len(set(run) & set(range(j * sizes.size, (j + 1) * sizes.size)))
                score[j] += weight[h, i, b] * shared / sizes.stride
            always = {0, own, max(own - 1, 0)}
            rest = sorted(set(range(own + 1)) - always, key=lambda j: -score[j])
            lists.append(always | set(rest[: max(0, sizes.count - len(always))]))
        found.append(lists)
    return found


def test_outputs_choices_and_gradients_are_those_of_the_definition_in_float64():
    with jax.enable_x64(True):
        call = drawn(dtype=np.float64)
        run = jax.jit(lambda *x: nsa.attention(*x, config=SIZES, return_blocks=True))
        out, blocks = run(*call)
        right, listed = definition(*call, SIZES)
        sets = [[{int(b) for b in x if b >= 0} for x in token] for token in np.asarray(blocks[0])]
        assert sets == listed
        np.testing.assert_allclose(out[0], right, rtol=1e-10, atol=1e-12)
        weight = jnp.cos(jnp.arange(out[0].size, dtype=jnp.float64)).reshape(out[0].shape)
        got = jax.grad(lambda *x: (run(*x)[0][0] * weight).sum(), (0, 1, 2, 3))(*call)
        want = jax.grad(
            lambda *x: (definition(*x, SIZES, listed, jnp)[0] * weight).sum(), (0, 1, 2, 3)
        )(*call)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("branch", ["selected", "window"])
def test_everything_selected_or_in_the_window_is_dense_attention(branch):
    q, k, v, _ = drawn()
    sizes = nsa.Config(8, 4, 8, count=20, window=TOKENS)  # more slots than there are blocks
    gates = only(branch, q)
    out = nsa.attention(q, k, v, gates, config=sizes)
    keys, values = getattr(k, branch), getattr(v, branch)
    right = xsake.attention(q, keys, values, mask=xsake.masks.Causal())
    np.testing.assert_allclose(out, right, rtol=1e-4, atol=1e-5)


def test_a_text_shorter_than_a_summary_uses_the_other_branches():
    q, k, v, gates = drawn(5)
    out = nsa.attention(q, k, v, gates, config=SIZES)
    rest = nsa.attention(q, k, v, gates._replace(compressed=None), config=SIZES)
    np.testing.assert_array_equal(out, rest)
    nothing = nsa.attention(q, k, v, only("compressed", q), config=SIZES)
    assert (nothing == 0).all()


@pytest.mark.parametrize("branch", nsa.Gates._fields)
def test_the_future_changes_no_bit_of_the_past(branch):
    q, k, v, _ = drawn()
    run = lambda q, k, v: nsa.attention(q, k, v, only(branch, q), config=SIZES)
    past = 29
    later = lambda x: x.at[:, past:].set(jnp.nan)
    after = run(*jax.tree.map(later, (q, k, v)))
    np.testing.assert_array_equal(run(q, k, v)[:, :past], after[:, :past])


def test_repeated_later_and_negative_blocks_select_nothing_more():
    q, k, v, _ = drawn()
    k, v = k.selected, v.selected
    lists = np.random.default_rng(1).integers(-2, 7, (1, TOKENS, 2, 5)).astype(np.int32)
    out = nsa.selected_attention(q, k, v, lists, block_size=8)
    own = np.arange(TOKENS) // 8
    listed = [
        [{int(b) for b in lists[0, t, h] if 0 <= b <= own[t]} for h in range(2)]
        for t in range(TOKENS)
    ]
    every = nsa.KV(k, k, k), nsa.KV(v, v, v)
    gates = nsa.Gates(*(jnp.full(q.shape[:3], x) for x in (0.0, 1.0, 0.0)))
    right, _ = definition(q, *every, gates, SIZES, listed)
    np.testing.assert_allclose(out[0], right, rtol=1e-4, atol=1e-5)
    counts = np.full((1, TOKENS, 2), 2)
    by_array = nsa.selected_attention(q, k, v, lists, block_counts=counts, block_size=8)
    by_number = nsa.selected_attention(q, k, v, lists, block_counts=2, block_size=8)
    np.testing.assert_allclose(by_array, by_number, rtol=1e-5, atol=1e-6)


def test_counts_per_token_keep_the_best_blocks():
    q, k, v, gates = drawn()
    counts = jnp.asarray(np.random.default_rng(0).integers(0, 6, (1, TOKENS, 2)))
    run = lambda **more: nsa.attention(q, k, v, gates, config=SIZES, return_blocks=True, **more)[1]
    slot = jnp.arange(4)[None, None, None]
    right = jnp.where(slot < counts[..., None], run(), -1)
    np.testing.assert_array_equal(run(block_counts=counts), right)


@pytest.mark.slow  # quicker: the definition in float64
def test_packed_sequences_are_as_if_each_were_alone():
    q, k, v, gates = drawn(64)
    cuts = [0, 21, 21, 47, 60]  # one of them is empty, and four tokens belong to none
    run = jax.jit(lambda cu, *x: nsa.attention(*x, config=SIZES, cu_seqlens=cu, return_blocks=True))
    out, blocks = run(jnp.asarray(cuts), q, k, v, gates)
    assert (out[:, 60:] == 0).all()
    for start, end in ((0, 21), (21, 47), (47, 60)):
        part = jax.tree.map(lambda x, start=start, end=end: x[:, start:end], (q, k, v, gates))
        right, listed = definition(*part, SIZES)
        np.testing.assert_allclose(out[0, start:end], right, rtol=1e-4, atol=1e-5)
        lists = np.asarray(blocks[0, start:end])
        assert [[{int(b) for b in x if b >= 0} for x in token] for token in lists] == listed
    lists = jnp.where(blocks == 0, 0, -1)  # the first block of each sequence, given
    some = nsa.selected_attention(
        q, k.selected, v.selected, lists, block_size=8, cu_seqlens=jnp.asarray(cuts)
    )
    np.testing.assert_allclose(some[:, 21], v.selected[:, 21].repeat(3, 1), rtol=1e-5)
    assert jnp.isfinite(some).all()


def test_heads_may_be_renamed():
    q, k, v, gates = drawn()
    run = lambda *x: nsa.attention(*x, config=SIZES)
    swap = lambda x: None if x is None else jnp.concatenate(jnp.split(x, 2, axis=2)[::-1], axis=2)
    moved = run(*jax.tree.map(swap, (q, k, v, gates)))
    np.testing.assert_allclose(swap(moved), run(q, k, v, gates), rtol=1e-5, atol=1e-6)


def test_a_learned_summary_sees_runs_and_their_positions():
    q, k, v, gates = drawn()
    seen = {}

    def compress(runs, positions):
        seen["shapes"] = runs.shape, positions.shape
        return runs.mean(2)

    out = nsa.attention(q, k, v, gates, config=SIZES, compress=(compress, compress))
    np.testing.assert_allclose(
        out, nsa.attention(q, k, v, gates, config=SIZES), rtol=1e-5, atol=1e-6
    )
    assert seen["shapes"] == ((1, 10, 8, 2, 8), (1, 10))


def test_wrong_calls_are_refused():
    q, k, v, gates = drawn(16)
    none = nsa.Gates(None, None, None)
    cuts, odd = jnp.asarray([0, 16]), gates._replace(window=jnp.ones((1, 16, 2)))
    twice = jax.tree.map(lambda x: x.repeat(2, 0), (q, k, v, gates))
    for call, error, match in (
        (lambda: nsa.Config(length=10, stride=4), ArgumentError, "XSK-102.nsa-stride"),
        (lambda: nsa.Config(count=2), ArgumentError, "XSK-102.nsa-forced"),
        (lambda: nsa.Config(window=0), ArgumentError, "XSK-102.nsa-sizes"),
        (
            lambda: nsa.attention(q, k, v, none),
            ArgumentError,
            "XSK-102.no-branch",
        ),
        (lambda: nsa.attention(q, k, v, odd), ShapeError, "gate 'window'"),
        (lambda: nsa.attention(q[:, :9], k, v, gates), ShapeError, "XSK-101.nsa-keys"),
        (lambda: nsa.attention(*twice, cu_seqlens=cuts), ShapeError, "XSK-101.packed-batch"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_lists_of_another_shape_are_refused():
    """They used to be reshaped into other queries' lists."""
    q, k, v, _ = drawn(tokens=16, q_heads=4)
    k, v = k.selected, v.selected
    own = np.broadcast_to((np.arange(16) // 8)[None, :, None, None], (1, 16, 2, 1))
    wrong = [
        own.repeat(2, 2),  # per query head
        own.repeat(2, 0),  # of another batch
        own[:, :, :1],
        own[:, :1],
        own.swapaxes(1, 2),
        own[..., :0],
        own[..., 0],
        own * 1.0,
    ]
    run = lambda listed, **more: nsa.selected_attention(
        q, k, v, jnp.asarray(listed), block_size=8, **more
    )
    for listed in wrong:
        with pytest.raises(ShapeError, match="`block_indices` has the wrong shape"):
            run(listed)
    for counts in (np.ones(16, int), np.ones((1, 16, 4), int), np.ones((1, 16, 2))):
        with pytest.raises(ShapeError, match="`block_counts` has the wrong shape"):
            run(own, block_counts=counts)
    for number in (0, -1, np.int64(0)):
        with pytest.raises(ArgumentError, match="XSK-102.block-counts"):
            run(own, block_counts=number)
    assert jax.eval_shape(lambda: run(own, block_counts=np.int64(1))).shape == q.shape


@pytest.mark.slow  # quicker: the definition in float64
def test_every_first_block_is_forced_however_many():
    tokens, first = 256, 110
    q = 3 * jax.random.normal(jax.random.key(0), (1, tokens, 1, 8))
    k = v = jax.random.normal(jax.random.key(1), (1, tokens, 1, 8))
    sizes = nsa.Config(2, 2, 2, count=first + 1, first=first, local=1, window=4)
    gates = nsa.Gates(*[jnp.ones((1, tokens, 1))] * 2, None)
    _, found = nsa.attention(q, k, v, gates, config=sizes, return_blocks=True)
    own = tokens // 2 - 1
    assert found[0, -1, 0].tolist() == [own, *range(first)]
