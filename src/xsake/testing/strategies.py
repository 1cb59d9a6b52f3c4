"""Hypothesis strategies: masks, block grids and whole cases, small enough for the oracle.

Shapes come from a short list, because every new shape is compiled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from xsake.layout import BlockLayout
from xsake.masks import (
    AbstractMask,
    Causal,
    Chunked,
    Explicit,
    Full,
    Longformer,
    PerHead,
    Random,
    Sinks,
    Strided,
    Window,
)
from xsake.testing.cases import ConformanceCase

# Hypothesis' draw protocol cannot be checked at run time.
Draw = Callable[..., Any]

TOKENS = (1, 16, 17, 40)
BLOCKS = ((8, 8), (16, 8), (8, 32))


def leaf_masks() -> st.SearchStrategy[AbstractMask]:
    """Parametric masks."""
    small = st.integers(0, 24)
    return st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(Window, left=st.none() | small, right=st.none() | small),
        st.builds(Chunked, size=st.integers(1, 30)),
        st.builds(Sinks, count=small),
        st.integers(1, 9).flatmap(
            lambda stride: st.builds(Strided, stride=st.just(stride), width=st.integers(1, stride))
        ),
        st.builds(Longformer, window=st.integers(0, 9), global_tokens=st.integers(0, 5)),
        st.builds(
            Random, keep=st.floats(0.0, 1.0), seed=st.integers(0, 99),
            cell=st.sampled_from([1, 4, 16]),
        ),
    )  # fmt: skip


def masks() -> st.SearchStrategy[AbstractMask]:
    """Leaves combined by `&`, `|` and `~`, at most three levels deep."""
    return st.recursive(
        leaf_masks(),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=4,
    )


@st.composite
def per_head_masks(draw: Draw, heads: int) -> AbstractMask:
    """A mask for `heads` heads: shared or per head."""
    if draw(st.booleans()):
        return draw(masks())
    return PerHead([draw(masks()) for _ in range(heads)])


@st.composite
def token_tables(draw: Draw, q_tokens: int, kv_tokens: int) -> AbstractMask:
    """Random sets of pairs with densities from 0 to 1."""
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return Explicit(rng.random((q_tokens, kv_tokens)) < density)


@st.composite
def block_grids(draw: Draw, heads: int, q_blocks: int, kv_blocks: int) -> np.ndarray:
    """A block grid [H, Nq, Nk], each head with its own density."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    density = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], size=(heads, 1, 1))
    return rng.random((heads, q_blocks, kv_blocks)) < density


@st.composite
def cases(draw: Draw) -> ConformanceCase:
    """A case: shapes, heads, blocks, mask or layout, logit terms."""
    tq, tk = draw(st.sampled_from(TOKENS)), draw(st.sampled_from(TOKENS))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    base = ConformanceCase(
        "drawn", batch=draw(st.sampled_from([1, 2])), q_tokens=tq, kv_tokens=tk,
        q_heads=kv_heads * group, kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 16])),
        value_dim=draw(st.sampled_from([4, 12])),
        softcap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.sampled_from([None, 0, 2])),
        bias=draw(st.sampled_from([None, (False, True), (True, False)])),
    )  # fmt: skip
    block = draw(st.sampled_from(BLOCKS))
    if draw(st.booleans()):
        rule = draw(per_head_masks(base.q_heads) | token_tables(tq, tk))
        return dataclasses.replace(base, mask=rule, block=block)
    grid = draw(block_grids(base.q_heads, -(-tq // block[0]), -(-tk // block[1])))
    rule = draw(st.none() | masks())
    return dataclasses.replace(base, mask=rule, layout=_GridLayout(grid, block))


class _GridLayout:
    """Layout builder of a drawn grid, with a readable repr for hypothesis."""

    def __init__(self, grid: np.ndarray, block: tuple[int, int]):
        self.grid, self.block = grid, block

    def __call__(self, case: ConformanceCase) -> BlockLayout:
        return BlockLayout.from_block_mask(
            self.grid, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=self.block[0],
            block_kv=self.block[1], mask=case.mask,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"listed blocks {self.block} of {self.grid.astype(int).tolist()}"
