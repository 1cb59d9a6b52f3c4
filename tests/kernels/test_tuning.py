"""Pinned tile sizes reach the kernels they are for, through `jit`, and change no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.block_sparse.xla import kernels as xla
from xsake.kernels.tuning import Bucket, TileTable, pin_tiles
from xsake.masks import Causal

Q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 96, 2, 8)), jnp.float32)
LAYOUT = xsake.BlockLayout.from_mask(Causal(), q_tokens=96, block_q=16, block_kv=16)
BUCKET = Bucket("cpu", "float32", 8, 16, 16, 8, 2)


def told(layout=LAYOUT):
    return xsake.explain(Q, Q, Q, layout=layout).passes[0].tiles


def test_the_bucket_of_a_call_is_found_and_others_keep_their_own_sizes():
    assert Bucket.of(LAYOUT, 12, "cpu", "float32", 8) == BUCKET
    own = told()
    assert own == xla.default_sizes(LAYOUT, 12, "cpu")
    with pin_tiles(TileTable.of({BUCKET: TileSizes(5, 3)})):
        assert told() == TileSizes(5, 3)
        with pin_tiles(TileTable()):
            assert told() == own
    other = Bucket("cpu", "float32", 16, 16, 16, 8, 2)
    with pin_tiles(TileTable.of({other: TileSizes(5, 3)})):
        assert told() == own
    assert told() == own


def test_a_compiled_function_notices_another_table_and_gives_the_same_numbers(monkeypatch):
    used, before = [], xla._sizes
    monkeypatch.setattr(xla, "_sizes", lambda *x: used.append(before(*x)) or used[-1])
    attend = jax.jit(lambda q: xsake.attention(q, q, q, layout=LAYOUT))
    plain = attend(Q)
    with pin_tiles(TileTable.of({BUCKET: TileSizes(7, 2)})):
        found = attend(Q)
        count = len(used)
        attend(Q)
        assert len(used) == count, "compiled once for a table"
    assert TileSizes(7, 2) in used
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 8, 9, 500])
def test_rows_are_counted_to_a_power_of_two(rows):
    found = Bucket.of(LAYOUT, rows, "cpu", "float32", 8).rows
    assert found & (found - 1) == 0 and (found <= rows < 2 * found or rows < found == 8)
