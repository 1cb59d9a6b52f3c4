"""Cases of the conformance table that interpreters and the reference need not run.

Next to each is the case that has the same steps of a kernel: every case has a scale, sinks are
added outside of kernels, a resized layout is a layout, and other masks are other formulas, which
test_mask_program.py has. The reference has no steps at all. Only `xla` runs the whole table.
"""

from xsake.testing.case_table import BY_NAME, CASES

COVERED = {
    "causal": "ragged_grid_traced",
    "causal_by_mask_argument": "head_dim_64_longer_bfloat16",
    "full_odd_length": "more_keys_than_queries",
    "no_mask_at_all": "more_keys_than_queries",
    "random_cells": "every_structure",
    "window_256_0": "window_100_100",
    "window_0_256": "window_100_100",
    "head_dim_80": "head_dim_96_values_40",
    "head_dim_64_longer": "head_dim_64_longer_bfloat16",
    "rows_of_many_full_blocks": "head_dim_64_longer_bfloat16",
    "explicit_scale": "decode_one_query",
    "group_heads_differ": "group_heads_differ_bfloat16",
    "ragged_grid": "ragged_grid_traced",
    "split_64_to_32_16": "window_100_100",
    "merged_64_to_128": "merged_grid_with_holes",
    "empty_layout_with_sinks": "empty_layout",
    "sinks": "group_heads_differ_bfloat16",
    "two_sinks_per_head": "group_heads_differ_bfloat16",
    "late_queries": "positions_per_batch",
    "explicit_with_empty_rows_and_columns_bfloat16": "explicit_with_empty_rows_and_columns",
}
NEEDED = [case for case in CASES if case.name not in COVERED]
assert COVERED.keys() <= BY_NAME.keys() and {*COVERED.values()} <= {case.name for case in NEEDED}
