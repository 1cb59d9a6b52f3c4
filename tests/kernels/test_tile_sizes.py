"""How much a backend computes at once is its own affair: no tile size changes a result."""

import jax
import jax.numpy as jnp
import pytest

from xsake.errors import UnsupportedError
from xsake.kernels.block_sparse.api import OP, block_sparse
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, TileSizes
from xsake.testing.case_table import BY_NAME
from xsake.testing.conformance import call, compare, failures, reference_results, with_gradients

TILED = [s.name for s in OP.backends if s.platforms is None and not s.is_on_request]
SIZES = [TileSizes(1, 1), TileSizes(3, 2), TileSizes(64, 1), TileSizes(2, 5)]


@pytest.mark.slow  # quicker: conformance at the default sizes
@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("name", ["full_odd_length", "group_heads_differ", "ragged_grid_traced"])
def test_tile_sizes_never_change_the_result(name, backend):
    case = BY_NAME[name]
    inputs, truth, plain = reference_results(case)
    for tiles in SIZES:
        problem = BlockSparseConfig(scale=case.head_dim**-0.5, tiles=tiles)

        def attend(operands, integers, problem=problem):
            arrays = BlockSparseInputs(*(jnp.asarray(operands[n]) for n in "qkv"), case.schedule)
            return block_sparse(arrays, problem, implementation=backend)

        got = call(jax.jit(with_gradients(attend)), inputs)
        assert failures(compare(got, plain, truth, dtype="float32")) == [], tiles


def test_a_backend_without_tiles_says_so():
    case = BY_NAME["causal"]
    inputs = case.inputs()
    arrays = BlockSparseInputs(*(jnp.asarray(inputs.operands[n]) for n in "qkv"), case.schedule)
    problem = BlockSparseConfig(scale=1.0, tiles=TileSizes(1, 1))
    with pytest.raises(UnsupportedError):
        OP.choose(arrays, problem, "cpu", ("reference",))
