"""Attention statistics: every implementation against float64, the laws they obey, their memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.lanes import gate
from xsake.errors import ArgumentError, ShapeError
from xsake.kernels.statistics import Statistics, block_statistics, xla
from xsake.kernels.statistics.api import OP, _run, canonicalize_args
from xsake.masks import Causal, Explicit, Full, PerHead, Random, Sinks, Window
from xsake.testing.budget import check_error
from xsake.testing.cases import ConformanceCase

NAMES = [name for name, reason in OP.implementations().items() if reason is None]
OFTEN = [name for name in NAMES if name in ("xla", "native_cpu")]
each_implementation = pytest.mark.parametrize("implementation", gate(OFTEN, NAMES))

LOCAL = Causal() & (Window(left=20, right=0) | Sinks(count=3))
HOLES = np.random.default_rng(7).random((90, 75)) < 0.3
HOLES[[0, 5, 41, 89]], HOLES[16:32], HOLES[:, 48:64] = False, False, False
TWO_BY_TWO = {"q_heads": 4, "kv_heads": 2, "batch": 2}

# (case, keys per block). Few, because each one is a compilation.
CASES = [
    (
        ConformanceCase("many_spans", Causal(), q_tokens=600, kv_tokens=600, q_heads=6, head_dim=8),
        48,
    ),
    (
        ConformanceCase(
            "sharp_empty_rows", Explicit(HOLES), q_tokens=90, kv_tokens=75, logits=30.0
        ),
        1000,
    ),
    (ConformanceCase("decode", Full(), q_tokens=1, kv_tokens=100, scale=1.0), 30),
    (
        ConformanceCase(
            "everything",
            PerHead([Full(), LOCAL, Random(keep=0.3, seed=1, cell=4), Window(left=0, right=9)]),
            q_tokens=77, kv_tokens=93, dtype="bfloat16", softcap=1.5, scale=0.4,
            segments=(((30, 20, 27), (30, 20, 27)), ((60,), (60,))), **TWO_BY_TWO,
        ),
        25,
    ),
    (
        ConformanceCase(
            "late_queries", PerHead([LOCAL, Causal()]), q_tokens=33, kv_tokens=93, dtype="float16",
            q_positions=(tuple(range(60, 93)), tuple(range(33))),
            kv_positions=tuple(int(p) for p in np.random.default_rng(5).permutation(93)),
            **TWO_BY_TWO,
        ),
        8,
    ),
]  # fmt: skip
BY_NAME = {case.name: (case, block) for case, block in CASES}


def dense(case, operands, block, kind):
    """The definition in NumPy, in one precision: statistics by name."""
    q, k = (operands[name].astype(kind) for name in ("q", "k"))
    k = np.repeat(k, case.q_heads // case.kv_heads, axis=2)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * kind(scale)
    s = s if case.softcap is None else kind(case.softcap) * np.tanh(s / kind(case.softcap))
    s = np.where(case.allowed, s, -np.inf).astype(kind)
    parts = [s[..., first : first + block] for first in range(0, case.kv_tokens, block)]
    lse = log_sum(s)
    p = np.exp(s - np.where(lse == -np.inf, kind(0), lse)[..., None])
    mean = (p * np.where(case.allowed, s, kind(0))).sum(-1)
    found = {
        "lse": lse,
        "entropy": np.where(lse == -np.inf, kind(0), lse) - mean,
        "block_lse": np.stack([log_sum(part) for part in parts], axis=-1),
    }
    return {name: np.swapaxes(value, 1, 2) for name, value in found.items()}


def log_sum(s):
    peak = s.max(-1)
    origin = np.where(peak == -np.inf, s.dtype.type(0), peak)
    with np.errstate(divide="ignore"):
        return origin + np.log(np.exp(s - origin[..., None]).sum(-1))


def run(case, block, inputs, implementation, **changed):
    if implementation == "native_cpu" and isinstance(case.rule, Explicit):
        pytest.skip("it evaluates no table of pairs")
    x = {"q": inputs.operands["q"], "k": inputs.operands["k"], **inputs.integers, **changed}
    found = block_statistics(
        **x,
        block_kv=block,
        mask=case.rule,
        scale=case.scale,
        softcap=case.softcap,
        implementation=implementation,
    )
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize(("case", "block"), CASES, ids=BY_NAME)
def test_every_statistic_is_within_the_error_budget(case, block, implementation):
    inputs = case.inputs()
    found = run(case, block, inputs, implementation)
    truth = dense(case, inputs.operands, block, np.float64)
    orders = [np.random.default_rng(seed).permutation(case.head_dim) for seed in range(3)]
    plain = [
        dense(case, {n: inputs.operands[n][..., order] for n in ("q", "k")}, block, np.float32)
        for order in orders
    ]
    for name, right in truth.items():
        got = getattr(found, name)
        assert got.dtype == np.float32  # for narrower inputs too
        worst = np.stack([one[name] for one in plain])
        report = check_error(name, got, worst, right, dtype="float32", backstop=case.logits == 1.0)
        assert report.failure is None
    assert (found.entropy >= 0).all()


def test_the_table_reaches_what_it_promises():
    cases = [case for case, _ in CASES]
    assert {case.dtype for case in cases} == {"float32", "bfloat16", "float16"}
    assert any(not case.allowed.any(-1).all() for case in cases), "no empty row"
    assert any(case.kv_tokens % block for case, block in CASES), "no block sticks out"
    assert any(case.kv_tokens > 2 * xla.CPU.keys for case in cases), "no row of many spans"
    assert {case.q_heads // case.kv_heads for case in cases} == {1, 2, 3}


Q_TOKENS, KV_TOKENS, BLOCK, DIM = 24, 40, 8, 4
positions = lambda tokens: st.lists(st.integers(0, 40), min_size=tokens, max_size=tokens)
segments = lambda tokens: st.lists(st.integers(-1, 2), min_size=tokens, max_size=tokens)


def drawn(q, k, q_at, kv_at, q_ids, kv_ids, implementation):
    """One compilation for all that the tests below draw."""
    return block_statistics(
        q,
        k,
        block_kv=BLOCK,
        q_positions=np.array(q_at),
        kv_positions=np.array(kv_at),
        q_segment_ids=np.broadcast_to(q_ids, (1, Q_TOKENS)),
        kv_segment_ids=np.broadcast_to(kv_ids, (1, KV_TOKENS)),
        implementation=implementation,
    )


@each_implementation
@given(
    seed=st.integers(0, 2**16),
    size=st.sampled_from([0.0, 1.0, 100.0]),
    q_at=positions(Q_TOKENS),
    kv_at=positions(KV_TOKENS),
    q_ids=segments(Q_TOKENS),
    kv_ids=segments(KV_TOKENS),
)
@example(  # all pairs allowed by the mask, and all of them padding
    seed=0,
    size=1.0,
    q_at=[40] * Q_TOKENS,
    kv_at=[0] * KV_TOKENS,
    q_ids=[-1] * Q_TOKENS,
    kv_ids=[-1] * KV_TOKENS,
)
def test_masses_add_up_whoever_sees_whom(implementation, seed, size, q_at, kv_at, q_ids, kv_ids):
    rng = np.random.default_rng(seed)
    q = (size * rng.standard_normal((1, Q_TOKENS, 2, DIM))).astype(np.float32)
    k = rng.standard_normal((1, KV_TOKENS, 1, DIM)).astype(np.float32)
    found = drawn(q, k, q_at, kv_at, q_ids, kv_ids, implementation)
    pairs = np.greater_equal.outer(q_at, kv_at) & np.equal.outer(q_ids, kv_ids)
    pairs &= np.array(q_ids)[:, None] >= 0
    visible = np.broadcast_to(pairs.sum(-1)[None, :, None], found.lse.shape)
    counts = pairs.reshape(Q_TOKENS, -1, BLOCK).sum(-1)[None, :, None]
    seen, mass = visible > 0, np.asarray(found.mass())
    lse, entropy, block_lse = map(np.asarray, found)

    assert np.array_equal(np.isfinite(lse), seen) and (lse[~seen] == -np.inf).all()
    assert np.array_equal(np.isfinite(block_lse), np.broadcast_to(counts > 0, mass.shape))
    assert (block_lse[np.broadcast_to(counts == 0, mass.shape)] == -np.inf).all()
    rounding = 4e-7 * (1 + np.abs(np.where(seen, lse, 0)).max())
    np.testing.assert_allclose(mass.sum(-1), seen, atol=rounding)
    joint = np.asarray(jax.nn.logsumexp(block_lse, axis=-1))
    np.testing.assert_allclose(joint[seen], lse[seen], atol=rounding)
    most = np.log(np.maximum(visible, 1))
    assert np.isfinite(entropy).all() and (entropy[~seen] == 0).all()
    assert (entropy >= -rounding).all() and (entropy <= most + rounding).all()
    if size == 0.0:
        np.testing.assert_allclose(entropy, most, atol=rounding)


def filled(array, where, value):
    return np.where(where, np.asarray(value, array.dtype), array)


@each_implementation
@pytest.mark.parametrize("name", ["sharp_empty_rows", "everything", "late_queries"])
def test_excluded_positions_never_change_a_bit(name, implementation):
    case, block = BY_NAME[name]
    inputs = case.inputs()
    clean = run(case, block, inputs, implementation)
    group = case.q_heads // case.kv_heads
    seen = case.allowed.any(2).reshape(case.batch, case.kv_heads, group, -1).any(2)
    keys = np.moveaxis(~seen, 1, 2)[..., None]
    queries = np.moveaxis(~case.allowed.any(-1), 1, 2)[..., None]
    assert keys.any() or queries.any()
    for poison in (np.nan, np.inf, -np.inf):
        k = filled(inputs.operands["k"], keys, poison)
        q = filled(inputs.operands["q"], queries, poison)
        dirty = run(case, block, inputs, implementation, q=q, k=k)
        assert [x.tobytes() for x in clean] == [x.tobytes() for x in dirty]


@each_implementation
def test_a_poisoned_key_reaches_only_the_queries_that_see_it_and_only_in_its_block(implementation):
    case, block = BY_NAME["late_queries"]
    inputs = case.inputs()
    clean = run(case, block, inputs, implementation)
    key = case.kv_positions.index(75)  # some of the queries from 60 to 92 see it
    k = inputs.operands["k"].copy()
    k[0, key, 1] = np.nan
    dirty = run(case, block, inputs, implementation, k=k)
    rows = np.moveaxis(case.allowed[..., key], 1, 2).copy()
    rows[1:], rows[:, :, :2] = False, False
    assert rows.any() and not rows[0, :, 2:].all()
    for name in ("lse", "entropy"):
        assert np.isnan(getattr(dirty, name)[rows]).all()
        assert getattr(dirty, name)[~rows].tobytes() == getattr(clean, name)[~rows].tobytes()
    spoiled = np.zeros(clean.block_lse.shape, bool)
    spoiled[rows, key // block] = True
    assert np.isnan(dirty.block_lse[spoiled]).all()
    assert dirty.block_lse[~spoiled].tobytes() == clean.block_lse[~spoiled].tobytes()


@each_implementation
def test_a_block_far_below_its_row_keeps_its_digits(implementation):
    """Its mass is 0 in float32, and its own log-sum-exp is still right."""
    case, block = BY_NAME["decode"]
    inputs = case.inputs()
    q, k = (np.zeros_like(inputs.operands[name]) for name in ("q", "k"))
    q[..., 0] = 1
    k[0, :30, :, 0], k[0, 30:60, :, 0], k[0, 60:90, :, 0] = 3e4, -3e4, np.arange(30)[:, None]
    found = run(case, block, inputs, implementation, q=q, k=k)
    same, near = np.log(30), np.log(np.exp(np.arange(30.0)).sum())
    expected = [3e4 + same, same - 3e4, near, np.log(10)]
    np.testing.assert_allclose(found.block_lse[0, 0, 0], expected, rtol=2e-7)
    np.testing.assert_allclose(found.entropy, same, rtol=1e-6)
    np.testing.assert_allclose(found.mass()[0, 0, 0], [1, 0, 0, 0], atol=2e-3)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_float64_is_computed_in_float64(implementation):
    with jax.enable_x64(True):
        case, block = ConformanceCase("wide", LOCAL, dtype="float64", head_dim=8, softcap=4.0), 16
        inputs = case.inputs()
        found = run(case, block, inputs, implementation)
        for name, right in dense(case, inputs.operands, block, np.float64).items():
            got = getattr(found, name)
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, right, rtol=1e-13, atol=1e-13)


def test_pieces_of_the_queries_give_the_statistics_of_the_whole_and_compile_once():
    tokens = 3 * Q_TOKENS
    sizes = {"q_tokens": tokens, "kv_tokens": KV_TOKENS, "kv_heads": 1, "head_dim": DIM}
    case = ConformanceCase("streamed", Causal(), **sizes)
    inputs = case.inputs()
    whole = dense(case, inputs.operands, BLOCK, np.float64)
    compiled = set()
    for first in range(0, tokens, Q_TOKENS):
        part = slice(first, first + Q_TOKENS)
        q, at = inputs.operands["q"][:, part], np.arange(tokens)[part]
        found = drawn(q, inputs.operands["k"], at, np.arange(KV_TOKENS), [0], [0], None)
        compiled.add(_run._cache_size())
        for name, right in whole.items():
            np.testing.assert_allclose(getattr(found, name), right[:, part], rtol=1e-6, atol=1e-6)
    assert len(compiled) == 1


def test_vmap_equals_one_at_a_time():
    case, block = BY_NAME["decode"]
    several = [case.inputs(seed) for seed in range(3)]
    one = lambda q, k: block_statistics(q, k, block_kv=block, mask=case.rule, scale=case.scale)
    operands = (np.stack([x.operands[name] for x in several]) for name in ("q", "k"))
    together = jax.jit(jax.vmap(one))(*operands)
    for i, inputs in enumerate(several):
        for got, right in zip(together, run(case, block, inputs, None), strict=True):
            np.testing.assert_allclose(got[i], right, rtol=1e-6, atol=1e-6)


def test_no_gradient_flows():
    case, block = BY_NAME["decode"]
    static = {"block_kv": block, "mask": case.rule, "scale": case.scale}
    total = lambda q, k: block_statistics(q, k, **static).entropy.sum()
    operands = case.inputs().operands
    gradients = jax.grad(total, argnums=(0, 1))(operands["q"], operands["k"])
    assert all((x == 0).all() for x in gradients)


def spans_visited(q_tokens, kv_tokens, mask, **integers):
    q, k = jnp.zeros((1, q_tokens, 1, 4)), jnp.zeros((1, kv_tokens, 1, 4))
    names = ("q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids")
    integers = tuple(integers.get(name) for name in names)
    operands, problem = canonicalize_args(q, k, integers, mask, 64, None, None)
    cut = xla.cut_for(operands, problem, xla.CPU)
    rows = jax.jit(lambda: xla.list_spans(operands, problem, cut).rows)()
    return int(rows.partial.sum()), int(rows.full.sum())


def test_spans_that_the_mask_hides_are_not_visited():
    chunks, spans = 4096 // xla.CPU.queries, 4096 // xla.CPU.keys
    assert spans_visited(4096, 4096, Full()) == (0, chunks * spans)
    partial, full = spans_visited(4096, 4096, Causal())
    assert partial == chunks and full == chunks * (spans - 1) // 2
    at = {"q_positions": np.arange(4096)}
    assert spans_visited(4096, 4096, Causal(), **at) == (partial, full)
    late = {"q_positions": np.arange(1024, 1280)}
    assert sum(spans_visited(256, 4096, Causal(), **late)) == 2 * 1024 // xla.CPU.keys + 2
    one_each = {"q_segment_ids": np.repeat(np.arange(spans), xla.CPU.keys)[None]}
    assert spans_visited(4096, 4096, Full(), **one_each) == (0, chunks)


def test_memory_is_that_of_tokens_times_blocks_and_not_of_pairs():
    tokens, blocks = 16_384, 16_384 // 64
    array = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    call = jax.jit(functools.partial(block_statistics, block_kv=64))
    used = call.lower(array, array).compile().memory_analysis().temp_size_in_bytes
    assert used <= 3 * tokens * blocks * 4 <= 0.05 * tokens * tokens * 4


def test_an_empty_query_has_no_mass():
    empty = jnp.full((1, 1, 1), -jnp.inf)
    found = Statistics(empty, jnp.zeros_like(empty), jnp.full((1, 1, 1, 3), -jnp.inf))
    assert (np.asarray(found.mass()) == 0).all()


GIVEN = {"q": np.zeros((2, 6, 4, 8), np.float32), "k": np.zeros((2, 9, 2, 8), np.float32)}
BAD_ARGUMENTS = {
    "no such implementation": {"implementation": "cuda"},
    "block_kv must be positive": {"block_kv": 0},
    "softcap must be positive": {"softcap": -1.0},
    "finite number": {"scale": float("nan")},
    "both queries and keys": {"q_segment_ids": np.zeros((2, 6), np.int32)},
    "match neither query nor kv heads": {"mask": PerHead([Causal()] * 3)},
    "`q_positions` does not fit": {"q_positions": np.arange(9)},
}
BAD_ARRAYS = {
    "same head dimension": {"k": GIVEN["k"][..., :4]},
    "multiple of kv heads": {"q": GIVEN["q"][:, :, :3]},
    "share one floating dtype": {"k": GIVEN["k"].astype(np.float16)},
}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_bad_arguments_are_explained(what):
    with pytest.raises((ArgumentError, ShapeError), match=what):
        block_statistics(**{**GIVEN, "block_kv": 3, **BAD_ARGUMENTS[what]})


@pytest.mark.parametrize("what", BAD_ARRAYS)
def test_bad_arrays_are_explained(what):
    arrays = GIVEN | BAD_ARRAYS[what]
    with pytest.raises(ShapeError, match=what):
        canonicalize_args(arrays["q"], arrays["k"], (None,) * 4, Causal(), 3, None, None)
