"""NaN and Inf in what the layout excludes never change one bit of an output or gradient (N7)."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import xsake
from tests.kernels.interpreted import on_gpu, on_tpu, register
from tests.lanes import RUNNABLE, each_implementation
from xsake.kernels.block_sparse import api
from xsake.kernels.block_sparse.mosaic_tpu import schedule
from xsake.layout import BlockLayout
from xsake.masks import Causal, PerHead, Sinks, Window
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import bind, call, with_gradients


def filled(array, where, value):
    return np.where(where, np.asarray(value, array.dtype), array)


def unseen(case):
    """What nothing looks at: keys [B, Tk, Hk, 1], queries [B, Tq, Hq, 1]."""
    groups = case.allowed.reshape(case.batch, case.kv_heads, -1, *case.allowed.shape[2:])
    keys = np.moveaxis(~groups.any((2, 3)), 1, 2)[..., None]
    return keys, np.moveaxis(~case.allowed.any(-1), 1, 2)[..., None]


def assert_same_bits(clean, dirty, names=None):
    for name in names or clean:
        assert clean[name].tobytes() == dirty[name].tobytes(), name


LOCAL = ConformanceCase(
    "local", PerHead([Causal() & Window(left=left, right=0) for left in (5, 9, 14, 20)]),
    block=(16, 16), batch=2, q_tokens=77, kv_tokens=77, q_heads=4, kv_heads=2, head_dim=16,
    value_dim=16,
)  # fmt: skip
SUBJECTS = [
    BY_NAME["explicit_with_empty_rows_and_columns"],
    dataclasses.replace(
        BY_NAME["indices_and_counts_per_batch"], name="lists_with_bias", bias=(True, True)
    ),
    BY_NAME["packed_segments"],
    BY_NAME["group_heads_differ_bfloat16"],
    dataclasses.replace(BY_NAME["ragged_grid_traced"], name="traced_far_window", mask=Causal()),
]


@each_implementation
@pytest.mark.parametrize("case", SUBJECTS, ids=lambda case: case.name)
def test_excluded_positions_never_change_a_bit(case, implementation):
    run = jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
    inputs = case.inputs()
    clean = call(run, inputs)
    keys, queries = unseen(case)
    for poison in (np.nan, np.inf, -np.inf):
        x = dict(inputs.operands)
        x["k"], x["v"] = filled(x["k"], keys, poison), filled(x["v"], keys, poison)
        x["q"] = filled(x["q"], queries, poison)
        if "bias" in x:
            x["bias"] = filled(x["bias"], ~case.allowed, poison)
        dirty = call(run, dataclasses.replace(inputs, operands=x))
        assert all(np.isfinite(value).all() for name, value in dirty.items() if name != "lse")
        assert_same_bits(clean, dirty)


@each_implementation
def test_rows_whose_list_lacks_a_block_do_not_read_it(implementation):
    case = BY_NAME["ragged_grid"]
    run = jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
    inputs = case.inputs()
    clean = call(run, inputs)
    x = dict(inputs.operands)
    block = np.zeros((1, case.kv_tokens, 1, 1), bool)
    block[:, 32:48] = True
    x["k"], x["v"] = filled(x["k"], block, np.nan), filled(x["v"], block, np.nan)
    dirty = call(run, dataclasses.replace(inputs, operands=x))
    listed = np.repeat(case.schedule.to_block_mask()[:, :, :, 2], 16, axis=2)[:, :, : case.q_tokens]
    spared = np.moveaxis(~listed, 1, 2)  # [B, Tq, Hq]
    assert spared.any() and not spared.all()
    for name in ("out", "lse", "d_q"):
        assert clean[name][spared].tobytes() == dirty[name][spared].tobytes(), name


@each_implementation
def test_cotangents_of_empty_rows_do_not_leak(implementation):
    case = BY_NAME["explicit_with_empty_rows_and_columns"]
    run = jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
    inputs = case.inputs()
    clean = call(run, inputs)
    _, empty = unseen(case)
    poisoned = dataclasses.replace(
        inputs,
        d_out=filled(inputs.d_out, empty, np.nan),
        d_lse=filled(inputs.d_lse, empty[..., 0], np.nan),
    )
    assert_same_bits(clean, call(run, poisoned))


def shares_a_row(case, rows, heads):
    """[B, Tk, Hk]: keys that one of the queries `rows` [B, Hq, Tq] also sees."""
    touched = (case.allowed & rows[..., None]).any(2)
    return np.moveaxis(touched.reshape(case.batch, heads, -1, touched.shape[-1]).any(2), 1, 2)


@each_implementation
@pytest.mark.parametrize("operand", ["k", "v"])
def test_a_poisoned_key_reaches_only_the_queries_that_see_it(operand, implementation):
    """Pair by pair, inside partial blocks too; and who sees it is told so, not shielded."""
    case = LOCAL
    run = jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
    inputs = case.inputs()
    clean = call(run, inputs)
    bad = inputs.operands[operand].copy()
    bad[0, 37, 0] = np.nan
    dirty = call(run, inputs.replace(**{operand: bad}))
    seen = case.allowed[:, :, :, 37].copy()
    seen[1:], seen[:, case.q_heads // case.kv_heads :] = False, False
    rows = np.moveaxis(seen, 1, 2)
    for name in ("out", "d_q"):
        assert np.isnan(dirty[name][rows]).all(-1).all(), name
    for name in ("out", "lse", "d_q"):
        assert clean[name][~rows].tobytes() == dirty[name][~rows].tobytes(), name
    spared = ~shares_a_row(case, seen, case.kv_heads)
    for name in ("d_k", "d_v"):
        assert clean[name][spared].tobytes() == dirty[name][spared].tobytes(), name


@each_implementation
@pytest.mark.parametrize("operand", ["q", "d_out"])
def test_a_poisoned_query_reaches_only_the_keys_it_sees(operand, implementation):
    case = LOCAL
    run = jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
    inputs = case.inputs()
    clean = call(run, inputs)
    bad = (inputs.d_out if operand == "d_out" else inputs.operands["q"]).copy()
    bad[0, 40, 1] = np.inf
    if operand == "d_out":
        dirty = call(run, dataclasses.replace(inputs, d_out=bad))
    else:
        dirty = call(run, inputs.replace(q=bad))
    row = np.zeros(case.allowed.shape[:3], bool)
    row[0, 1, 40] = True
    spoiled = np.moveaxis(row, 1, 2)
    for name in ("out", "lse", "d_q"):
        assert clean[name][~spoiled].tobytes() == dirty[name][~spoiled].tobytes(), name
    assert not np.isfinite(dirty["d_q"][spoiled]).any()
    spared = ~shares_a_row(case, row, case.kv_heads)
    assert spared.any()
    for name in ("d_k", "d_v"):
        assert clean[name][spared].tobytes() == dirty[name][spared].tobytes(), name


@each_implementation
def test_the_tail_of_the_last_block_is_never_read(implementation):
    """The mask ends inside the last listed kv block, and what follows is poison."""
    short = ConformanceCase("short", layout=_first_keys(70), q_tokens=70, kv_tokens=96)
    inputs = short.inputs()
    run = jax.jit(with_gradients(bind(xsake.attention, short, implementation)))
    clean = call(run, inputs)
    x = dict(inputs.operands)
    tail = (np.arange(96) >= 70)[None, :, None, None]
    x["k"], x["v"] = filled(x["k"], tail, np.nan), filled(x["v"], tail, np.inf)
    assert_same_bits(clean, call(run, dataclasses.replace(inputs, operands=x)))


def _first_block(case):
    grid = np.zeros((4, 4), bool)
    grid[:3, 0] = True
    return BlockLayout.from_block_mask(
        grid, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=16, block_kv=16
    )


# Keys that only the padding of the last query block would see, and rows that wait while others of
# their group compute: neither exists, so neither may reach a gradient.
PADDING = {
    "queries_end_inside_a_block": ConformanceCase(
        "tail", Causal(), (16, 16), q_tokens=40, kv_tokens=48
    ),
    "softcap": ConformanceCase("cap", Causal(), (16, 16), q_tokens=40, kv_tokens=48, softcap=3.0),
    "positions": ConformanceCase(
        "placed", Window(left=70, right=50), q_tokens=20, kv_tokens=48,
        q_positions=tuple(range(100, 120)),
    ),
    "softcap_and_padding_segments": ConformanceCase(
        "waiting", Causal(), (16, 16), q_tokens=50, kv_tokens=50, softcap=30.0,
        segments=(((44,), (44,)),),
    ),
    "softcap_and_unlisted_blocks": ConformanceCase(
        "unlisted", layout=_first_block, q_tokens=64, kv_tokens=64, softcap=5.0
    ),
}  # fmt: skip


@pytest.fixture
def interpreters(monkeypatch):
    register(monkeypatch, api.OP, tpu_interpreted=on_tpu(), gpu_interpreted=on_gpu())
    monkeypatch.setattr(schedule, "MAX_SLOTS", 2)
    yield
    pltpu.reset_tpu_interpret_mode_state()


EVERYWHERE = [*RUNNABLE, "tpu_interpreted", "gpu_interpreted"]
ALONE = [("softcap", "tpu_interpreted"), ("softcap", "gpu_interpreted")]
PAIRS = [(name, where) for name in PADDING for where in EVERYWHERE]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pair
        if pair[1] in RUNNABLE or pair in ALONE
        else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_what_does_not_exist_never_reaches_a_gradient(name, implementation, interpreters):
    dtype = "bfloat16" if implementation == "gpu_interpreted" else "float32"
    case = dataclasses.replace(PADDING[name], dtype=dtype)
    inputs = case.inputs()
    run = jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
    clean = call(run, inputs)
    keys, queries = unseen(case)
    assert keys.any() or queries.any()
    x = dict(inputs.operands)
    x["k"], x["q"] = filled(x["k"], keys, np.nan), filled(x["q"], queries, np.nan)
    dirty = call(run, dataclasses.replace(inputs, operands=x))
    assert_same_bits(clean, dirty)
    assert not dirty["d_k"][np.broadcast_to(keys, dirty["d_k"].shape)].any()


def _first_keys(count):
    def build(case):
        rule = Sinks(count=count)
        return BlockLayout.from_mask(
            rule, q_tokens=case.q_tokens, kv_tokens=case.kv_tokens, block_q=32, block_kv=32
        )

    return build
