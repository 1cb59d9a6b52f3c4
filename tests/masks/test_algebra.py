"""Laws of & | ~, what is refused, and how masks compare, hash and print."""

import numpy as np
import pytest
from hypothesis import given

from tests.masks import examples
from xsake.errors import MaskError
from xsake.masks import (
    And,
    Causal,
    Chunked,
    Explicit,
    FromFunction,
    Full,
    Or,
    PerHead,
    Random,
    Segments,
    Sinks,
    Window,
)

Q = np.arange(examples.TOKENS)[:, None]
KV = np.arange(examples.TOKENS)[None, :]
MASKS = examples.composites()


def _same(left, right):
    np.testing.assert_array_equal(left.allows(Q, KV), right.allows(Q, KV))


@given(a=MASKS, b=MASKS, c=MASKS)
def test_laws(a, b, c):
    _same(a & b, b & a)
    _same(a | b, b | a)
    _same(~(a & b), ~a | ~b)
    _same(~(a | b), ~a & ~b)
    _same(a & (b | c), (a & b) | (a & c))
    _same(a | (b & c), (a | b) & (a | c))
    _same(a & Full(), a)
    _same(a | ~Full(), a)
    _same(a & (a | b), a)
    _same(a | ~a, Full())


def test_structure_is_flat_and_without_repeats():
    a, b, c = Causal(), Sinks(1), Chunked(4)
    assert (a & b) & c == a & (b & c) == And((a, b, c))
    assert (a | b) | c == a | (b | c) == Or((a, b, c))
    assert a & a == a and a | a == a and ~~a == a
    assert (a & b) & a == a & b
    assert ~(a & b) != a & b


def test_per_head_lists_stay_lists():
    heads = PerHead([Causal(), Full()])
    assert heads & Sinks(1) == PerHead([Causal() & Sinks(1), Full() & Sinks(1)])
    assert Sinks(1) | heads == PerHead([Sinks(1) | Causal(), Sinks(1) | Full()])
    assert ~heads == PerHead([~Causal(), ~Full()])
    assert heads & PerHead([Sinks(1), Sinks(2)]) == PerHead(
        [Causal() & Sinks(1), Full() & Sinks(2)]
    )
    assert heads & heads == heads


def test_unequal_head_counts_are_refused():
    table = Explicit(np.ones((3, 2, 2), bool))
    for other in (PerHead([Causal()] * 3), table, ~table):
        with pytest.raises(MaskError, match="XSK-201.combine-heads"):
            PerHead([Causal(), Full()]) & other
        with pytest.raises(MaskError, match="XSK-201.combine-heads"):
            other | PerHead([Causal(), Full()])


def test_python_and_or_not_are_refused():
    for wrong in (lambda: Causal() and Full(), lambda: Causal() or Full(), lambda: not Causal()):
        with pytest.raises(MaskError, match="XSK-201.truth-value"):
            wrong()
    with pytest.raises(TypeError):
        Causal() & True


@pytest.mark.parametrize(
    ("build", "other"),
    [
        (lambda: Window(3, None), Window(3, 0)),
        (lambda: Causal() & Window(3, 0), Causal() | Window(3, 0)),
        (lambda: ~Chunked(3), Chunked(3)),
        (lambda: Random(0.5, 1, 2), Random(0.5, 2, 2)),
        (lambda: Segments([0, 0, 1]), Segments([0, 1, 1])),
        (lambda: Segments([0, 1], [0, 1]), Segments([0, 1], [0, 1, 1])),
        (lambda: Explicit(np.eye(3, dtype=bool)), Explicit(np.eye(4, dtype=bool))),
        (lambda: Explicit(np.eye(3, dtype=bool)), Explicit(~np.eye(3, dtype=bool))),
        (lambda: FromFunction(examples.is_odd_sum), FromFunction(examples.is_far_for_head)),
        (
            lambda: FromFunction(examples.is_far_for_head, heads=2).for_head(1),
            FromFunction(examples.is_far_for_head, heads=2).for_head(0),
        ),
        (lambda: PerHead([Causal(), Full()]), PerHead([Full(), Causal()])),
    ],
)
def test_equal_masks_are_equal_and_hash_alike(build, other):
    assert build() == build() and hash(build()) == hash(build())
    assert build() != other and other != build()
    assert build() != "mask"
    assert len({build(), build(), other}) == 2


def test_kv_ids_default_to_q_ids():
    assert Segments([0, 1]) == Segments([0, 1], [0, 1])


def test_arrays_are_copied_and_locked():
    array = np.eye(3, dtype=bool)
    mask = Explicit(array)
    array[:] = False
    assert mask.allows(1, 1)
    with pytest.raises(ValueError, match="read-only"):
        mask.array[0, 0] = False


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Causal() & Window(255, 0), "Causal() & Window(left=255, right=0)"),
        (~Causal() | Sinks(4), "~Causal() | Sinks(count=4)"),
        (~(Causal() | Sinks(4)), "~(Causal() | Sinks(count=4))"),
        (Causal() & (Sinks(1) | Chunked(2)), "Causal() & (Sinks(count=1) | Chunked(size=2))"),
        (Random(0.5), "Random(keep=0.5, seed=0, cell=128)"),
        (Segments([0, 0, 1]), "Segments([0, 0, 1])"),
        (Segments([0, 1], [1]), "Segments([0, 1], [1])"),
        (FromFunction(examples.is_odd_sum), "FromFunction(is_odd_sum)"),
        (PerHead([Causal(), Full()]), "PerHead([Causal(), Full()])"),
        (
            PerHead([Full()] + [Causal()] * 3 + [Full(), Sinks(1)]),
            "PerHead([Full()] + [Causal()] * 3 + [Full(), Sinks(count=1)])",
        ),
    ],
)
def test_repr_reads_as_it_was_written(mask, text):
    assert repr(mask) == text


def test_repr_of_big_arrays_is_short():
    ids = np.repeat(np.arange(3), 100)
    assert repr(Segments(ids)).startswith("Segments(<300 tokens, 3 segments, ")
    table = Explicit(np.eye(64, dtype=bool))
    assert repr(table).startswith("Explicit(<64x64, 1.6% allowed, ")
