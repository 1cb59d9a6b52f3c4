"""Deliberate bugs in the kernel, each of which a handful of small checks must catch (N12)."""

import dataclasses
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.lanes import gate
from xsake.kernels import blocking, online_softmax
from xsake.kernels.block_sparse import api
from xsake.kernels.block_sparse.xla import kernels as xla
from xsake.kernels.block_sparse.xla.kernels import BlockedCall
from xsake.masks import Causal, Explicit, Full, PerHead, Window
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import (
    bind,
    call,
    check_case,
    compare,
    compute_truth,
    failures,
    run_case,
    run_naive,
    with_gradients,
)

SIZES = {
    "q_tokens": 45,
    "kv_tokens": 45,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "value_dim": 16,
}
SOME_PAIRS = np.random.default_rng(0).random((45, 45)) < 0.3
SOME_PAIRS[[0, 7, 20]] = False
WINDOWS = PerHead([Causal() & Window(left=left, right=0) for left in (2, 11, 24, 40)])
PADDED = (((20, 18), (20, 18)), ((45,), (45,)))

CAPPED = {"softcap": 1.5, "sinks": 2, "bias": (True, True)}

DETECTORS = {
    "plain": ConformanceCase("plain", WINDOWS, block=(16, 8), **SIZES),
    "gaps": ConformanceCase(
        "gaps", Explicit(SOME_PAIRS), block=(8, 16), bias=(False, True), **SIZES
    ),
    "capped": ConformanceCase("capped", Causal(), block=(16, 16), **CAPPED, **SIZES),
    "packed": ConformanceCase("packed", Full(), block=(16, 16), batch=2, segments=PADDED, **SIZES),
    "late": ConformanceCase(
        "late", Causal(), block=(16, 16), q_positions=tuple(range(30, 75)), **SIZES
    ),
}


def found_by(name):
    """What the detector `name` has to say about the code as it is now."""
    if name in SPECIAL:
        return SPECIAL[name]()
    return failures(check_case(xsake.attention, DETECTORS[name], "xla"))


def poison_found():
    """Bad numbers at one key and one query must stay with those who see them."""
    case = DETECTORS["plain"]
    run = jax.jit(with_gradients(bind(xsake.attention, case, "xla")))
    inputs, bad = case.inputs(), 20
    clean = call(run, inputs)
    v, q = inputs.operands["v"].copy(), inputs.operands["q"].copy()
    v[:, bad] = np.nan
    q[:, bad] = np.nan
    dirty = call(run, inputs.replace(v=v, q=q))
    spoiled = case.allowed[:, :, :, bad].copy()
    spoiled[:, :, bad] = True
    touched = (case.allowed & spoiled[..., None]).any(2)
    keys = touched.reshape(case.batch, case.kv_heads, -1, case.kv_tokens).any(2)
    keys[:, :, bad] = True
    spared = dict.fromkeys(("out", "lse", "d_q"), np.moveaxis(~spoiled, 1, 2))
    spared |= dict.fromkeys(("d_k", "d_v"), np.moveaxis(~keys, 1, 2))
    return [n for n, at in spared.items() if clean[n][at].tobytes() != dirty[n][at].tobytes()]


def rows_lost_to_bias_found():
    """A row whose bias is -inf everywhere sees nothing, though its mask lets it."""
    case = DETECTORS["gaps"]
    inputs = case.inputs()
    bias = inputs.operands["bias"].copy()
    bias[:, :, [3, 30]] = -np.inf
    inputs = inputs.replace(bias=bias)
    got = run_case(xsake.attention, case, "xla", inputs)
    return failures(
        compare(got, run_naive(case, inputs), compute_truth(case, inputs), dtype="float32")
    )


SPECIAL = {"poison": poison_found, "rows_lost_to_bias": rows_lost_to_bias_found}


@dataclasses.dataclass(frozen=True)
class Bug:
    """One mistake: what it replaces, by what, and which detector must notice."""

    name: str
    owner: object
    attribute: str
    broken: Callable  # takes the right thing, returns the wrong one
    caught_by: str


BUGS: list[Bug] = []


def bug(owner, attribute, caught_by="plain"):
    """Enter the decorated function, which turns right into wrong, under its own name."""

    def enter(broken):
        BUGS.append(Bug(broken.__name__, owner, attribute, broken, caught_by))
        return broken

    return enter


