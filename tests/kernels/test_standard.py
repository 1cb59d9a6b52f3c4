"""Which test stands for which line of the numerics standard; a line without one fails here."""

import ast
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent

STANDARD = {
    "N1 float64 oracle and slow expander": [
        "test_oracle.py::test_oracle_gradients_agree_with_finite_differences",
        "test_oracle.py::test_oracle_equals_autodiff_of_the_dense_formula",
        "test_expander.py::test_slow_rules_agree_with_the_masks",
    ],
    "N2 error ratio": ["test_conformance.py::test_result_is_within_the_error_budget"],
    "N2 a NaN never passes": ["test_error_budget.py::test_a_non_finite_value_never_passes"],
    "N3 absolute backstop": [
        "test_error_budget.py::test_the_backstop_holds_even_when_the_comparator_is_bad"
    ],
    "N4 check_grads and differences": [
        "test_gradient_checks.py::test_check_grads_in_float64",
        "test_gradient_checks.py::test_directional_differences_at_head_dim_64",
        "test_gradient_checks.py::test_custom_gradients_equal_autodiff_of_the_dense_formula",
    ],
    "N5 degenerate": [
        "test_semantics.py::test_empty_rows_and_columns_are_exactly_zero",
        "test_semantics.py::test_sinks_alone_give_their_own_lse",
        "test_conformance.py::test_the_table_reaches_what_it_promises",
    ],
    "N6 extreme logits": [
        "test_extreme_logits.py::test_finite_and_right_wherever_the_truth_is_finite"
    ],
    "N7 poison": [
        "test_poison.py::test_excluded_positions_never_change_a_bit",
        "test_poison.py::test_rows_whose_list_lacks_a_block_do_not_read_it",
        "test_poison.py::test_a_poisoned_key_reaches_only_the_queries_that_see_it",
        "test_poison.py::test_a_poisoned_query_reaches_only_the_keys_it_sees",
        "test_poison.py::test_cotangents_of_empty_rows_do_not_leak",
        "test_poison.py::test_the_tail_of_the_last_block_is_never_read",
    ],
    "N8 determinism": [
        "test_determinism.py::test_five_calls_give_the_same_bits",
        "test_determinism.py::test_another_process_gives_the_same_bits",
        "test_determinism.py::test_batch_neighbours_do_not_matter",
        "test_determinism.py::test_the_order_of_key_blocks_moves_only_rounding",
    ],
    "N9 properties": [
        "test_kernel_properties.py::test_every_drawn_case_is_within_the_error_budget",
        "test_kernel_properties.py::test_weights_of_a_row_sum_to_one",
        "test_kernel_properties.py::test_constant_values_come_back_unchanged",
        "test_kernel_properties.py::test_shifting_all_logits_shifts_only_the_lse",
        "test_kernel_properties.py::test_permuting_keys_with_the_layout_changes_nothing",
        "test_kernel_properties.py::test_a_block_changes_only_the_rows_that_list_it",
        "test_kernel_properties.py::test_disjoint_layouts_merge_by_their_lse",
        "test_kernel_properties.py::test_captured_mass_grows_with_the_layout",
        "test_kernel_properties.py::test_layout_json_round_trip_is_byte_equal",
    ],
    "N10 parity": [
        "test_parity.py::test_agrees_with_jax_nn",
        "test_parity.py::test_implementations_agree_with_each_other",
    ],
    "N11 toy training": ["test_toy_training.py::test_full_layout_reproduces_the_dense_loss_curve"],
    "N12 seeded bugs": ["test_seeded_bugs.py::test_seeded_bug_is_caught"],
    "peers: windows at block 64, odd length": [
        "test_conformance.py::test_result_is_within_the_error_budget"
    ],
    "peers: block sizes 128, 64, 32 agree": [
        "test_semantics.py::test_block_sizes_never_change_the_meaning"
    ],
    "peers: dK by differences at D=64": [
        "test_gradient_checks.py::test_directional_differences_at_head_dim_64"
    ],
    "peers: sink mass and cuts": [
        "test_semantics.py::test_sink_mass_does_not_depend_on_how_keys_are_cut"
    ],
    "peers: tile sizes change nothing": [
        "test_tile_sizes.py::test_tile_sizes_never_change_the_result"
    ],
    "peers: duplicates": [
        "../layout/test_indices_counts.py::test_static_duplicates_are_refused",
        "../layout/test_indices_counts.py::test_traced_duplicates_merge_and_strays_vanish",
    ],
    "peers: unsupported arguments raise": [
        "../attention/test_validation.py::test_errors_state_what_got_expected_and_fix"
    ],
    "peers: reported budget is counted": [
        "../layout/test_layout_value.py::test_statistics_of_a_causal_layout_with_ragged_heads"
    ],
    "traced layouts": [
        "test_transformations.py::test_traced_layout_gives_the_bits_of_the_static_one",
        "test_transformations.py::test_a_new_traced_layout_in_one_bucket_compiles_nothing",
    ],
}


def defined_in(path):
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("line", STANDARD)
def test_every_line_of_the_standard_has_its_tests(line):
    for name in STANDARD[line]:
        file, function = name.split("::")
        assert function in defined_in(HERE / file), name
