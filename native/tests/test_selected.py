"""Handlers of selected attention: refusals, repeated blocks, threads.

Outputs and gradients are compared with float64 by XSAKE's suite of every backend.
"""

import jax
import native_call
import numpy as np
import pytest
import xsake_cpu

SIZES = {"batch": 2, "q_tokens": 90, "kv_tokens": 90, "q_heads": 6, "kv_heads": 2}
SIZES |= {"dim": 24, "v_dim": 40, "block_kv": 16, "num_slots": 4}


@pytest.fixture
def arrays():
    """(q, k, v, blocks, q_positions)."""
    rng = np.random.default_rng(0)
    draw = lambda heads, dim: rng.standard_normal((2, 90, heads, dim)).astype(np.float32)
    own = np.arange(90)[None, :, None, None] // 16
    others = rng.integers(-1, 6, (2, 90, 2, 3))
    blocks = np.concatenate([np.broadcast_to(own, (2, 90, 2, 1)), others], -1).astype(np.int32)
    return draw(6, 24), draw(2, 24), draw(2, 40), blocks, np.zeros((0, 0), np.int32)


def run(name, arrays, results, *, workers=2, block=16):
    """Results of a handler without its workspace."""
    native_call.register()
    size = xsake_cpu.workspace(name, **SIZES, workers=workers)
    like = [jax.ShapeDtypeStruct(x, np.float32) for x in results]
    call = jax.ffi.ffi_call(f"xsake_cpu_{name}", (*like, native_call._workspace(size)))
    outputs = jax.jit(lambda *x: call(*x, scale=np.float32(0.2), block=block))(*arrays)
    return [np.asarray(x) for x in outputs[:-1]]


def attend(arrays, **options):
    """`(o, lse)`."""
    return run("selected", arrays, [(2, 90, 6, 40), (2, 90, 6)], **options)


def differentiate(arrays, **options):
    """`(o, lse, dq, dk, dv)`."""
    o, lse = attend(arrays, **options)
    arrays = (*arrays, o, lse, np.cos(o), np.sin(lse))
    results = run("selected_backward", arrays, [x.shape for x in arrays[:3]], **options)
    return o, lse, *results


@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_runs_are_equal_bit_by_bit(arrays, workers):
    first = differentiate(arrays, workers=1)
    for _ in range(3):
        for x, y in zip(differentiate(arrays, workers=workers), first, strict=True):
            assert np.array_equal(x, y)


def test_a_block_that_a_query_names_twice_counts_once(arrays):
    q, k, v, blocks, positions = arrays
    is_repeated = np.tril(blocks[..., None] == blocks[..., None, :], -1).any(-1)
    assert is_repeated.any()
    once = q, k, v, np.where(is_repeated, -1, blocks), positions
    for x, y in zip(differentiate(arrays), differentiate(once), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("bad", [6, 2**31 - 1])
def test_blocks_out_of_range_raise(arrays, bad):
    arrays[3][1, 40, 1, 2] = bad
    with pytest.raises(native_call.ERRORS, match="xsake_cpu: blocks"):
        attend(arrays)
    rest = np.zeros((2, 90, 6, 40)), np.zeros((2, 90, 6))
    given = (*arrays, *(x.astype(np.float32) for x in (*rest, *rest)))
    with pytest.raises(native_call.ERRORS, match="xsake_cpu: blocks"):
        run("selected_backward", given, [x.shape for x in arrays[:3]])


def test_inconsistent_calls_raise(arrays):
    q, k, v, blocks, positions = arrays
    with pytest.raises(native_call.ERRORS, match="block_kv"):
        attend(arrays, block=0)
    for bad in (blocks[:, :-1], blocks[:, :, :1], blocks[0]):
        with pytest.raises(native_call.ERRORS, match="shape of blocks"):
            attend((q, k, v, bad, positions))
    with pytest.raises(native_call.ERRORS, match="positions"):
        attend((q, k, v, blocks, np.zeros((1, 3), np.int32)))
