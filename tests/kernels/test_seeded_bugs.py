"""Deliberate bugs in the kernel, each of which a handful of small checks must catch (N12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import test_extreme_logits, test_poison
from tests.kernels.planted import Bug, noticed, plant, sizes, some_pairs, without_delta
from tests.lanes import gate
from xsake.kernels import blocking, online_softmax
from xsake.kernels.block_sparse import api
from xsake.kernels.block_sparse.xla import kernels as xla
from xsake.kernels.block_sparse.xla.kernels import BlockedCall
from xsake.kernels.online_softmax import LOG2E
from xsake.layout import BlockLayout
from xsake.masks import Causal, Full, PerHead, Window
from xsake.testing.cases import ConformanceCase

SIZES = sizes(45)
WINDOWS = PerHead([Causal() & Window(left=left, right=0) for left in (2, 11, 24, 40)])
PADDED = (((20, 18), (20, 18)), ((45,), (45,)))
CAPPED = {"softcap": 1.5, "sinks": 2, "bias": (True, True)}


def every_block(case):
    """Layouts of calls with positions have no mask of their own."""
    grid = np.ones((-(-case.q_tokens // 16), -(-case.kv_tokens // 16)), bool)
    sizes = {"q_tokens": case.q_tokens, "kv_tokens": case.kv_tokens}
    return BlockLayout.from_block_mask(grid, **sizes, block_q=16, block_kv=16)


DETECTORS = {
    "plain": ConformanceCase("plain", WINDOWS, block=(16, 8), **SIZES),
    "gaps": ConformanceCase(
        "gaps", some_pairs(45, (0, 7, 20)), block=(8, 16), bias=(False, True), **SIZES
    ),
    "capped": ConformanceCase("capped", Causal(), block=(16, 16), **CAPPED, **SIZES),
    "packed": ConformanceCase("packed", Full(), block=(16, 16), batch=2, segments=PADDED, **SIZES),
    "late": ConformanceCase(
        "late", Causal(), layout=every_block, q_positions=tuple(range(30, 75)), **SIZES
    ),
}


# Tests of their own that must fail: bad numbers at one key or one query stay with those who see
# them, and a row whose bias is -inf everywhere sees nothing, though its mask lets it.
TESTS = {
    "bad_value": lambda: test_poison.test_a_poisoned_key_reaches_only_the_queries_that_see_it(
        "v", "xla"
    ),
    "bad_query": lambda: test_poison.test_a_poisoned_query_reaches_only_the_keys_it_sees(
        "q", "xla"
    ),
    "rows_lost_to_bias": lambda: test_extreme_logits.check_variant(
        "minus_infinite_rows", "xla", "float32"
    ),
}


def unscaled(name):
    """`update` that does not rescale one of its sums."""

    def broken(right, state, *step):
        new, old = right(state, *step), getattr(state, name)
        alpha = online_softmax.exp2(state.m - jnp.where(new.m == -jnp.inf, 0, new.m))
        surplus = old * (1 - alpha.reshape(alpha.shape + (1,) * (old.ndim - alpha.ndim)))
        return new._replace(**{name: getattr(new, name) + surplus})

    return broken


def with_rows(change):
    """Lists whose row table is read wrongly: `change(rows)` gives the wrong columns by name."""

    def broken(right, *arguments):
        lists = right(*arguments)
        return lists._replace(rows=lists.rows._replace(**change(lists.rows)))

    return broken


one_less = lambda name: with_rows(lambda rows: {name: np.maximum(getattr(rows, name) - 1, 0)})


def partial_as_full(rows):
    moved = np.minimum(rows.partial, 1)
    return {"partial": rows.partial - moved, "full": rows.full + moved}


def mask_of_head_zero(right, call, row, *rest):
    heads, blocks = call.q_heads, call.layout.q_blocks
    return right(call, row // (heads * blocks) * (heads * blocks) + row % blocks, *rest)


def times(*factors):
    """A pass whose results are multiplied by `factors(config)`."""

    def broken(right, call, *rest, **options):
        results = zip(right(call, *rest, **options), factors, strict=True)
        return tuple(x if factor is None else x * factor(call.config) for x, factor in results)

    return broken


def slope_not_squared(right, tile, cap, exists):
    return None if cap is None else 1 - jnp.abs(tile / (cap * LOG2E))


def narrow_products(right, a, b):
    narrow = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    return right(narrow(a), narrow(b))


unscale = lambda config: 1 / config.scale
# fmt: off
BUGS = [
    Bug("sums_are_not_rescaled", online_softmax, "update", unscaled("acc"), "plain"),
    Bug("l_is_not_rescaled", online_softmax, "update", unscaled("l"), "plain"),
    Bug("m_of_the_last_tile_stays", online_softmax, "update",
        lambda right, state, s, *more: right(state, s, *more)._replace(m=s.max(-1)),
        "plain"),
    Bug("lse_is_left_in_base_2", online_softmax, "finalize",
        lambda right, state: (right(state)[0], right(state)[1] * LOG2E), "plain"),
    Bug("lse_forgets_l", online_softmax, "finalize",
        lambda right, state: (right(state)[0], state.m / LOG2E), "plain"),
    Bug("empty_rows_are_divided_by_zero", online_softmax, "finalize",
        lambda right, state: (state.acc / state.l[..., None], right(state)[1]), "gaps"),
    Bug("empty_rows_get_weights_backward", online_softmax, "lse_to_base",
        lambda right, lse, base: lse * LOG2E, "rows_lost_to_bias"),
    Bug("backward_mixes_bases", online_softmax, "lse_to_base",
        lambda right, lse, base: right(lse, base) / LOG2E, "plain"),
    Bug("row_term_is_dropped", online_softmax, "score_grad", without_delta, "plain"),
    Bug("row_term_has_the_wrong_sign", online_softmax, "score_grad",
        lambda right, p, dp, delta, slope: right(p, dp, -delta, slope), "plain"),
    Bug("softcap_slope_is_ignored", online_softmax, "softcap_grad",
        lambda right, tile, softcap, exists: None, "capped"),
    Bug("softcap_slope_is_not_squared", online_softmax, "softcap_grad",
        slope_not_squared, "capped"),
    Bug("bias_is_added_in_the_wrong_base", online_softmax, "to_scores",
        lambda right, qk, bias, cap: right(qk, bias / LOG2E, cap), "gaps"),
    Bug("bias_is_added_after_the_cap", online_softmax, "to_scores",
        lambda right, qk, bias, cap: right(qk, None, cap) + bias * LOG2E, "capped"),
    Bug("scale_is_in_base_2_under_the_cap", online_softmax, "query_factor",
        lambda right, scale, softcap: scale * LOG2E, "capped"),
    Bug("exponential_lacks_its_last_term", online_softmax, "_EXP2_COEFFICIENTS",
        lambda right: right[:-1], "plain"),
    Bug("products_are_rounded_to_bfloat16", online_softmax, "matmul", narrow_products, "plain"),
    Bug("last_partial_block_is_skipped", blocking, "list_rows", one_less("partial"), "plain"),
    Bug("last_full_block_is_skipped", blocking, "list_rows", one_less("full"), "plain"),
    Bug("lists_begin_one_block_late", blocking, "list_rows",
        with_rows(lambda rows: {"start": rows.start + 1}), "plain"),
    Bug("a_partial_block_passes_for_full", blocking, "list_rows",
        with_rows(partial_as_full), "plain"),
    Bug("a_term_of_dk_is_dropped", blocking, "list_columns", one_less("partial"), "plain"),
    Bug("dk_reads_one_head_of_its_group", blocking, "list_columns",
        lambda right, *given: right(*given)._replace(head=0 * right(*given).head), "plain"),
    Bug("every_head_uses_the_mask_of_head_zero", BlockedCall, "element_mask",
        mask_of_head_zero, "plain"),
    Bug("keys_past_the_end_are_visible", blocking.RowTileSide, "token_index",
        lambda right, self: jnp.minimum(right(self), self.tokens - 1), "late"),
    Bug("padding_sees_padding", blocking, "token_blocks",
        lambda right, positions, ids, *sizes: right(positions, jnp.abs(ids), *sizes),
        "packed"),
    Bug("positions_are_ignored", blocking, "token_blocks",
        lambda right, positions, *rest: right(None, *rest), "late"),
    Bug("dq_with_a_bias_lacks_the_scale", xla, "dq_pass", times(unscale, None), "gaps"),
    Bug("dq_lacks_the_scale", xla, "dkv_pass", times(unscale, None, None), "plain"),
    Bug("dk_keeps_the_factor_of_base_2", xla, "dkv_pass",
        times(None, lambda config: LOG2E, None), "plain"),
    Bug("cotangent_of_lse_is_ignored", online_softmax, "backward_rows",
        lambda right, dtype, o, lse, do, dlse: right(dtype, o, lse, do, 0 * dlse), "plain"),
    Bug("sinks_are_left_out_of_lse", api, "_add_sinks",
        lambda right, out, lse, sinks: (right(out, lse, sinks)[0], lse), "capped"),
    Bug("sinks_take_no_probability", api, "_add_sinks",
        lambda right, out, lse, sinks: (out, right(out, lse, sinks)[1]), "capped"),
    Bug("only_one_sink_counts", api, "_add_sinks",
        lambda right, out, lse, sinks: right(out, lse, sinks[:, :1]), "capped"),
    Bug("bad_values_are_not_isolated", online_softmax, "isolate_nonfinite",
        lambda right, k, v: (k, v), "bad_value"),
    Bug("bad_queries_are_not_zeroed", online_softmax, "zero_nonfinite",
        lambda right, x: x, "bad_query"),
]
# fmt: on


@pytest.fixture
def fresh_caches():
    """A planted bug must be traced, and must not stay in a cache afterwards."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow  # quicker: conformance
@pytest.mark.parametrize("name", DETECTORS)
def test_detector_is_silent_on_the_right_kernel(name):
    assert noticed(DETECTORS[name], "xla") == []


@pytest.mark.parametrize("bug", gate(["row_term_is_dropped"], BUGS), ids=lambda bug: bug.name)
def test_seeded_bug_is_caught(bug, monkeypatch, fresh_caches):
    plant(monkeypatch, bug)
    if bug.case in DETECTORS:
        assert noticed(DETECTORS[bug.case], "xla"), "the bug went unnoticed"
    else:
        with pytest.raises(AssertionError):
            TESTS[bug.case]()