def alpha(state, new):
    """The factor on the sums so far after a step."""
    return online_softmax.exp2(state.m - jnp.where(new.m == -jnp.inf, 0, new.m))


@bug(online_softmax, "update")
def sums_are_not_rescaled(right):
    def broken(state, *step):
        new = right(state, *step)
        surplus = state.acc * (1 - alpha(state, new))[..., None]
        return new._replace(acc=new.acc + surplus)

    return broken


@bug(online_softmax, "update")
def l_is_not_rescaled(right):
    def broken(state, *step):
        new = right(state, *step)
        return new._replace(l=new.l + state.l * (1 - alpha(state, new)))

    return broken


@bug(online_softmax, "update")
def m_of_the_last_tile_stays(right):
    return lambda state, s, *rest: right(state, s, *rest)._replace(m=s.max(-1))


@bug(online_softmax, "finalize")
def lse_is_left_in_base_2(right):
    return lambda state: (right(state)[0], right(state)[1] * online_softmax.LOG2E)


@bug(online_softmax, "finalize")
def lse_forgets_l(right):
    return lambda state: (right(state)[0], state.m / online_softmax.LOG2E)


@bug(online_softmax, "finalize", caught_by="gaps")
def empty_rows_are_divided_by_zero(right):
    return lambda state: (state.acc / state.l[..., None], right(state)[1])


@bug(online_softmax, "lse_to_base", caught_by="rows_lost_to_bias")
def empty_rows_get_weights_backward(right):
    return lambda lse, base: lse * online_softmax.LOG2E


@bug(online_softmax, "lse_to_base")
def backward_mixes_bases(right):
    return lambda lse, base: right(lse, base) / online_softmax.LOG2E


@bug(online_softmax, "score_grad")
def row_term_is_dropped(right):
    return lambda p, dp, delta, slope: right(p, dp, 0 * delta, slope)


@bug(online_softmax, "score_grad")
def row_term_has_the_wrong_sign(right):
    return lambda p, dp, delta, slope: right(p, dp, -delta, slope)


@bug(online_softmax, "softcap_grad", caught_by="capped")
def softcap_slope_is_ignored(right):
    return lambda tile, softcap, exists: None


@bug(online_softmax, "softcap_grad", caught_by="capped")
def softcap_slope_is_not_squared(right):
    wrong = lambda tile, cap: 1 - jnp.abs(tile / (cap * online_softmax.LOG2E))
    return lambda tile, cap, exists: None if cap is None else wrong(tile, cap)


@bug(online_softmax, "to_scores", caught_by="gaps")
def bias_is_added_in_the_wrong_base(right):
    return lambda qk, bias, cap: right(qk, bias / online_softmax.LOG2E, cap)


@bug(online_softmax, "to_scores", caught_by="capped")
def bias_is_added_after_the_cap(right):
    return lambda qk, bias, cap: right(qk, None, cap) + bias * online_softmax.LOG2E


@bug(online_softmax, "query_factor", caught_by="capped")
def scale_is_in_base_2_under_the_cap(right):
    return lambda scale, softcap: scale * online_softmax.LOG2E


@bug(online_softmax, "_EXP2_COEFFICIENTS")
def exponential_lacks_its_last_term(right):
    return right[:-1]


@bug(online_softmax, "matmul")
def products_are_rounded_to_bfloat16(right):
    narrow = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    return lambda a, b: right(narrow(a), narrow(b))


def with_rows(right, change):
    """Lists whose row table is read wrongly: `change(rows)` gives the wrong columns by name."""

    def broken(*arguments):
        lists = right(*arguments)
        return lists._replace(rows=lists.rows._replace(**change(lists.rows)))

    return broken


@bug(blocking, "list_rows")
def last_partial_block_is_skipped(right):
    return with_rows(right, lambda rows: {"partial": np.maximum(rows.partial - 1, 0)})


@bug(blocking, "list_rows")
def last_full_block_is_skipped(right):
    return with_rows(right, lambda rows: {"full": np.maximum(rows.full - 1, 0)})


@bug(blocking, "list_rows")
def lists_begin_one_block_late(right):
    return with_rows(right, lambda rows: {"start": rows.start + 1})


@bug(blocking, "list_rows")
def a_partial_block_passes_for_full(right):
    def change(rows):
        moved = np.minimum(rows.partial, 1)
        return {"partial": rows.partial - moved, "full": rows.full + moved}

    return with_rows(right, change)


