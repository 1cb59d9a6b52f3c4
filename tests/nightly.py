"""Tests that wait for the nightly lane because of their time.

Quicker tests of the same behaviour, named in the comments, run with every change.
"""

# By file, the beginnings of their names.
_TESTS = {
    "attention/test_jax_nn.py": [
        # booleans per query and key that are traced, with a bias, with segment ids
        "test_a_boolean_array_of_any_shape[(1, 1, 1, 70)",
        "test_a_boolean_array_of_any_shape[(2, 1, 70",
        "test_a_boolean_array_of_any_shape[(2, 1, 1, 70)-True",
        "test_a_boolean_array_of_any_shape[(2, 4",
        "test_a_boolean_array_of_any_shape[(4, 70",
        "test_a_boolean_array_of_any_shape[(2, 1, 1, 70)-False",
        "test_a_boolean_array_of_any_shape[(70, 70)-False",
        "test_arguments_that_both_have[booleans and causal",
        "test_arguments_that_both_have[causal]",
        "test_arguments_that_both_have[mask and causal",
        "test_arguments_that_both_have[scale",
        "test_arguments_that_both_have[window",
    ],
    "attention/test_compile_cache.py": [
        # one table of rules
        "test_many_rules_in_turn_compile_once_each[attend_l",
        "test_many_rules_in_turn_compile_once_each[attend_masked_layout",
    ],
    "attention/test_explain.py": [
        # neither
        "test_the_predicted_blocks_are_those_the_passes_really_compute[True-True",
        "test_the_predicted_blocks_are_those_the_passes_really_compute[True-False",
        "test_the_predicted_blocks_are_those_the_passes_really_compute[False-True",
    ],
    "attention/test_typed_shardings.py": [
        # arrays that are split over explicit axes
        "test_attention_inside_shard_map_with_its_checks",
        "test_kernels_lower_inside_shard_map_with_its_checks",
    ],
    "attention/test_validation.py": [
        # the other shape of each
        "test_bias_broadcasts_over_batch_and_heads_with_its_gradient[shape0",
        "test_masks_of_kv_heads_and_of_query_heads[2",
        "test_segments_narrow_a_layout_of_every_batch_element[False-False",
    ],
    "bench/test_measure.py": [
        # rows of the forward pass
        "test_every_side_has_a_row_that_was_checked_and_compared[backward",
        "test_memory_is_the_compilers_and_nothing_is_run",
    ],
    "bench/test_tuning.py": [
        # tables of tile sizes are read, pinned and written
        "test_a_search_confirms_its_winner_or_has_none",
    ],
    "cli/test_bench.py": [
        # rows of the command
        "test_a_trace_has_one_call_of_each_side",
    ],
    "cli/test_doctor.py": [
        # wrong values
        "test_failures_and_declined_cases_have_reasons_and_the_run_goes_on[breaks",
        "test_failures_and_declined_cases_have_reasons_and_the_run_goes_on[declines",
        "test_failures_and_declined_cases_have_reasons_and_the_run_goes_on[nan",
    ],
    "hads/test_sparse_attention.py": [
        # the other selectors, a part of the budget; gradients: training/test_attention.py
        "test_gradients_flow_through_planned_attention",
        "test_a_layer_computes_the_blocks_that_were_chosen[kl",
        "test_a_whole_budget_is_dense_attention",
        "test_new_inputs_compile_nothing",
    ],
    "hads/test_topk.py": [
        # counts of the other units
        "test_counts_are_met_to_the_block[row",
    ],
    "kernels/test_conformance.py": [
        # `everything` in bfloat16, windows per head, heads of 64 in float32, other layouts
        "test_result_is_within_the_error_budget[everything-xla",
        "test_result_is_within_the_error_budget[head_dim_192",
        "test_result_is_within_the_error_budget[head_dim_64_longer",
        "test_result_is_within_the_error_budget[layout_per_kv_head",
        "test_result_is_within_the_error_budget[merged_grid",
        "test_result_is_within_the_error_budget[more_queries",
        "test_result_is_within_the_error_budget[rows_of_many",
        "test_result_is_within_the_error_budget[window_100",
    ],
    "kernels/test_decode.py": [
        # positions, a traced list, a bias, gradients
        "test_outputs_equal_the_reference[kv positions",
        "test_outputs_equal_the_reference[list per",
        "test_outputs_equal_the_reference[query blocks",
        "test_outputs_equal_the_reference[segments",
        "test_outputs_equal_the_reference[shared",
        "test_outputs_equal_the_reference[sinks",
        "test_temporary_memory_does_not_grow_with_the_cache[False",
        "test_vmap_equals_a_loop",
    ],
    "kernels/test_determinism.py": [
        # the same bits in five calls and next to other batch elements
        "test_the_size_of_the_batch_does_not_matter",
    ],
    "kernels/test_compressed.py": [
        # outputs and gradients of one chunk
        "test_backends_and_spans_agree_on_many_chunks",
    ],
    "kernels/test_extreme_logits.py": [
        # float32
        "test_finite_and_right_wherever_the_truth_is_finite[xla-bfloat16",
    ],
    "kernels/test_gradient_checks.py": [
        # finite differences in float64
        "test_custom_gradients_equal_autodiff_of_the_dense_formula[small",
    ],
    "kernels/test_semantics.py": [
        # explicit lists with empty rows and columns
        "test_empty_rows_and_columns_are_exactly_zero[ragged_grid-xla",
    ],
    "kernels/test_gpu_pieces.py": [
        # tests/kernels/test_mosaic_gpu.py: a traced grid, forward and backward
        "test_gradients_of_split_rows_are_those_of_whole_ones",
        "test_pieces_hold_every_item_once_and_none_is_too_long",
    ],
    "kernels/test_gpu_planted_bugs.py": [
        # a tile that is overwritten
        "test_a_planted_bug_is_noticed[ampere-a_tile",
    ],
    "kernels/test_mosaic_gpu.py": [
        # a traced grid in bfloat16
        "test_kernels_are_within_the_error_budget_and_without_races[head_dim_96",
        "test_kernels_are_within_the_error_budget_and_without_races[segments_and",
    ],
    "kernels/test_mosaic_tpu.py": [
        # the strict interpreter: values, and races in a traced grid
        "test_interpreted_kernels_are_within_the_error_budget[explicit_with",
        "test_interpreted_kernels_are_within_the_error_budget[head_dim_96",
        "test_interpreted_kernels_are_within_the_error_budget[one_token",
        "test_interpreted_kernels_are_within_the_error_budget[positions_per",
        "test_interpreted_kernels_are_within_the_error_budget[ragged_grid",
        "test_interpreted_kernels_are_within_the_error_budget[segments_and",
        "test_no_race_no_stray_access_no_unwritten_memory[empty_layout",
        "test_no_race_no_stray_access_no_unwritten_memory[three_query",
    ],
    "kernels/test_tpu_planted_bugs.py": [
        # element masks that are never applied
        "test_planted_bug_is_noticed[a_group_is_used",
    ],
    "kernels/test_parity.py": [
        # conformance compares every backend with float64
        "test_implementations_agree_with_each_other",
    ],
    "kernels/test_poison.py": [
        # softcap with padding, and by the kernels of the TPU; packed segments
        "test_excluded_positions_never_change_a_bit[group_heads",
        "test_excluded_positions_never_change_a_bit[lists_with",
        "test_excluded_positions_never_change_a_bit[traced_far",
        "test_what_does_not_exist_never_reaches_a_gradient[queries_end",
        "test_what_does_not_exist_never_reaches_a_gradient[softcap-gpu",
        "test_what_does_not_exist_never_reaches_a_gradient[softcap-xla",
        "test_what_does_not_exist_never_reaches_a_gradient[softcap_and_unlisted",
    ],
    "kernels/test_seeded_bugs.py": [
        # a dropped term
        "test_seeded_bug_is_caught[every_head",
        "test_seeded_bug_is_caught[padding",
    ],
    "kernels/test_selected.py": [
        # outputs, gradients, vmap, jit
        "test_chunks_and_tiles_change_nothing",
    ],
    "kernels/test_selected_kernels.py": [
        # groups of six; the strict interpreter
        "test_three_heads_of_a_group_are_within_the_error_budget",
    ],
    "kernels/test_short_sequences.py": [
        # positions and ids, a traced list, a shared bias, softcap and sinks
        "test_results_and_gradients_equal_the_reference[bias",
        "test_results_and_gradients_equal_the_reference[half bias",
        "test_results_and_gradients_equal_the_reference[lists",
        "test_results_and_gradients_equal_the_reference[no mask",
        "test_results_and_gradients_equal_the_reference[shared bias-786432",
        "test_results_and_gradients_equal_the_reference[traced list-786432",
        "test_results_and_gradients_equal_the_reference[list per",
        "test_results_and_gradients_equal_the_reference[one block",
        "test_results_and_gradients_equal_the_reference[positions-",
        "test_results_and_gradients_equal_the_reference[rule per",
        "test_results_and_gradients_equal_the_reference[segments-",
    ],
    "kernels/test_tile_sizes.py": [
        # conformance at the default sizes
        "test_tile_sizes_never_change_the_result[full",
    ],
    "kernels/test_transformations.py": [
        # vmap over every operand, jit, export
        "test_remat_gives_the_same_gradients",
        "test_vmap_over_some_operands_only",
        "test_vmap_over_traced_layouts",
    ],
    "model/test_decoder.py": [
        # layers of one kind
        "test_layers_of_two_kinds_scan_like_they_unroll",
        "test_one_layout_for_all_layers_is_scanned_and_one_each_is_unrolled",
        "test_rematerialised_layers_give_the_same_gradients",
    ],
    "model/test_native_sparse.py": [
        # reading at once equals reading token by token
        "test_every_parameter_learns",
        "test_later_tokens_change_no_earlier_bit",
    ],
    "nsa/test_api.py": [
        # the definition in float64
        "test_every_first_block_is_forced_however_many",
        "test_packed_sequences_are_as_if_each_were_alone",
    ],
    "observability/test_watched_run.py": [
        # trackers that hang or raise, without a run
        "test_bad_trackers_lose_no_step_and_a_probe_and_a_trace_are_made",
    ],
    "server/test_documents.py": [
        # small documents; what is beyond a limit is said
        "test_a_thousand_runs_are_all_shown_and_no_file_stays_open",
        "test_large_documents_are_refused_at_once_and_the_largest_have_a_bound",
    ],
    "training/test_attention.py": [
        # gradients of chosen blocks
        "test_a_model_trains_by_a_plan_without_compiling_again",
        "test_choices_are_made_row_by_row_in_training",
        "test_other_weights_make_another_plan",
        "test_what_a_probe_tells_has_the_names_of_metrics",
    ],
    "training/test_native_sparse.py": [
        # tests/model: it reads at once as token by token
        "test_it_learns_through_the_trainer",
    ],
    "training/test_balanced.py": [
        # a reordered plan asks for the same blocks
        "test_another_order_is_the_same_function_with_equal_work",
    ],
    "training/test_faults.py": [
        # faults F3, F22
        "test_a_fault_is_survived[F2]",
        "test_a_fault_is_survived[F11",
        "test_a_fault_is_survived[F13",
        "test_a_fault_is_survived[F16",
        "test_a_fault_is_survived[F23",
    ],
    "training/test_resume.py": [
        # a new run refuses changed tokens; a checkpoint of 0.1.0 is resumed
        "test_a_complete_run_ends_well_without_its_goodput_file",
        "test_a_run_whose_folder_was_taken_stops_and_writes_no_more",
    ],
    "training/test_step.py": [
        # the other numbers of microbatches and chunks
        "test_bfloat16_keeps_float32_weights_and_stays_finite",
        "test_chunks_of_positions_change_no_loss[1",
        "test_microbatches_are_one_large_batch[0",
    ],
    "test_documentation.py": [
        # the clean install runs the quick start; tests/cli calibrates and generates
        "test_pages_show_what_their_code_prints[flax_tutorial",
        "test_pages_show_what_their_code_prints[hads",
        "test_pages_show_what_their_code_prints[native_sparse",
        "test_pages_show_what_their_code_prints[quick_start",
        "test_readme_quick_start_runs_in_a_fresh_interpreter",
        "test_the_path_of_a_new_model_owner_can_be_walked",
    ],
}
NIGHTLY = tuple(f"tests/{file}::{name}" for file, names in _TESTS.items() for name in names)
