"""How much a backend computes at once is its own affair: no tile size changes a result."""

import jax
import jax.numpy as jnp
import pytest

from tests.lanes import gate
from xsake.errors import UnsupportedError
from xsake.kernels import select
from xsake.kernels.block_sparse.op import BACKENDS, block_sparse
from xsake.kernels.block_sparse.problem import Operands, Problem, TileSizes
from xsake.testing.case_table import BY_NAME
from xsake.testing.conformance import call, compare, expected, failures, with_gradients

TILED = [name for name, b in BACKENDS.items() if name != "reference" and b.platforms() is None]
SIZES = [TileSizes(1, 1), TileSizes(3, 2), TileSizes(64, 1), TileSizes(2, 5)]


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize(
    "name",
    gate(["full_odd_length"], ["full_odd_length", "group_heads_differ", "ragged_grid_traced"]),
)
def test_tile_sizes_never_change_the_result(name, backend):
    case = BY_NAME[name]
    inputs, truth, plain = expected(case)
    for tiles in SIZES:
        problem = Problem(scale=case.head_dim**-0.5, tiles=tiles)

        def attend(operands, integers, problem=problem):
            arrays = Operands(*(jnp.asarray(operands[n]) for n in "qkv"), case.schedule)
            return block_sparse(arrays, problem, backend=backend)

        got = call(jax.jit(with_gradients(attend)), inputs)
        assert failures(compare(got, plain, truth, dtype="float32")) == [], tiles


def test_a_backend_without_tiles_says_so():
    case = BY_NAME["causal"]
    inputs = case.inputs()
    arrays = Operands(*(jnp.asarray(inputs.operands[n]) for n in "qkv"), case.schedule)
    problem = Problem(scale=1.0, tiles=TileSizes(1, 1))
    with pytest.raises(UnsupportedError):
        select.choose(arrays, problem, "cpu", "reference")
