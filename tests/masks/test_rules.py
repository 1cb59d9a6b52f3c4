"""`allows` against the definitions in `xsake.testing.expand`, in NumPy, in JAX and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from tests.masks import examples
from xsake.errors import MaskError, ShapeError
from xsake.masks import (
    BigBird,
    Causal,
    Chunked,
    Coverage,
    FromFunction,
    Full,
    Longformer,
    PerHead,
    Random,
    Sinks,
    Strided,
    Window,
)
from xsake.testing import expand

Q = np.arange(examples.TOKENS, dtype=np.int32)[:, None]
KV = np.arange(examples.TOKENS + 3, dtype=np.int32)[None, :]


def _expected(mask):
    return np.stack([expand.pairs(mask, Q, KV, head) for head in range(mask.heads or 1)])


def _heads(mask):
    return np.arange(mask.heads or 1, dtype=np.int32)[:, None, None]


@pytest.fixture(scope="module")
def jitted():
    """The answers of all masks with traced positions and heads, from one compilation."""

    def answers(q, kv, heads):
        return [mask.allows(q, kv, head) for mask, head in zip(examples.ALL, heads, strict=True)]

    heads = [_heads(mask) for mask in examples.ALL]
    return dict(zip(examples.ALL, jax.jit(answers)(Q, KV, heads), strict=True))


@pytest.mark.parametrize("mask", examples.ALL, ids=repr)
def test_every_mask_follows_its_definition_in_numpy_and_under_jit(mask, jitted):
    expected = _expected(mask)
    in_numpy = mask.allows(Q, KV, _heads(mask))
    assert isinstance(in_numpy, np.ndarray) and in_numpy.dtype == bool
    np.testing.assert_array_equal(in_numpy, expected)
    np.testing.assert_array_equal(jitted[mask], expected)


def test_jax_without_jit_gives_jax_arrays():
    for mask in (Causal() & Strided(3), *examples.PER_HEAD[:2]):
        got = mask.allows(jnp.asarray(Q), KV, jnp.asarray(_heads(mask)))
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, _expected(mask))


@pytest.mark.parametrize("mask", examples.PER_HEAD, ids=repr)
def test_a_single_head_is_the_same_by_index_and_by_scalar(mask):
    expected = _expected(mask)
    for head in range(mask.heads):
        np.testing.assert_array_equal(mask.allows(Q, KV, head), expected[head])
        np.testing.assert_array_equal(mask.for_head(head).allows(Q, KV), expected[head])
        assert mask.for_head(head).heads is None


def test_a_traced_scalar_head_selects_its_rule():
    for mask in examples.PER_HEAD[:3]:
        of_head = jax.jit(lambda head, mask=mask: mask.allows(jnp.asarray(Q), KV, head))
        for head, expected in enumerate(_expected(mask)):
            np.testing.assert_array_equal(of_head(head), expected)


@given(mask=examples.composites())
def test_any_composite_follows_its_definition(mask):
    np.testing.assert_array_equal(mask.allows(Q, KV), _expected(mask)[0])


def test_positions_broadcast_and_scalars_work():
    assert Causal().allows(3, 2).shape == ()
    assert Sinks(2).allows(np.zeros((4, 1), int), np.arange(5)).shape == (4, 5)
    assert Full().allows(np.arange(6), 0).shape == (6,)
    assert Full().allows(np.arange(6)[:, None], 0, np.zeros(2, int)).shape == (6, 2)
    assert Random(0.5, cell=2).allows(7, np.int16(3)).shape == ()
    assert Causal().allows(np.uint8(3), np.uint8(200)).item() is False


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(2**30, 2**30),
        Window(2**31 - 1, 2**31 - 1),
        Window(0, None),
        Window(None, 5),
        Chunked(2**30),
        Chunked(3),
        Sinks(2**31 - 1),
        Strided(2**31 - 1, 2**30),
        Strided(7, 2),
        Longformer(2**30, 2**30),
        Random(0.5, seed=2**31 - 1, cell=1),
        BigBird(2**30, 5, 0.5, cell=3),
        PerHead([Window(None, 0), Window(2**30, None), Causal(), Window(3, 2**30)]),
        PerHead([Random(0.5, cell=1), Random(0.2, seed=9, cell=2**30)]),
    ],
    ids=repr,
)
def test_int32_positions_never_overflow(mask):
    largest = 2**31 - 1
    ends = np.array([0, 1, 5, 2**30 - 1, 2**30, 2**30 + 1, largest - 2**30, largest - 3, largest])
    ends = np.unique(ends).astype(np.int32)
    heads = range(mask.heads or 1)
    expected = np.stack([expand.pairs(mask, ends[:, None], ends, head) for head in heads])

    @jax.jit
    def in_jax(q, kv, head):
        return mask.allows(q, kv, head), mask.coverage(q, q, kv, kv, head)

    q, kv, head = ends[:, None], ends, np.array(heads, np.int32)[:, None, None]
    in_numpy = mask.allows(q, kv, head), mask.coverage(q, q, kv, kv, head)
    for allows, coverage in (in_numpy, in_jax(q, kv, head)):
        np.testing.assert_array_equal(allows, expected)
        np.testing.assert_array_equal(coverage, np.where(expected, Coverage.ALL, Coverage.NONE))


def test_a_mask_with_heads_needs_a_head():
    mask = PerHead([Causal(), Full()])
    with pytest.raises(MaskError, match="XSK-201.head-missing"):
        mask.allows(Q, KV)
    with pytest.raises(MaskError, match="XSK-201.head-range"):
        mask.allows(Q, KV, 2)
    with pytest.raises(MaskError, match="XSK-201.head-range"):
        mask.for_head(-1)


def test_positions_must_be_integers(unchecked_types):
    with pytest.raises(ShapeError, match="must hold integers"):
        Causal().allows(np.zeros(3), Q)


def test_a_function_must_answer_with_booleans():
    with pytest.raises(MaskError, match="XSK-201.function-dtype"):
        FromFunction(lambda q, kv: q - kv).allows(Q, KV)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Window(-1, 0),
        lambda: Window(0, 2**31),
        lambda: Window(1.5, 0),
        lambda: Window(True, 0),
        lambda: Chunked(0),
        lambda: Sinks(-1),
        lambda: Strided(0),
        lambda: Strided(3, 4),
        lambda: Longformer(-1, 0),
        lambda: Random(1.5),
        lambda: Random(float("nan")),
        lambda: Random(0.5, seed=-1),
        lambda: BigBird(1, 1, 0.5, cell=0),
        lambda: FromFunction(3),
        lambda: FromFunction(max, heads=0),
        lambda: PerHead([]),
        lambda: PerHead([PerHead([Causal()])]),
        lambda: examples.Segments([[1, 2]]),
        lambda: examples.Segments([0.5]),
        lambda: examples.Segments([2**40]),
        lambda: examples.Explicit(np.ones(3, bool)),
        lambda: examples.Explicit(np.ones((3, 3))),
    ],
)
def test_numbers_out_of_range_are_refused(build, unchecked_types):
    with pytest.raises(MaskError) as caught:
        build()
    assert caught.value.code == "XSK-201"


def test_arrays_must_be_known_while_tracing():
    def build(ids):
        return examples.Segments(ids).allows(Q, KV)

    with pytest.raises(MaskError, match="must be concrete"):
        jax.jit(build)(jnp.zeros(3, jnp.int32))


def test_numpy_numbers_become_plain_ints(unchecked_types):
    mask = Window(np.int64(3), np.uint8(2))
    assert type(mask.left) is int and mask == Window(3, 2)


def test_the_random_pattern_never_changes():
    cells = Random(keep=0.5, seed=7, cell=1).allows(np.arange(4)[:, None], np.arange(8))
    rows = ["".join("#" if kept else "." for kept in row) for row in cells]
    assert rows == ["#.##..##", "...###.#", "#.#...##", "#######."]


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.9])
def test_random_keeps_its_share_evenly(keep):
    cells = np.arange(1000)
    kept = Random(keep, seed=11, cell=1).allows(cells[:, None], cells)
    deviation = np.sqrt(keep * (1 - keep) / 1000)
    assert abs(kept.mean() - keep) < 5 * deviation / np.sqrt(1000)
    for axis in (0, 1):
        assert 0.85 < kept.mean(axis).std() / deviation < 1.15
    other = Random(keep, seed=12, cell=1).allows(cells[:, None], cells)
    assert abs(np.corrcoef(kept.ravel(), other.ravel())[0, 1]) < 0.01
