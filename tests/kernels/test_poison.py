"""NaN and Inf in what the layout excludes never change one bit of an output or gradient (N7)."""

import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.compiled import compiled
from tests.kernels.implementations import RUNNABLE, each_implementation
from tests.kernels.interpreted import on_gpu, on_tpu, register
from tests.lanes import slow
from xsake.kernels.block_sparse import api
from xsake.kernels.block_sparse.mosaic_tpu import schedule
from xsake.layout import BlockLayout
from xsake.masks import Causal, PerHead, Window
from xsake.testing.case_table import BY_NAME
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import call


def fill(array, where, value):
    return np.where(where, np.asarray(value, array.dtype), array)


def unseen(case):
    """What nothing looks at: keys [B, Tk, Hk, 1], queries [B, Tq, Hq, 1]."""
    groups = case.allowed.reshape(case.batch, case.kv_heads, -1, *case.allowed.shape[2:])
    keys = np.moveaxis(~groups.any((2, 3)), 1, 2)[..., None]
    return keys, np.moveaxis(~case.allowed.any(-1), 1, 2)[..., None]


def assert_same_bits(clean, dirty, where=None):
    """`where`: the elements of each array that are compared; all of all arrays without it."""
    for name in clean if where is None else where:
        at = ... if where is None else where[name]
        assert clean[name][at].tobytes() == dirty[name][at].tobytes(), name


LOCAL = ConformanceCase(
    "local", PerHead([Causal() & Window(left=left, right=0) for left in (5, 9, 14, 20)]),
    block=(16, 16), batch=2, q_tokens=77, kv_tokens=77, q_heads=4, kv_heads=2, head_dim=16,
    value_dim=16,
)  # fmt: skip
SUBJECTS = [
    BY_NAME["explicit_with_empty_rows_and_columns"],
    BY_NAME["packed_segments"],
    dataclasses.replace(
        BY_NAME["indices_and_counts_per_batch"], name="lists_with_bias", bias=(True, True)
    ),
    BY_NAME["group_heads_differ_bfloat16"],
    dataclasses.replace(BY_NAME["ragged_grid_traced"], name="traced_far_window", mask=Causal()),
]


@each_implementation
@pytest.mark.parametrize("case", [SUBJECTS[0], *map(slow, SUBJECTS[1:])], ids=lambda x: x.name)
def test_excluded_positions_never_change_a_bit(case, implementation):
    run, inputs = compiled(case, implementation), case.inputs()
    clean = call(run, inputs)
    keys, queries = unseen(case)
    for poison in (np.nan, np.inf, -np.inf):
        x = inputs.operands
        changed = {"k": fill(x["k"], keys, poison), "v": fill(x["v"], keys, poison)}
        changed["q"] = fill(x["q"], queries, poison)
        if "bias" in x:
            changed["bias"] = fill(x["bias"], ~case.allowed, poison)
        dirty = call(run, inputs.replace(**changed))
        assert all(np.isfinite(value).all() for name, value in dirty.items() if name != "lse")
        assert_same_bits(clean, dirty)


