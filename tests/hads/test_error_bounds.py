"""Bounds on dropped mass are never broken, audits are exact, and promised choices are kept."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.errors import ArgumentError, ShapeError
from xsake.hads import error_bounds
from xsake.hads.error_bounds import (
    BoundScope,
    audit,
    audited_choice,
    bounded_choice,
    dropped_bound,
    kl_bound,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call; few of them, for each is compiled anew."""

    batch: int
    tokens: int
    kv_heads: int
    group: int
    dim: int
    block: int
    run: int
    dtype: str
    scale: float
    softcap: float | None = None

    @property
    def blocks(self):
        return -(-self.tokens // self.block)

    @property
    def settings(self):
        return {"block": self.block, "scale": self.scale, "softcap": self.softcap}

    @property
    def grid(self):
        return (self.batch, self.kv_heads * self.group, self.blocks, self.blocks)


ODD = Shape(2, 29, 2, 2, 8, 8, 4, "float32", 0.35)
CAPPED = Shape(1, 27, 1, 3, 5, 4, 2, "bfloat16", -0.7, softcap=5.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Call:
    """Arrays of a shape."""

    shape: Shape
    q: jax.Array
    k: jax.Array
    chosen: np.ndarray

    @property
    def arrays(self):
        return self.q, self.k, self.chosen

    def logits(self):
        """[B, T, Hq, T] in float64, -inf for hidden keys."""
        q, k = (np.asarray(x).astype(np.float64) for x in (self.q, self.k))
        found = np.einsum("bqhd,bkhd->bqhk", q, k.repeat(self.shape.group, axis=2))
        found, softcap = self.shape.scale * found, self.shape.softcap
        if softcap is not None:
            found = softcap * np.tanh(found / softcap)
        return np.where(np.tri(self.shape.tokens, dtype=bool)[:, None], found, -np.inf)

    def log_masses(self):
        """Of blocks, [B, T, Hq, Nk]."""
        logits = self.logits()
        logits -= np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        missing = [(0, 0)] * 3 + [(0, -self.shape.tokens % self.shape.block)]
        padded = np.pad(logits, missing, constant_values=-np.inf)
        blocks = padded.reshape(*logits.shape[:3], self.shape.blocks, self.shape.block)
        return np.logaddexp.reduce(blocks, axis=-1)

    def masses(self):
        return np.exp(self.log_masses())

    def by_query(self, chosen):
        """[B, T, Hq, Nk]: the choice of each query, which is that of its row."""
        repeated = np.moveaxis(np.asarray(chosen), 1, 2).repeat(self.shape.block, axis=1)
        return repeated[:, : self.shape.tokens]

    def dropped(self, chosen=None):
        """The true mass of the blocks that are not chosen."""
        kept = self.by_query(self.chosen if chosen is None else chosen)
        return np.minimum(np.where(kept, 0, self.masses()).sum(axis=-1), 1)


def drawn(shape, *, seed, size, keys, density, diagonal):
    random = np.random.default_rng(seed)
    heads = shape.kv_heads * shape.group
    q = random.normal(size=(shape.batch, shape.tokens, heads, shape.dim))
    k = random.normal(size=(shape.batch, shape.tokens, shape.kv_heads, shape.dim))
    if keys == "alike":
        k = 2 + 0.1 * k
    elif keys == "constant":
        k[:] = k[:, :1]
    elif keys == "outlier":
        k[:, random.integers(shape.tokens)] *= 50
    elif keys == "short":
        q, k = 1e15 * q, 1e-15 * k
    chosen = (random.random(shape.grid) < density) & np.tri(shape.blocks, dtype=bool)
    if diagonal:
        chosen |= np.eye(shape.blocks, dtype=bool)
    return Call(shape, *(jnp.asarray(x, shape.dtype) for x in (size * q, k)), chosen)


def calls(shapes=(ODD, CAPPED), sizes=(0.0, 0.1, 1.0, 10.0, 1e4)):
    return st.builds(
        drawn,
        st.sampled_from(shapes),
        seed=st.integers(0, 2**16),
        size=st.sampled_from(sizes),
        keys=st.sampled_from(["normal", "alike", "constant", "outlier", "short"]),
        density=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        diagonal=st.booleans(),
    )


def bound_of(call, chosen=None):
    chosen = call.chosen if chosen is None else chosen
    found = dropped_bound(call.q, call.k, chosen, run=call.shape.run, **call.shape.settings)
    assert found.shape == call.q.shape[:3] and found.dtype == jnp.float32
    return np.asarray(found)


# Bounds


@hypothesis.settings(max_examples=40)
@hypothesis.given(call=calls())
def test_no_query_drops_more_than_its_bound(call):
    bound, true = bound_of(call), call.dropped()
    assert np.isfinite(bound).all() and (bound >= 0).all() and (bound <= 1).all()
    assert (true <= bound).all()
    sees_all = np.asarray(call.chosen == np.tri(call.shape.blocks, dtype=bool)).all(axis=-1)
    rows = np.moveaxis(sees_all, 1, 2).repeat(call.shape.block, axis=1)[:, : call.shape.tokens]
    assert not bound[rows].any()


@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_the_bound_of_runs_of_equal_keys_is_the_mass_itself(size):
    call = drawn(ODD, seed=1, size=size, keys="normal", density=0.4, diagonal=True)
    starts = np.arange(ODD.tokens) // ODD.run * ODD.run
    call = dataclasses.replace(call, k=call.k[:, starts])
    np.testing.assert_allclose(bound_of(call), call.dropped(), rtol=2e-3)


@hypothesis.given(call=calls(sizes=(0.1, 1.0)), seed=st.integers(0, 99))
def test_bounds_never_rise_when_blocks_are_added(call, seed):
    more = np.random.default_rng(seed).random(call.shape.grid) < 0.4
    more = call.chosen | (more & np.tri(call.shape.blocks, dtype=bool))
    assert (bound_of(call, more) <= bound_of(call) * (1 + 1e-5)).all()


def test_the_denominator_may_come_from_attention_that_ran_anyway():
    call = drawn(ODD, seed=2, size=0.3, keys="alike", density=0.5, diagonal=True)
    kept = np.logaddexp.reduce(call.logits(), axis=-1) + np.log1p(-call.dropped())
    kept = jnp.asarray(kept, jnp.float32)
    given = dropped_bound(*call.arrays, run=ODD.run, kept_lse=kept, **ODD.settings)
    np.testing.assert_allclose(given, bound_of(call), rtol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1.0, 2e38])
def test_lengths_are_right_in_the_whole_range_of_floats(size):
    x = np.array([[1.0, 1.0], [0.0, -1.0], [1.0, 0.5]], np.float32) * np.float32(size)
    expected = np.sqrt(np.square(x.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(jax.jit(error_bounds.norm)(x), expected, rtol=1e-6)


def test_nothing_is_proved_where_logits_leave_the_range_of_floats():
    call = drawn(ODD, seed=3, size=1e30, keys="normal", density=0.0, diagonal=True)
    bound = bound_of(dataclasses.replace(call, k=call.k * 1e30))
    assert (bound[:, : ODD.block] == 0).all() and (bound[:, ODD.block :] == 1).all()


def test_a_bound_on_mass_is_one_on_divergence():
    mass = jnp.array([0.0, 0.5, 1.0])
    np.testing.assert_allclose(kl_bound(mass), [0, np.log(2), np.inf], rtol=1e-6)


# Audits


@hypothesis.given(call=calls(shapes=(ODD,), sizes=(0.1, 1.0, 10.0)))
def test_audits_are_exact(call):
    found = audit(*call.arrays, **ODD.settings)
    mass, kl = np.asarray(found.mass), np.asarray(found.kl)
    assert np.isfinite(mass).all() and not np.isnan(kl).any()
    reach = np.linalg.norm(call.q, axis=-1).max() * np.linalg.norm(call.k, axis=-1).max()
    tolerance = 1e-5 * (1 + reach)
    np.testing.assert_allclose(mass, call.dropped(), rtol=tolerance, atol=1e-30)
    kept = np.where(call.by_query(call.chosen), call.log_masses(), -np.inf)
    identity = -np.logaddexp.reduce(kept, axis=-1)
    np.testing.assert_allclose(kl, identity, rtol=tolerance, atol=tolerance)
    assert found.worst_mass == mass.max() and found.worst_kl == kl.max()
    np.testing.assert_allclose(found.mean_mass, mass.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.mean_kl, kl.mean(), rtol=1e-5)


def test_rows_are_visited_a_few_at_a_time_and_all_of_them(monkeypatch):
    monkeypatch.setattr(error_bounds, "CHUNK_VALUES", 1000)
    call = drawn(ODD, seed=4, size=1.0, keys="normal", density=0.5, diagonal=False)
    seen = []

    def visit(rows):
        seen.append(rows.q.shape[1])
        lengths = error_bounds.norm(rows.q) + rows.position[None, :, None]
        return lengths + rows.chosen_by_query().sum(-1)

    found = error_bounds.map_rows(visit, call.q, jnp.asarray(call.chosen), block=8, columns=4)
    assert 2 * 4 * 4 * max(seen) < 2000 and max(seen) < ODD.tokens
    expected = np.linalg.norm(call.q, axis=-1) + np.arange(ODD.tokens)[None, :, None]
    counts = np.moveaxis(call.chosen.sum(axis=-1), 1, 2).repeat(8, axis=1)
    np.testing.assert_allclose(found[:, :29], expected + counts[:, :29], rtol=1e-5)


# Promises


def by_row(values, shape):
    """[B, T, Hq, ...] -> a list of rows [B, queries, Hq, ...]."""
    return [values[:, i : i + shape.block] for i in range(0, shape.tokens, shape.block)]


def assert_kept(call, chosen, eps, promise):
    chosen = np.asarray(chosen)
    assert (chosen >= call.chosen).all()
    assert not chosen[..., ~np.tri(call.shape.blocks, dtype=bool)].any()
    true = call.dropped(chosen)
    if promise == BoundScope.EVERY_QUERY:
        assert (true <= eps).all()
    else:
        assert all((row.mean(axis=1) <= eps).all() for row in by_row(true, call.shape))


@hypothesis.given(call=calls(), eps=st.sampled_from([0.03, 0.3, 0.7]))
def test_bounded_choices_keep_their_promise(call, eps):
    found = bounded_choice(*call.arrays, eps, run=call.shape.run, **call.shape.settings)
    assert_kept(call, found, eps, BoundScope.EVERY_QUERY)


@pytest.mark.parametrize("promise", BoundScope)
@hypothesis.given(call=calls(shapes=(ODD,)), eps=st.sampled_from([0.03, 0.3, 0.7]))
def test_audited_choices_keep_their_promise(promise, call, eps):
    found = audited_choice(*call.arrays, eps, scope=promise, **ODD.settings)
    assert_kept(call, found, eps, promise)


@pytest.mark.parametrize("promise", BoundScope)
@pytest.mark.parametrize("seed", range(3))
def test_audited_choices_add_the_heaviest_blocks_and_no_more_than_needed(seed, promise):
    call = drawn(ODD, seed=seed, size=1.0, keys="normal", density=0.2, diagonal=True)
    found = np.asarray(audited_choice(*call.arrays, 0.2, scope=promise, **ODD.settings))
    over = np.max if promise == BoundScope.EVERY_QUERY else np.mean
    for i, masses in enumerate(by_row(call.masses(), ODD)):
        for b, h in np.ndindex(masses.shape[0], masses.shape[2]):
            expected, own = call.chosen[b, h, i].copy(), masses[b, :, h]
            for block in np.argsort(-over(own, axis=0)):
                if over(own[:, ~expected].sum(axis=1)) <= 0.2:
                    break
                expected[block] = True
            assert (found[b, h, i] == expected).all()


@pytest.mark.parametrize("seed", range(3))
def test_bounded_choices_need_every_block_that_they_add(seed):
    call = drawn(ODD, seed=seed, size=0.3, keys="alike", density=0.2, diagonal=True)
    # One denominator for all choices: the proof does not count what added blocks keep.
    settings = {"run": ODD.run, "kept_lse": jnp.full(call.q.shape[:3], 5.0), **ODD.settings}
    found = np.asarray(bounded_choice(*call.arrays, 0.1, **settings))
    assert (call.chosen.sum() < found.sum()) and not found[..., np.tri(4, dtype=bool)].all()
    assert (np.asarray(dropped_bound(call.q, call.k, found, **settings)) <= 0.1).all()
    added = found & ~call.chosen
    for place in np.argwhere(added):
        fewer = found.copy()
        fewer[tuple(place)] = False
        bound = np.asarray(dropped_bound(call.q, call.k, fewer, **settings))
        assert bound.max() > 0.1


@pytest.mark.parametrize(("density", "eps"), [(0.3, 1.0), (0.0, 0.3)])
def test_the_largest_limit_adds_nothing_and_an_empty_choice_gets_every_block(density, eps):
    call = drawn(ODD, seed=7, size=1.0, keys="normal", density=density, diagonal=density > 0)
    found = np.asarray(bounded_choice(*call.arrays, eps, run=ODD.run, **ODD.settings))
    expected = call.chosen if eps == 1.0 else np.tri(ODD.blocks, dtype=bool)
    assert (found == expected).all()


# Arguments


SCALED = {"block": 8, "scale": 1.0}


@pytest.mark.parametrize(
    ("function", "arguments", "error", "match"),
    [
        (dropped_bound, {**SCALED, "run": 3}, ArgumentError, "run"),
        (audit, {"block": 4, "scale": 1.0}, ShapeError, "shapes of chosen"),
        (audit, {**SCALED, "softcap": 0.0}, ArgumentError, "softcap"),
        *(
            (function, {**SCALED, "eps": eps}, ArgumentError, "eps is out of range")
            for function in (bounded_choice, audited_choice)
            for eps in (0.0, -0.1, 1.5, float("nan"))
        ),
    ],
)
def test_arguments_must_fit(function, arguments, error, match):
    call = drawn(ODD, seed=0, size=1.0, keys="normal", density=1.0, diagonal=True)
    with pytest.raises(error, match=match):
        function(*call.arrays, **arguments)
