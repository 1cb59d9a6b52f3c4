"""Every implementation through one table: out, lse, all gradients against float64 (N1, N2, N3)."""

import numpy as np
import pytest

import xsake
from tests.kernels.covered_cases import COVERED
from tests.kernels.implementations import RUNNABLE
from tests.lanes import slow
from xsake.testing.case_table import CASES
from xsake.testing.conformance import check_case, failures

# For the gate: what the backends share, and what only those with lists of blocks have.
SHARED = [
    "explicit_with_empty_rows_and_columns",
    "decode_one_query",
    "empty_layout_with_sinks",
    "cross_segments",
    "positions_per_batch",
]
OF_LISTS = [
    "causal_by_mask_argument",  # .ci/jax_range names it
    "one_token",
    "ragged_grid_traced",
    "indices_and_counts_per_batch",
    "everything_bfloat16",
    "layout_with_positions",
]
QUICK = {"reference": [*SHARED, "everything"]}


def rows():
    """(case, implementation); the reference has only the cases that no other covers."""
    for case in CASES:
        for name in RUNNABLE:
            if case.name in QUICK.get(name, SHARED + OF_LISTS):
                yield case, name
            elif name != "reference" or case.name not in COVERED:
                yield slow(case, name)


@pytest.mark.parametrize(
    ("case", "implementation"), list(rows()), ids=lambda value: getattr(value, "name", value)
)
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
