"""The slow expander against the masks and layouts it re-reads (N1)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xsake.masks import Segments
from xsake.testing import expand, strategies
from xsake.testing.case_table import BY_NAME, CASES, EVERY_STRUCTURE

POSITIONS = np.array([0, 1, 2, 7, 15, 16, 17, 23, 24, 31, 40, 77, 92, 1000])


@given(mask=strategies.masks())
def test_slow_rules_agree_with_the_masks(mask):
    q, k = POSITIONS[:, None], POSITIONS[None, :]
    np.testing.assert_array_equal(expand.pairs(mask, q, k), mask.allows(q, k))


def test_slow_rules_agree_on_every_kind_of_mask():
    q, k = POSITIONS[:, None], POSITIONS[None, :]
    for head in range(EVERY_STRUCTURE.heads):
        theirs = EVERY_STRUCTURE.for_head(head).allows(q, k)
        np.testing.assert_array_equal(expand.pairs(EVERY_STRUCTURE, q, k, head), theirs)


@given(ids=st.lists(st.integers(-1, 3), min_size=1, max_size=12))
def test_segments_see_only_themselves(ids):
    mask, at = Segments(np.array(ids)), np.arange(len(ids) + 2)
    found = expand.pairs(mask, at[:, None], at[None, :])
    for i, j in np.ndindex(found.shape):
        inside = i < len(ids) and j < len(ids)
        assert found[i, j] == (inside and ids[i] == ids[j] and ids[i] >= 0)


def test_layouts_of_masks_expand_to_the_masks():
    for case in CASES:
        if case.block is not None and not case.coordinates.are_moved:
            direct = expand.mask_tokens(case.mask, case.coordinates, case.q_heads)
            listed = expand.layout_tokens(case.schedule, case.coordinates, case.q_heads)
            np.testing.assert_array_equal(listed, direct, err_msg=case.name)


def test_resized_and_traced_layouts_expand_alike():
    ragged = BY_NAME["ragged_grid"].allowed
    for other in ("ragged_grid_traced", "merged_grid_with_holes"):
        np.testing.assert_array_equal(BY_NAME[other].allowed, ragged, err_msg=other)
