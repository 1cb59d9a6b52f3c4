"""Tests that wait for the nightly lane because of their time.

Quicker tests of the same behaviour, named in the comments, run with every change.
"""

# The beginnings of their ids.
NIGHTLY = (
    # test_arguments_that_both_have and two shapes of booleans
    "tests/attention/test_jax_nn.py::test_a_boolean_array_of_any_shape[(2, 4",
    "tests/attention/test_jax_nn.py::test_a_boolean_array_of_any_shape[(2, 1, 70",
    "tests/attention/test_jax_nn.py::test_a_boolean_array_of_any_shape[(2, 1, 1, 70)-True",
    # one table of rules
    "tests/attention/test_compile_cache.py::test_many_rules_in_turn_compile_once_each[attend_l",
    "tests/attention/test_compile_cache.py::test_many_rules_in_turn_compile_once_each[attend_masked_layout",
    # both and neither
    "tests/attention/test_explain.py::test_the_predicted_blocks_are_those_the_passes_really_compute[True-False",
    "tests/attention/test_explain.py::test_the_predicted_blocks_are_those_the_passes_really_compute[False-True",
    # test_arrays_that_are_split_over_explicit_axes, and the kernels of the TPU
    "tests/attention/test_typed_shardings.py::test_attention_inside_shard_map_with_its_checks",
    "tests/attention/test_typed_shardings.py::test_kernels_lower_inside_shard_map_with_its_checks[cuda",
    # forward rows; rows of the command
    "tests/bench/test_measure.py::test_every_side_has_a_row_that_was_checked_and_compared[backward",
    "tests/cli/test_bench.py::test_a_trace_has_one_call_of_each_side",
    # wrong values, and a backend that declines
    "tests/cli/test_doctor.py::test_failures_and_declined_cases_have_reasons_and_the_run_goes_on[nan",
    "tests/cli/test_doctor.py::test_failures_and_declined_cases_have_reasons_and_the_run_goes_on[breaks",
    # positions, a traced list, sinks, a bias
    "tests/kernels/test_decode.py::test_outputs_equal_the_reference[segments and positions",
    "tests/kernels/test_decode.py::test_outputs_equal_the_reference[kv positions",
    "tests/kernels/test_decode.py::test_outputs_equal_the_reference[shared",
    # gradients of split rows
    "tests/kernels/test_gpu_pieces.py::test_pieces_hold_every_item_once_and_none_is_too_long",
    # reading at once equals reading token by token
    "tests/model/test_native_sparse.py::test_every_parameter_learns",
    "tests/training/test_native_sparse.py::test_it_learns_through_the_trainer",
    # gradients of chosen blocks, other weights make another plan
    "tests/training/test_attention.py::test_a_model_trains_by_a_plan_without_compiling_again",
    "tests/training/test_attention.py::test_what_a_probe_tells_has_the_names_of_metrics",
    # shards list the blocks of the plan
    "tests/training/test_balanced.py::test_weights_and_plan_in_another_order_are_the_same_function",
    # faults F3, F22, F23
    "tests/training/test_faults.py::test_a_fault_is_survived[F2]",
    "tests/training/test_faults.py::test_a_fault_is_survived[F11",
    "tests/training/test_faults.py::test_a_fault_is_survived[F13",
    "tests/training/test_faults.py::test_a_fault_is_survived[F16",
    # a new run refuses changed tokens; a checkpoint of 0.1.0 is resumed
    "tests/training/test_resume.py::test_a_resumed_run_refuses_tokens_that_were_changed",
    "tests/training/test_resume.py::test_a_complete_run_ends_well_without_its_goodput_file",
    # the quick start, the other pages, `xsake calibrate` and `generate` in tests/cli
    "tests/test_documentation.py::test_the_path_of_a_new_model_owner_can_be_walked",
    "tests/test_documentation.py::test_pages_show_what_their_code_prints[flax_tutorial",
    "tests/test_documentation.py::test_pages_show_what_their_code_prints[native_sparse",
)
