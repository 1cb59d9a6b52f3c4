"""The handler that selects blocks: refusals, threads, and the size of its workspace.

Lists are compared with a definition token by token by XSAKE's suite of every backend.
"""

import jax
import native_call
import numpy as np
import pytest
import xsake_cpu

SIZES = {"batch": 2, "q_tokens": 90, "kv_tokens": 90, "q_heads": 6, "kv_heads": 1, "dim": 24}
SIZES |= {"v_dim": 0, "block_kv": 16, "block_q": 3}


@pytest.fixture
def arrays():
    """(q, k, weights, position, start)."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal((2, 90, *shape)).astype(np.float32)
    position = np.broadcast_to(np.arange(90, dtype=np.int32), (2, 90))
    return [draw(6, 24), draw(1, 24), draw(6), position, np.zeros((2, 90), np.int32)]


def select(arrays, *, workers=2, groups=2, size=None, **numbers):
    """Lists of four blocks."""
    native_call.register()
    size = xsake_cpu.workspace("top_blocks", **SIZES, workers=workers) if size is None else size
    results = jax.ShapeDtypeStruct((2, 90, groups, 4), np.int32), native_call._workspace(size)
    call = jax.ffi.ffi_call("xsake_cpu_top_blocks", results)
    numbers = {"block": 16, "first": 0, "local": 1, "has_relu": False} | numbers
    return np.asarray(jax.jit(lambda *x: call(*x, **numbers)[0])(*arrays))


def test_the_number_of_threads_changes_no_list(arrays):
    lists = select(arrays, workers=1)
    assert all(np.array_equal(select(arrays, workers=workers), lists) for workers in (2, 3))
    assert lists.max() == 5 and lists.min() == -1


@pytest.mark.parametrize(("place", "change"), [
    (0, lambda x: x[:, :, :5]), (1, lambda x: x[:, :, :, :8]), (1, lambda x: x[:1]),
    (2, lambda x: x[:, :5]), (3, lambda x: x[:1]), (4, lambda x: x[:, :1]), (4, lambda x: x - 1),
])  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(arrays, place, change):
    arrays[place] = change(arrays[place])
    with pytest.raises(native_call.ERRORS, match="expected"):
        select(arrays)


@pytest.mark.parametrize("numbers", [{"block": 0}, {"first": -1}, {"local": 0}, {"size": 100}])
def test_numbers_that_do_not_fit_are_refused(arrays, numbers):
    with pytest.raises(native_call.ERRORS, match="expected"):
        select(arrays, **numbers)
