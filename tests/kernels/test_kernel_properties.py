"""Laws that hold for every layout, drawn by hypothesis (N9).

Most laws share one compiled function: the block grid is data of a traced layout, so a new
example costs no compilation.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import xsake
from tests.kernels.implementations import each_implementation
from xsake.layout import BlockLayout
from xsake.testing import strategies
from xsake.testing.conformance import check_case, failures

# Here every example compiles, so the profile's number is cut.
few_examples = hypothesis.settings(
    max_examples=max(5, hypothesis.settings.default.max_examples // 4)
)

HEADS, Q_BLOCKS, KV_BLOCKS, BLOCK, DIM = 2, 4, 5, 8, 8
SHAPE = HEADS, Q_BLOCKS, KV_BLOCKS
grids = strategies.block_grids(*SHAPE)
seeds = st.integers(0, 2**16)


@functools.cache
def attend(implementation):
    """`(grid, q, k, v, bias) -> (out, lse)`, compiled once."""

    @jax.jit
    def run(grid, q, k, v, bias):
        layout = BlockLayout.from_block_mask(grid, block_q=BLOCK, block_kv=BLOCK)
        return xsake.attention(
            q, k, v, layout=layout, bias=bias, return_lse=True, implementation=implementation
        )

    return lambda grid, *operands: tuple(map(np.asarray, run(jnp.asarray(grid), *operands)))


def operands(seed):
    rng = np.random.default_rng(seed)
    draw = lambda tokens: rng.standard_normal((1, tokens, HEADS, DIM)).astype(np.float32)
    q, k, v = draw(Q_BLOCKS * BLOCK), draw(KV_BLOCKS * BLOCK), draw(KV_BLOCKS * BLOCK)
    return [
        q,
        k,
        v,
        rng.standard_normal((1, 1, Q_BLOCKS * BLOCK, KV_BLOCKS * BLOCK)).astype(np.float32),
    ]


def rows_of(chosen):
    """[H, Nq] -> [1, Tq, H]."""
    return np.repeat(chosen, BLOCK, axis=1).T[None]


@each_implementation
@few_examples
@given(case=strategies.cases())
def test_every_drawn_case_is_within_the_error_budget(implementation, case):
    assert failures(check_case(xsake.attention, case, implementation, extra_ulps=4)) == []


@each_implementation
@given(grid=grids, seed=seeds)
def test_weights_of_a_row_sum_to_one(implementation, grid, seed):
    q, k, v, bias = operands(seed)
    out, _ = attend(implementation)(grid, q, k, np.ones_like(v), bias)
    expected = np.broadcast_to(rows_of(grid.any(-1))[..., None], out.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@each_implementation
@given(grid=grids, seed=seeds)
def test_constant_values_come_back_unchanged(implementation, grid, seed):
    q, k, v, bias = operands(seed)
    constant = np.broadcast_to(v[:, :1], v.shape)
    out, _ = attend(implementation)(grid, q, k, constant, bias)
    expected = np.where(rows_of(grid.any(-1))[..., None], v[:, :1], 0.0)
    np.testing.assert_allclose(out, expected, atol=5e-6)


@each_implementation
@given(grid=grids, seed=seeds, shift=st.floats(-50, 50))
def test_shifting_all_logits_shifts_only_the_lse(implementation, grid, seed, shift):
    q, k, v, bias = operands(seed)
    out, lse = attend(implementation)(grid, q, k, v, bias)
    moved_out, moved_lse = attend(implementation)(grid, q, k, v, bias + np.float32(shift))
    np.testing.assert_allclose(moved_out, out, atol=5e-5)
    np.testing.assert_allclose(moved_lse, lse + np.float32(shift), atol=5e-5)


@each_implementation
@given(grid=grids, seed=seeds, order=st.permutations(range(KV_BLOCKS)))
def test_permuting_keys_with_the_layout_changes_nothing(implementation, grid, seed, order):
    q, k, v, bias = operands(seed)
    tokens = (np.array(order)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    out, lse = attend(implementation)(grid, q, k, v, bias)
    moved = attend(implementation)(
        grid[:, :, order], q, k[:, tokens], v[:, tokens], bias[..., tokens]
    )
    np.testing.assert_allclose(moved[0], out, atol=5e-6)
    np.testing.assert_allclose(moved[1], lse, atol=5e-6)


@each_implementation
@given(grid=grids, seed=seeds, where=st.tuples(*(st.integers(0, n - 1) for n in SHAPE)))
def test_a_block_changes_only_the_rows_that_list_it(implementation, grid, seed, where):
    x = operands(seed)
    other = grid.copy()
    other[where] ^= True
    before, after = attend(implementation)(grid, *x), attend(implementation)(other, *x)
    same = rows_of((grid == other).all(-1))
    for old, new in zip(before, after, strict=True):
        assert old[same].tobytes() == new[same].tobytes()


@each_implementation
@given(grid=grids, extra=grids, seed=seeds)
def test_disjoint_layouts_merge_by_their_lse(implementation, grid, extra, seed):
    x = operands(seed)
    rest = extra & ~grid
    out, lse = attend(implementation)(grid | rest, *x)
    parts = [attend(implementation)(part, *x) for part in (grid, rest)]
    weights = [np.exp(part[1] - np.where(np.isfinite(lse), lse, 0.0))[..., None] for part in parts]
    merged = sum(weight * part[0] for weight, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(merged, out, atol=5e-6)
    np.testing.assert_allclose(np.logaddexp(parts[0][1], parts[1][1]), lse, atol=5e-6)


@each_implementation
@given(grid=grids, extra=grids, seed=seeds)
def test_captured_mass_grows_with_the_layout(implementation, grid, extra, seed):
    x = operands(seed)
    _, less = attend(implementation)(grid, *x)
    _, more = attend(implementation)(grid | extra, *x)
    _, both = attend(implementation)(grid & extra, *x)
    assert np.all(both <= less + 2e-6) and np.all(less <= more + 2e-6)
