"""Every implementation through one table: out, lse, all gradients against float64 (N1, N2, N3)."""

import numpy as np
import pytest

import xsake
from tests.lanes import RUNNABLE, gate
from xsake.testing.case_table import CASES
from xsake.testing.conformance import check_case, failures

EVERY_TIME = [
    "causal_by_mask_argument",
    "explicit_with_empty_rows_and_columns",
    "every_structure",
    "window_100_100",
    "more_queries_than_keys",
    "one_token",
    "decode_one_query",
    "single_visible_key",
    "head_dim_192_values_128",
    "rows_of_many_full_blocks",
    "layout_per_kv_head",
    "ragged_grid_traced",
    "indices_and_counts_per_batch",
    "merged_grid_with_holes",
    "empty_layout_with_sinks",
    "everything",
    "everything_bfloat16",
    "head_dim_64_longer_float16",
    "layout_with_positions",
    "cross_segments",
    "positions_per_batch",
]


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("case", gate(EVERY_TIME, CASES), ids=lambda case: case.name)
def test_result_is_within_the_error_budget(case, implementation):
    assert failures(check_case(xsake.attention, case, implementation)) == []


def test_the_table_reaches_what_it_promises():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.dtype for case in CASES} == {"float32", "bfloat16", "float16"}
    assert {case.q_heads // case.kv_heads for case in CASES} >= {1, 2, 4, 8}
    assert {case.head_dim for case in CASES} >= {16, 32, 64, 80, 96, 192, 256}
    assert any(not case.allowed.any(-1).all() for case in CASES), "no empty row"
    assert any(not case.allowed.any(-2).all() for case in CASES), "no empty column"
    assert any(not case.allowed.any((-1, -2)).all() for case in CASES), "no empty head"
    assert any(case.allowed.any() and np.all(case.allowed.sum(-1) == 1) for case in CASES), (
        "no single key"
    )
