"""The slow expansion of layouts against that of masks, which tests/masks/test_rules.py has (N1)."""

import numpy as np

from xsake.testing import expand
from xsake.testing.case_table import BY_NAME, CASES


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
