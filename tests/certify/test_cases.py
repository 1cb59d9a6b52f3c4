"""The named cases: complete, realistic, and cheap to look at."""

import jax
import pytest

from tests.certify import fake_family
from xsake.certify import build, cases
from xsake.errors import ArgumentError
from xsake.kernels.paged_decode import mosaic_tpu as paged_tpu
from xsake.kernels.selected import mosaic_tpu


def test_heads_at_128k_are_whole_kv_groups_of_at_most_16():
    for case in cases.all_cases().values():
        heads = cases.MODELS[case.shape]
        assert case.q_heads * heads.kv == case.kv_heads * heads.q
        if case.tokens == 131072 and case.pass_name != cases.PAGED_PASS:
            assert 8 <= case.q_heads <= 16
        else:
            assert (case.q_heads, case.kv_heads) == (heads.q, heads.kv)
    assert cases.all_cases()["llama3_8b_128k_10_bf16_block128_forward"].q_heads == 16


def test_selections_bring_the_controls_and_patterns_find_names():
    smoke = cases.select_cases("smoke", fake_family)
    assert len(smoke) < 40
    assert all(control in smoke for control in fake_family.CONTROLS)
    everything = cases.select_cases("all", fake_family)
    assert len(everything) == len(cases.all_cases()) + len(fake_family.CONTROLS)
    found = cases.select_cases("llama3_8b_4k_25_bf16_d*", fake_family)
    assert [case.pass_name for case in found] == ["dq", "dkv"]
    with pytest.raises(ArgumentError, match="llama4"):
        cases.select_cases("llama4*", fake_family)


@pytest.mark.parametrize("name", ["smollm2_135m", "llama3_8b", "qwen3_14b", "gemma3_4b"])
@pytest.mark.parametrize("budget", [10, 25])
def test_heads_differ_and_their_mean_is_the_budget(name, budget):
    case = cases.all_cases()[f"{name}_4k_{budget}_bf16_forward"]
    layout = build.build_layout(case)
    visible = layout.q_blocks * (layout.q_blocks + 1) // 2
    per_head = layout.to_block_mask()[0].sum((1, 2)) / visible
    assert per_head.mean() == pytest.approx(budget / 100, abs=1e-3)
    assert per_head.max() > 2 * per_head.min()


def test_a_traced_layout_is_an_argument_and_a_static_one_is_not():
    traced, static = (
        build.build(fake_family.case("x", traced=is_traced), fake_family, "cpu")
        for is_traced in (True, False)
    )
    assert len(jax.tree.leaves(traced.arguments)) == 3 + 3
    assert len(jax.tree.leaves(static.arguments)) == 3


def test_a_replaced_number_is_put_back():
    place = f"{fake_family.KERNELS}.LIMIT"
    with pytest.raises(ZeroDivisionError), build.override_constants({place: 9}):
        assert fake_family.LIMIT == 9
        _ = 1 / 0
    assert fake_family.LIMIT == 1


@pytest.mark.parametrize("name", cases.SELECTED_PASSES)
def test_a_case_of_lists_per_token_is_one_launch_over_a_chunk(name):
    case = cases.all_cases()[f"gemma3_4b_4k_bf16_{name}"]
    built = build.build_selected(case, mosaic_tpu)
    assert case.slots == 16 and built.cost.launches == 1 and built.cost.steps > built.cost.listed
    assert 0.4 < case.budget < 0.5
    assert built.cost.flops > 4096 * 16 * 64 * 2 * 256  # at least the products of every pair


def test_a_case_of_pages_reads_the_listed_ones_only():
    name = "llama3_8b_32k_{}_{}_paged_decode"
    cost = lambda *which: (
        build.build_paged(cases.all_cases()[name.format(*which)], paged_tpu, "tpu").cost
    )
    quarter, chunk, int8 = (
        cost(*which)
        for which in ((25, "bf16_page16"), (100, "bf16_page16_64queries"), (100, "int8_page32"))
    )
    assert (quarter.listed, chunk.listed, int8.listed) == (8 * 512, 8 * 2048, 8 * 1024)
    assert quarter.flops == 4 * 32 * 128 * 32768 // 4
    assert chunk.flops == 64 * 4 * quarter.flops
    assert 1.9 < chunk.bytes_read / int8.bytes_read < 2.1
    assert 3.9 < chunk.bytes_read / quarter.bytes_read < 4.1