@each_implementation
def test_rows_whose_list_lacks_a_block_do_not_read_it(implementation):
    run, inputs = compiled(LOCAL, implementation), LOCAL.inputs()
    block = (np.arange(LOCAL.kv_tokens) // 16 == 2)[None, :, None, None]
    bad = {name: fill(inputs.operands[name], block, np.nan) for name in "kv"}
    listed = np.repeat(LOCAL.schedule.to_block_mask()[:, :, :, 2], 16, axis=2)[..., :77]
    spared = np.repeat(np.moveaxis(~listed, 1, 2), LOCAL.batch, axis=0)  # [B, Tq, Hq]
    assert spared.any() and not spared.all()
    clean, dirty = call(run, inputs), call(run, inputs.replace(**bad))
    assert_same_bits(clean, dirty, dict.fromkeys(("out", "lse", "d_q"), spared))


@each_implementation
def test_cotangents_of_empty_rows_do_not_leak(implementation):
    case = BY_NAME["explicit_with_empty_rows_and_columns"]
    run, inputs = compiled(case, implementation), case.inputs()
    _, empty = unseen(case)
    poisoned = dataclasses.replace(
        inputs,
        d_out=fill(inputs.d_out, empty, np.nan),
        d_lse=fill(inputs.d_lse, empty[..., 0], np.nan),
    )
    assert_same_bits(call(run, inputs), call(run, poisoned))


def spared_by(case, rows):
    """By array, what does not depend on the queries `rows` [B, Hq, Tq] or on keys they share."""
    touched = (case.allowed & rows[..., None]).any(2)
    touched = touched.reshape(case.batch, case.kv_heads, -1, case.kv_tokens).any(2)
    queries, keys = np.moveaxis(~rows, 1, 2), np.moveaxis(~touched, 1, 2)
    assert keys.any()
    return dict.fromkeys(("out", "lse", "d_q"), queries) | dict.fromkeys(("d_k", "d_v"), keys)


@each_implementation
@pytest.mark.parametrize("operand", ["k", "v"])
def test_a_poisoned_key_reaches_only_the_queries_that_see_it(operand, implementation):
    """Pair by pair, inside partial blocks too; and who sees it is told so, not shielded."""
    run, inputs = compiled(LOCAL, implementation), LOCAL.inputs()
    bad = inputs.operands[operand].copy()
    bad[0, 37, 0] = np.nan
    clean, dirty = call(run, inputs), call(run, inputs.replace(**{operand: bad}))
    rows = LOCAL.allowed[:, :, :, 37].copy()
    rows[1:], rows[:, LOCAL.q_heads // LOCAL.kv_heads :] = False, False
    for name in ("out", "d_q"):
        assert np.isnan(dirty[name][np.moveaxis(rows, 1, 2)]).all(-1).all(), name
    assert_same_bits(clean, dirty, spared_by(LOCAL, rows))


@each_implementation
@pytest.mark.parametrize("operand", ["q", "d_out"])
def test_a_poisoned_query_reaches_only_the_keys_it_sees(operand, implementation):
    run, inputs = compiled(LOCAL, implementation), LOCAL.inputs()
    bad = (inputs.d_out if operand == "d_out" else inputs.operands["q"]).copy()
    bad[0, 40, 1] = np.inf
    poisoned = (
        dataclasses.replace(inputs, d_out=bad) if operand == "d_out" else inputs.replace(q=bad)
    )
    clean, dirty = call(run, inputs), call(run, poisoned)
    rows = np.zeros(LOCAL.allowed.shape[:3], bool)
    rows[0, 1, 40] = True
    assert not np.isfinite(dirty["d_q"][np.moveaxis(rows, 1, 2)]).any()
    assert_same_bits(clean, dirty, spared_by(LOCAL, rows))


def _first_block(case):
    """Three of four query blocks list the first kv block, and nothing else."""
    grid = np.zeros((4, 4), bool)
    grid[:3, 0] = True
    return BlockLayout.from_block_mask(grid, block_q=16, block_kv=16)


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
QUICK = [("positions", "xla"), ("softcap_and_padding_segments", "xla")]


@pytest.mark.parametrize(
    ("name", "implementation"),
    QUICK + [slow(name, x) for name in PADDING for x in EVERYWHERE if (name, x) not in QUICK],
)
def test_what_does_not_exist_never_reaches_a_gradient(name, implementation, interpreters):
    dtype = "bfloat16" if implementation == "gpu_interpreted" else "float32"
    case = dataclasses.replace(PADDING[name], dtype=dtype)
    run, inputs = compiled(case, implementation), case.inputs()
    keys, queries = unseen(case)
    assert keys.any() or queries.any()
    x = inputs.operands
    bad = {"k": fill(x["k"], keys, np.nan), "q": fill(x["q"], queries, np.nan)}
    dirty = call(run, inputs.replace(**bad))
    assert_same_bits(call(run, inputs), dirty)
    assert not dirty["d_k"][np.broadcast_to(keys, dirty["d_k"].shape)].any()
