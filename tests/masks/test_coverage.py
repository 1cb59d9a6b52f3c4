"""`coverage` is exact: compared with the tokens of random rectangles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.masks import examples
from xsake.masks import (
    Causal,
    Chunked,
    Coverage,
    Explicit,
    FromFunction,
    Full,
    PerHead,
    Random,
    Segments,
    Sinks,
    Strided,
    Window,
)

LAST = examples.TOKENS + 3


def _rectangles(seed: int = 0, count: int = 400) -> np.ndarray:
    """[4, count] random ends, one-token and whole-plane rectangles among them."""
    rng = np.random.default_rng(seed)
    q, kv = (np.sort(rng.integers(0, LAST, (2, count)), axis=0) for _ in range(2))
    q[1, :20], kv[1, :20] = q[0, :20], kv[0, :20]
    q[:, 20], kv[:, 20] = (0, LAST - 1), (0, LAST - 1)
    return np.concatenate([q, kv]).astype(np.int32)


def _true_codes(mask, ends, head=0) -> np.ndarray:
    grid = np.arange(LAST)
    pairs = mask.allows(grid[:, None], grid, head)
    codes = []
    for q_first, q_last, kv_first, kv_last in ends.T:
        part = pairs[q_first : q_last + 1, kv_first : kv_last + 1]
        codes.append(Coverage.ALL if part.all() else Coverage.SOME if part.any() else Coverage.NONE)
    return np.array(codes, np.int8)


def _assert_exact(got, expected):
    known = got != Coverage.UNKNOWN
    np.testing.assert_array_equal(got[known], expected[known])


def _heads(mask):
    return np.arange(mask.heads or 1, dtype=np.int32)[:, None]


@pytest.fixture(scope="module")
def jitted():
    """The codes of all masks with traced rectangles and heads, from one compilation."""

    def codes(ends, heads):
        return [mask.coverage(*ends, head) for mask, head in zip(examples.ALL, heads, strict=True)]

    heads = [_heads(mask) for mask in examples.ALL]
    return dict(zip(examples.ALL, jax.jit(codes)(tuple(_rectangles()), heads), strict=True))


@pytest.mark.parametrize("mask", examples.ALL, ids=repr)
def test_coverage_is_exact_in_numpy_and_under_jit(mask, jitted):
    ends = _rectangles()
    head = _heads(mask)
    got = mask.coverage(*ends, head)
    assert got.dtype == np.int8 and got.shape == (head.size, ends.shape[1])
    for index in range(head.size):
        _assert_exact(got[index], _true_codes(mask, ends, index))
        if mask.heads is not None:
            alone = mask.for_head(index).coverage(*ends)
            np.testing.assert_array_equal(alone, mask.coverage(*ends, index))
    assert jitted[mask].dtype == jnp.int8
    np.testing.assert_array_equal(jitted[mask], got)


@given(mask=examples.composites(), seed=st.integers(0, 2**32 - 1))
def test_coverage_of_any_composite_is_exact(mask, seed):
    ends = _rectangles(seed, count=60)
    _assert_exact(mask.coverage(*ends), _true_codes(mask, ends))


@given(mask=examples.formulas(), seed=st.integers(0, 2**32 - 1))
def test_formulas_always_know_unless_they_are_unions(mask, seed):
    ends = _rectangles(seed, count=60)
    got = mask.coverage(*ends)
    if type(mask).__name__ != "BigBird":
        assert not (got == Coverage.UNKNOWN).any()


@given(members=st.lists(examples.formulas(), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_heads_together_answer_as_heads_alone(members, seed):
    ends = _rectangles(seed, count=40)
    head = np.arange(len(members))[:, None]
    alone = np.stack([member.coverage(*ends) for member in members])
    together = PerHead(members).coverage(*ends, head)
    known = (alone != Coverage.UNKNOWN) & (together != Coverage.UNKNOWN)
    np.testing.assert_array_equal(together[known], alone[known])
    np.testing.assert_array_equal(together != Coverage.UNKNOWN, alone != Coverage.UNKNOWN)


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Window(left=3, right=2),
        Window(left=1, right=0) | Window(left=0, right=3),
        Segments([5] * 9 + [2] * 6 + [-1] * 4),
        Segments([5] * 9 + [2] * 6, [5] * 3 + [7] * 4 + [2] * 9),
        Random(keep=0.3, cell=2),
    ],
    ids=repr,
)
def test_common_masks_are_never_unknown(mask):
    assert not (mask.coverage(*_rectangles()) == Coverage.UNKNOWN).any()


def test_codes_combine_as_promised():
    # Rectangle of queries 4..7 and keys 4..7.
    none, some, every = Sinks(4), Causal(), Full()
    also_some = Strided(3)
    unknown = FromFunction(examples.is_odd_sum)

    def code(mask):
        return Coverage(mask.coverage(4, 7, 4, 7).item())

    assert [code(m) for m in (none, some, every, unknown)] == list(Coverage)
    assert code(unknown & none) == Coverage.NONE and code(unknown | every) == Coverage.ALL
    assert code(some & every) == Coverage.SOME and code(some | none) == Coverage.SOME
    assert code(some & also_some) == Coverage.UNKNOWN == code(some | also_some)
    assert code(~none) == Coverage.ALL and code(~every) == Coverage.NONE
    assert code(~some) == Coverage.SOME and code(~unknown) == Coverage.UNKNOWN
    assert code(Explicit(np.ones((9, 9), bool))) == Coverage.UNKNOWN


def test_a_traced_head_of_sixteen_alike_costs_as_little_as_one():
    def operations(mask):
        def rule(q, kv, head):
            return mask.allows(q, kv, head)

        positions = jnp.arange(8, dtype=jnp.int32)
        return len(jax.make_jaxpr(rule)(positions, positions, jnp.int32(0)).eqns)

    two = PerHead([Window(n, 0) & Chunked(n + 1) for n in range(1, 3)])
    sixteen = PerHead([Window(n, 0) & Chunked(n + 1) for n in range(1, 17)])
    assert operations(sixteen) == operations(two)
