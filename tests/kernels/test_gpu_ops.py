"""Mosaic GPU instructions: an upgrade of jax fails here, with what has to be checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.kernels.block_sparse.mosaic_gpu import ops
from xsake.kernels.lowering import capability_of, family_of


def test_jax_is_a_release_that_the_file_was_written_against():
    assert ops.is_checked(), (
        f"jax {jax.__version__} is not among {ops.CHECKED}. Run the slow tests of "
        "tests/kernels/test_mosaic_gpu.py and `xsake certify sm_80 sm_90a sm_120a --fresh`, read "
        "jax's changes of mma, copy_gmem_to_smem, inline_mgpu and the interpreter, then add it."
    )
    assert not ops.is_checked("0.12.10") and not ops.is_checked("0.13.0")


def owners(layout, shape) -> np.ndarray:
    """The element in every (warp, lane, register, place) of a tile."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, count = x.ndim - len(tile), len(tile)
        pairs = [
            size
            for whole, part in zip(x.shape[lead:], tile, strict=True)
            for size in (whole // part, part)
        ]
        x = x.reshape(*x.shape[:lead], *pairs)
        outer, inner = (range(lead + first, lead + 2 * count, 2) for first in (0, 1))
        x = x.transpose(*range(lead), *outer, *inner)
    axis = lambda dims: [dim + x.ndim for dim in dims if isinstance(dim, int)]
    warps, lanes, place = axis(layout.warp_dims), axis(layout.lane_dims), axis([layout.vector_dim])
    rest = [number for number in range(x.ndim) if number not in (*warps, *lanes, *place)]
    width = x.shape[place[0]]
    return x.transpose(*warps, *lanes, *rest, *place).reshape(4, 32, -1, width)


@pytest.mark.parametrize("shape", [(64, 32), (64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_and_left_operands_lie_in_the_same_registers(shape, dtype):
    of_sums, of_left = ops.accumulator().to_mgpu(), ops.left(dtype).to_mgpu()
    np.testing.assert_array_equal(owners(of_sums, shape), owners(of_left, shape))


def test_float32_operands_lie_elsewhere():
    of_sums, of_left = ops.accumulator().to_mgpu(), ops.left(jnp.float32).to_mgpu()
    assert not np.array_equal(owners(of_sums, (64, 64)).ravel(), owners(of_left, (64, 64)).ravel())


def test_capabilities_have_names_without_guesses():
    assert [capability_of(x) for x in ("sm_80", "sm_90a", "sm_103a", "sm_120a")] == [
        (8, 0),
        (9, 0),
        (10, 3),
        (12, 0),
    ]
    assert [capability_of(x) for x in ("cuda", "sm_", "sm_x", "tpu")] == [None] * 4
    assert (family_of("sm_80"), family_of("rocm")) == ("cuda", "rocm")
    assert ops.capability() is None  # a CPU has none
