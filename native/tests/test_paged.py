"""Handler of attention over pages: refusals, threads, and results for every dtype of pages.

Every case of the semantics is compared with float64 by XSAKE's suite of every backend.
"""

import jax
import native_call
import numpy as np
import pytest
import xsake_cpu

BATCH, QUERIES, HEADS, KV_HEADS, DIM, V_DIM, PAGE, SLOTS, PAGES = 2, 3, 6, 2, 24, 40, 16, 7, 20
LENGTHS = np.array([100, 37], np.int32)
# q position >= k position.
CAUSAL = np.array([1, 4, 0, 0, 9, 1, 0, 1, 1, 1, 1, 0, 0, 0], np.int32)
NAMES = (
    "q", "k", "v", "page", "number", "is_partial", "q_positions", "lengths", "k_scale", "v_scale",
    "tables",
)  # fmt: skip


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    number = np.broadcast_to(np.arange(SLOTS, dtype=np.int32), (BATCH, KV_HEADS, SLOTS))
    page = rng.permutation(PAGES)[: BATCH * SLOTS].reshape(BATCH, 1, SLOTS).astype(np.int32)
    exists = number * PAGE < LENGTHS[:, None, None]
    return {
        "q": draw(BATCH, QUERIES, HEADS, DIM), "k": draw(PAGES, KV_HEADS, PAGE, DIM),
        "v": draw(PAGES, KV_HEADS, PAGE, V_DIM),
        "page": np.where(exists, np.broadcast_to(page, number.shape), -1), "number": number,
        "is_partial": np.ones(number.shape, bool),
        "q_positions": (LENGTHS[:, None] + np.arange(-QUERIES, 0)).astype(np.int32),
        "lengths": LENGTHS, "k_scale": np.zeros((0, 0), np.float32),
        "v_scale": np.zeros((0, 0), np.float32), "tables": np.zeros(0, np.int32),
    }  # fmt: skip


def as_int8(arrays):
    """The same call over pages of int8."""
    result = dict(arrays)
    for name in "kv":
        scale = np.abs(arrays[name]).max((2, 3)) / 127
        result[name] = np.round(arrays[name] / scale[..., None, None]).astype(np.int8)
        result[f"{name}_scale"] = scale.astype(np.float32)
    return result


def run(arrays, *, workers=2, **changes):
    """`(o, lse)`."""
    native_call.register()
    arrays = arrays | changes
    size = xsake_cpu.workspace(
        "paged", batch=BATCH, q_tokens=QUERIES, kv_tokens=SLOTS * PAGE, q_heads=HEADS,
        kv_heads=KV_HEADS, dim=DIM, v_dim=V_DIM, block_kv=PAGE, program_steps=1, workers=workers,
    )  # fmt: skip
    like = (
        jax.ShapeDtypeStruct((BATCH, QUERIES, HEADS, V_DIM), np.float32),
        jax.ShapeDtypeStruct((BATCH, QUERIES, HEADS), np.float32),
    )
    call = jax.ffi.ffi_call("xsake_cpu_paged", (*like, native_call._workspace(size)))
    attributes = {"scale": np.float32(0.2), "softcap": np.float32(0)}
    attributes |= {"program": CAUSAL, "program_heads": 1}
    outputs = jax.jit(lambda *x: call(*x, **attributes))(*(arrays[name] for name in NAMES))
    return [np.asarray(x) for x in outputs[:-1]]


def gather(arrays, name, rows, head):
    """Keys or values of pages in float64."""
    x = arrays[name][rows, head].astype(np.float64)
    if arrays[name].dtype == np.int8:
        x *= arrays[f"{name}_scale"][rows, head, None, None]
    return x.reshape(-1, x.shape[-1])


def dense(arrays):
    """`o` in float64."""
    out = np.zeros((BATCH, QUERIES, HEADS, V_DIM))
    for b, t, h in np.ndindex(BATCH, QUERIES, HEADS):
        hk = h // (HEADS // KV_HEADS)
        rows = arrays["page"][b, hk]
        k, v = (gather(arrays, name, rows[rows >= 0], hk) for name in "kv")
        position = (arrays["number"][b, hk][rows >= 0][:, None] * PAGE + np.arange(PAGE)).ravel()
        seen = position <= arrays["q_positions"][b, t]
        s = 0.2 * k[seen] @ arrays["q"][b, t, h].astype(np.float64)
        p = np.exp(s - s.max())
        out[b, t, h] = p / p.sum() @ v[seen]
    return out


@pytest.mark.parametrize("change", [dict, as_int8])
def test_results_are_those_of_the_definition(arrays, change):
    arrays = change(arrays)
    np.testing.assert_allclose(run(arrays)[0], dense(arrays), atol=3e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_runs_are_equal_bit_by_bit(arrays, workers):
    first = run(arrays, workers=1)
    for _ in range(5):
        for x, y in zip(run(arrays, workers=workers), first, strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("name", "index", "bad", "words"),
    [
        ("page", (1, 0, 1), PAGES, "page: got 20"),
        ("page", (1, 0, 1), 2**31 - 1, "page"),
        ("number", (1, 0, 1), 3, "number of a page"),
        ("number", (1, 0, 1), -1, "number of a page"),
        ("number", (1, 0, 1), 2**27, "number of a page"),
        ("lengths", (1,), -5, "lengths"),
    ],
)
def test_lists_out_of_range_raise(arrays, name, index, bad, words):
    x = arrays[name].copy()
    x[index] = bad
    with pytest.raises(native_call.ERRORS, match=f"xsake_cpu: {words}"):
        run(arrays, **{name: x})


def test_inconsistent_calls_raise(arrays):
    scaled = as_int8(arrays)
    for changes in (
        {"k": arrays["k"][:, :, :8]},
        {"v": arrays["v"][:5]},
        {"number": arrays["number"][:, :1]},
        {"is_partial": arrays["is_partial"][..., :2]},
        {"q_positions": arrays["q_positions"][:, :1]},
        {"lengths": LENGTHS[:1]},
        {"k": scaled["k"], "v": scaled["v"]},
        {"k_scale": scaled["k_scale"], "v_scale": scaled["v_scale"]},
    ):
        with pytest.raises(native_call.ERRORS, match="xsake_cpu: "):
            run(arrays, **changes)
