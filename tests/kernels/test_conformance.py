"""Every implementation through one table: out, lse, all gradients against float64 (N1, N2, N3)."""

import numpy as np
import pytest

import xsake
from xsake.kernels.select import implementations
from xsake.testing.case_table import CASES
from xsake.testing.conformance import check_case, failures

RUNNABLE = [name for name, declined in implementations().items() if declined is None]


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
