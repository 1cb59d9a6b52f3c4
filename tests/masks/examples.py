"""One of each mask, combinations of them, and hypothesis strategies over both."""

import numpy as np
from hypothesis import strategies as st

from xsake import masks
from xsake.masks import (
    BigBird,
    Causal,
    Chunked,
    Explicit,
    FromFunction,
    Full,
    Longformer,
    PerHead,
    Random,
    Segments,
    Sinks,
    Strided,
    Window,
)

TOKENS = 24  # positions that tests look at; some tables below are shorter on purpose
_TABLE = np.random.default_rng(0).random((3, 20, 22)) < 0.5


def is_odd_sum(q, kv):
    return (q + kv) % 2 == 1


def is_far_for_head(q, kv, head):
    return q - kv > 3 * head


FORMULAS = [
    Full(),
    Causal(),
    Window(left=3, right=2),
    Window(left=0, right=0),
    Window(left=None, right=1),
    Window(left=4, right=None),
    Window(left=None, right=None),
    Chunked(4),
    Chunked(5),
    Sinks(0),
    Sinks(3),
    Strided(4),
    Strided(5, 2),
    Strided(3, 3),
    Longformer(window=2, global_tokens=3),
    Longformer(window=0, global_tokens=0),
    Random(keep=0.4, seed=3, cell=4),
    Random(keep=0.5, seed=1, cell=3),
    Random(keep=0.0, cell=2),
    Random(keep=1.0, cell=2),
    BigBird(window=1, global_tokens=2, keep=0.3, seed=5, cell=3),
]
TABLES = [
    Segments([0] * 5 + [1] * 9 + [2] * 6 + [-1] * 2),
    Segments([7] * 5 + [3] * 9 + [9] * 6, [7] * 8 + [-4] * 2 + [3] * 4 + [9] * 4),
    Segments([0, 0, -1, 0, 4, 4, 5, 6, 6], [0, 2, 2, 4, 5, 5, 7]),
    Segments([0, 1, 0, 1, 2, 2, 0], [1, 0, 0, 2]),
    Segments([], [1, 2]),
    Explicit(_TABLE[0]),
    FromFunction(is_odd_sum),
]
COMBINATIONS = [
    Causal() & Window(left=5, right=3),
    Causal() & (Window(left=2, right=0) | Sinks(2)),
    ~Causal() | Strided(5),
    ~(Chunked(6) & Causal()) & Sinks(15),
    Window(left=3, right=0) | Window(left=0, right=4),
    Segments([0] * 9 + [1] * 11) & Causal() & ~Sinks(1),
    Random(keep=0.5, cell=4) & Causal() | FromFunction(is_odd_sum),
]
PER_HEAD = [
    PerHead([Causal(), Window(3, 1), Causal() & Window(2, None), Full()]),
    PerHead([Causal() & Chunked(3), Window(4, 0) & Chunked(8), Chunked(5) & Chunked(6)]),
    PerHead([Sinks(2), Strided(3), Sinks(4), ~Strided(4, 2), ~Strided(5)]),
    PerHead([Random(0.3, seed=1, cell=2), Random(0.7, seed=2, cell=5), Random(1.0)]),
    PerHead([TABLES[0], TABLES[0] & Causal(), TABLES[0] & Window(2, 0), FromFunction(is_odd_sum)]),
    PerHead([BigBird(1, 2, 0.3, cell=3), BigBird(2, 0, 0.0, cell=4)]) | Sinks(1),
    PerHead([Causal(), Full()]) & ~PerHead([Window(1, 0), Sinks(3)]),
    Explicit(_TABLE),
    FromFunction(is_far_for_head, heads=3),
    PerHead([Causal(), Window(3, 3), Sinks(4)]) & Explicit(_TABLE),
    ~FromFunction(is_far_for_head, heads=3) | Causal(),
]
HEADLESS = FORMULAS + TABLES + COMBINATIONS
ALL = HEADLESS + PER_HEAD

_small = st.integers(0, 12)
_limits = st.none() | _small


def formulas() -> st.SearchStrategy[masks.AbstractMask]:
    """Any mask that is a formula, with small numbers."""
    sizes, shares = st.integers(1, 9), st.sampled_from([0.0, 0.2, 0.6, 1.0])
    seeds = st.integers(0, 2**31 - 1)
    strides = sizes.flatmap(lambda stride: st.tuples(st.just(stride), st.integers(1, stride)))
    return st.one_of(
        st.sampled_from([Full(), Causal()]),
        st.builds(Window, _limits, _limits),
        st.builds(Chunked, sizes),
        st.builds(Sinks, _small),
        strides.map(lambda numbers: Strided(*numbers)),
        st.builds(Longformer, _small, _small),
        st.builds(Random, shares, seeds, sizes),
        st.builds(BigBird, st.integers(0, 4), st.integers(0, 4), shares, seeds, sizes),
    )


def segments() -> st.SearchStrategy[masks.AbstractMask]:
    """Segment masks: packed documents, and any ids at all."""
    anything = st.lists(st.integers(-2, 3), max_size=TOKENS)
    runs = st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 6)), max_size=6)
    packed = runs.map(lambda pairs: [name for name, repeats in pairs for _ in range(repeats)])
    ids = anything | packed | packed.map(sorted)
    return st.builds(Segments, ids) | st.builds(Segments, ids, ids)


def _combined(parts: st.SearchStrategy) -> st.SearchStrategy[masks.AbstractMask]:
    return st.one_of(
        st.builds(lambda a, b: a & b, parts, parts),
        st.builds(lambda a, b: a | b, parts, parts),
        st.builds(lambda a: ~a, parts),
    )


def composites() -> st.SearchStrategy[masks.AbstractMask]:
    """Masks under a few operators."""
    # Hypothesis reads the source of the function it gets here; a lambda confuses it at times.
    return st.recursive(formulas() | segments(), _combined, max_leaves=4)
