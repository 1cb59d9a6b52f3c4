"""Random layouts: valid ones against float64, invalid ones must raise.

`--layouts 100` draws 1,000 in all; the default is 10 of each shape.
"""

import ml_dtypes
import native_call
import numpy as np
import oracle
import pytest
from cases import causal, window
from test_forward import check_outputs

# A shape is compiled once; its lists are data.
SHAPES = [
    {"q_tokens": 72, "q_heads": 2, "kv_heads": 1, "dim": 8, "block_q": 16, "block_kv": 16},
    {
        "q_tokens": 90,
        "kv_tokens": 130,
        "q_heads": 2,
        "dim": 24,
        "v_dim": 16,
        "block_q": 32,
        "block_kv": 24,
    },
    {
        "batch": 2,
        "layout_batch": 2,
        "q_tokens": 65,
        "q_heads": 4,
        "kv_heads": 2,
        "layout_heads": 2,
        "dim": 16,
        "block_q": 8,
        "block_kv": 40,
    },
    {
        "q_tokens": 7,
        "kv_tokens": 200,
        "q_heads": 4,
        "kv_heads": 2,
        "layout_heads": 4,
        "dim": 32,
        "block_q": 8,
        "block_kv": 32,
    },
    {"q_tokens": 130, "q_heads": 1, "dim": 16, "block_q": 64, "block_kv": 128, "segments": True},
    {
        "q_tokens": 80,
        "q_heads": 2,
        "dim": 16,
        "block_q": 40,
        "block_kv": 16,
        "positions": True,
        "softcap": 4.0,
    },
    {"q_tokens": 70, "q_heads": 2, "dim": 20, "block_q": 24, "block_kv": 32, "bias": (1, 2)},
    {
        "q_tokens": 100,
        "q_heads": 2,
        "layout_heads": 2,
        "dim": 16,
        "block_q": 32,
        "block_kv": 32,
        "dtype": ml_dtypes.bfloat16,
    },
    {
        "q_tokens": 33,
        "kv_tokens": 300,
        "q_heads": 2,
        "dim": 64,
        "block_q": 16,
        "block_kv": 64,
        "dtype": np.float16,
    },
    {
        "q_tokens": 300,
        "kv_tokens": 300,
        "q_heads": 2,
        "kv_heads": 1,
        "dim": 32,
        "block_q": 128,
        "block_kv": 64,
    },
]


def draw_case(shape, seed):
    """A layout of a shape, padded to a fixed capacity; masks alternate by seed."""
    rng = np.random.default_rng(seed)
    mask = (causal, lambda: window(17), dict)[seed % 3]()
    density = rng.choice([0.05, 0.3, 0.7, 1.0])
    case = oracle.build_case(
        rng, density=density, force_partial=bool(seed % 2), **SHAPES[shape], **mask
    )
    q_blocks, kv_blocks = -(-case.q.shape[1] // case.block_q), -(-case.k.shape[1] // case.block_kv)
    capacity = case.layout_batch * case.layout_heads * q_blocks * kv_blocks + 3
    missing = capacity - case.kv_block.size
    case.kv_block = np.concatenate([case.kv_block, rng.integers(-9, 99, missing).astype(np.int32)])
    case.is_partial = np.concatenate([case.is_partial, rng.random(missing) < 0.5])
    return case


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_valid_layouts(shape, num_layouts):
    for seed in range(num_layouts):
        case = draw_case(shape, seed)
        target = native_call.decode if seed % 4 == 3 else native_call.forward
        check_outputs(case, *target(case))


def _bad_lists(case, rng):
    """Ways to make the lists of a case invalid."""
    used = int(case.row_starts[-1])
    row_starts, kv_block = case.row_starts.copy(), case.kv_block.copy()
    way = rng.integers(6)
    kv_blocks = -(-case.k.shape[1] // case.block_kv)
    if way == 0:
        kv_block[rng.integers(used)] = rng.choice([-1, kv_blocks, 2**31 - 1, -(2**31)])
    elif way == 1:
        row_starts[-1] = kv_block.size + rng.integers(1, 1000)
    elif way == 2:
        row_starts[rng.integers(row_starts.size)] = rng.choice([-1, -(2**31)])
    elif way == 3:
        row_starts[rng.integers(row_starts.size - 1)] = 2**31 - 1
    elif way == 4:
        row_starts[0], row_starts[1:] = used + 1, used
    else:
        row_starts[: row_starts.size // 2] = used + 1
        row_starts[row_starts.size // 2 :] = used - 1
    case.row_starts, case.kv_block = row_starts, kv_block


def _call(target, case):
    """Run a handler on a case that it has to refuse."""
    if target != "backward":
        return getattr(native_call, target)(case)
    o, lse = (np.zeros(x.shape, x.dtype) for x in native_call._outputs(case))
    return native_call.backward(case, o, lse, o, lse)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_invalid_layouts_raise(shape):
    rng = np.random.default_rng(shape)
    for seed in range(20):
        case = draw_case(shape, seed)
        if not case.row_starts[-1]:
            continue
        _bad_lists(case, rng)
        target = ("forward", "decode", "backward")[seed % 3]
        with pytest.raises(native_call.ERRORS, match="xsake_cpu: (row_starts|kv_block)"):
            _call(target, case)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_gradients_of_valid_layouts(shape, num_layouts):
    for seed in range(num_layouts):
        case, rng = draw_case(shape, seed), np.random.default_rng(seed)
        o, lse = native_call.forward(case)
        do = rng.standard_normal(o.shape).astype(case.q.dtype)
        dlse = np.where(np.isneginf(lse), 0, rng.standard_normal(lse.shape)).astype(np.float32)
        native = native_call.backward(case, o, lse, do, dlse)
        step = 0 if case.q.dtype == np.float32 else 6 * oracle.ulp_bound(case.q.dtype)
        for x, y in zip(native, oracle.backward(case, do, dlse), strict=True):
            if y is not None:
                atol = (1e-5 + step) * np.abs(y).max(initial=1e-3)
                np.testing.assert_allclose(
                    np.asarray(x, np.float64), y, atol=atol, rtol=1e-4 + step
                )