@bug(blocking, "list_columns")
def a_term_of_dk_is_dropped(right):
    return with_rows(right, lambda rows: {"partial": np.maximum(rows.partial - 1, 0)})


@bug(blocking, "list_columns")
def dk_reads_one_head_of_its_group(right):
    return lambda *arguments: right(*arguments)._replace(head=0 * right(*arguments).head)


@bug(BlockedCall, "element_mask")
def every_head_uses_the_mask_of_head_zero(right):
    def broken(call, row, *rest):
        heads, blocks = call.q_heads, call.layout.q_blocks
        return right(call, row // (heads * blocks) * (heads * blocks) + row % blocks, *rest)

    return broken


@bug(blocking, "_token_blocks", caught_by="late")
def keys_past_the_end_are_visible(right):
    return lambda *arguments: right(*arguments)._replace(tokens=arguments[2] + 1)


@bug(blocking, "_token_blocks", caught_by="packed")
def padding_sees_padding(right):
    return lambda positions, segments, *sizes: right(positions, jnp.abs(segments), *sizes)


@bug(blocking, "_token_blocks", caught_by="late")
def positions_are_ignored(right):
    return lambda positions, *rest: right(None, *rest)


@bug(xla, "dq_pass", caught_by="gaps")
def dq_with_a_bias_lacks_the_scale(right):
    def broken(call, *rest):
        dq, dbias = right(call, *rest)
        return dq / call.config.scale, dbias

    return broken


@bug(xla, "dkv_pass")
def dq_lacks_the_scale(right):
    def broken(call, *rest, **options):
        dq, dk, dv = right(call, *rest, **options)
        return dq / call.config.scale, dk, dv

    return broken


@bug(xla, "dkv_pass")
def dk_keeps_the_factor_of_base_2(right):
    def broken(*arguments, **options):
        dq, dk, dv = right(*arguments, **options)
        return dq, dk * online_softmax.LOG2E, dv

    return broken


@bug(online_softmax, "backward_rows")
def cotangent_of_lse_is_ignored(right):
    return lambda dtype, o, lse, do, dlse: right(dtype, o, lse, do, 0 * dlse)


@bug(api, "_add_sinks", caught_by="capped")
def sinks_are_left_out_of_lse(right):
    return lambda out, lse, sinks: (right(out, lse, sinks)[0], lse)


@bug(api, "_add_sinks", caught_by="capped")
def sinks_take_no_probability(right):
    return lambda out, lse, sinks: (out, right(out, lse, sinks)[1])


@bug(api, "_add_sinks", caught_by="capped")
def only_one_sink_counts(right):
    return lambda out, lse, sinks: right(out, lse, sinks[:, :1])


@bug(online_softmax, "isolate_nonfinite", caught_by="poison")
def bad_values_are_not_isolated(right):
    return lambda k, v: (k, v)


@bug(online_softmax, "zero_nonfinite", caught_by="poison")
def bad_queries_are_not_zeroed(right):
    return lambda x: x


@pytest.fixture
def fresh_caches():
    """A planted bug must be traced, and must not stay in a cache afterwards."""
    jax.clear_caches()
    yield
    jax.clear_caches()


EVERY_TIME = [
    "row_term_is_dropped",
    "every_head_uses_the_mask_of_head_zero",
    "padding_sees_padding",
]


def test_there_are_at_least_twenty_bugs():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20


@pytest.mark.parametrize("name", gate(["plain"], [*DETECTORS, *SPECIAL]))
def test_detector_is_silent_on_the_right_kernel(name):
    assert found_by(name) == []


@pytest.mark.parametrize("bug", gate(EVERY_TIME, BUGS), ids=lambda bug: bug.name)
def test_seeded_bug_is_caught(bug, monkeypatch, fresh_caches):
    right = getattr(bug.owner, bug.attribute)
    wrong = bug.broken(right)
    monkeypatch.setattr(bug.owner, bug.attribute, wrong)
    for name, module in list(sys.modules.items()):
        # Where the right one was imported by name, too.
        if name.startswith("xsake.kernels") and getattr(module, bug.attribute, None) is right:
            monkeypatch.setattr(module, bug.attribute, wrong)
    assert found_by(bug.caught_by) != [], "the bug went unnoticed"
