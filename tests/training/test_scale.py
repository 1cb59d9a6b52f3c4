"""Scale on paper: the arithmetic, how collectives are read, and what committed outcomes say."""

import json

import pytest

from benchmarks.pages.marked_page import filled
from benchmarks.scale import arithmetic, hlo
from benchmarks.scale.cases import BLOCK, LLAMA_8B, SINKS, WINDOW, ScaleCase, case_of
from benchmarks.scale.compiling import RESULTS
from benchmarks.scale.page import PAGE, tables
from xsake.layout import BlockLayout
from xsake.masks import Causal, parse
from xsake.training.state import abstract_state, flat_parameters

OUTCOMES = sorted(RESULTS.glob("*.json"))

LOOP = """
%body (x: (s32[], f32[16])) -> (s32[], f32[16]) {
  %x = (s32[], f32[16]{0:T(128)}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %a = f32[16]{0:T(128)} get-tuple-element(%x), index=1
  %s = (f32[16]{0}, f32[64]{0}) all-gather-start(%a), replica_groups=[8,4]<=[32], dimensions={0}
  %d = f32[64]{0} all-gather-done(%s)
  %f = f32[16]{0} fusion(%d), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (s32[], f32[16]{0}) tuple(%i, %f)
}

%until (y: (s32[], f32[16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(32)
  %y = (s32[], f32[16]{0:T(128)}) parameter(0)
  %j = s32[] get-tuple-element(%y), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

%all-reduce-scatter.1 (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  %r = f32[64]{0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %c = f32[16]{0} slice(%r), slice={[0:16]}
}

ENTRY %main (p: f32[16]) -> (s32[], f32[16]) {
  %p = f32[16]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[16]{0}) tuple(%zero, %p)
  %w = (s32[], f32[16]{0}) while(%start), condition=%until, body=%body
  ROOT %m = (s32[], f32[16]{0}) collective-permute(%w), source_target_pairs={{0,1},{1,0}}
}
"""


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    found = {one.kind: one for one in hlo.collectives(LOOP)}
    assert found["all-gather"] == hlo.Collectives("all-gather", 4, 1, 32, 32 * 256)
    assert found["reduce-scatter"] == hlo.Collectives("reduce-scatter", 4, 1, 32, 32 * 256)
    assert found["collective-permute"] == hlo.Collectives("collective-permute", None, 1, 1, 68)
    assert len(found) == 3
    assert hlo.loop_rounds(LOOP) == [32]
    told = LOOP.replace("direction=LT", "direction=NE").replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"},"x":[]}'
    )
    assert hlo.loop_rounds(told) == [7]


def test_a_loop_that_does_not_say_how_often_it_runs_is_told():
    text = LOOP.replace("direction=LT", "direction=NE")
    assert hlo.loop_rounds(text) == [None]
    assert {one.runs for one in hlo.collectives(text)} == {1}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2},{3,4,5}}", 3),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['data'=1,'fsdp'=4,'tensor'=2] {'tensor','fsdp'}", 8),
    ],
)
def test_groups_are_read_in_every_way_that_they_are_written(groups, size):
    text = LOOP.replace("[8,4]<=[32]", groups)
    gathered = next(one for one in hlo.collectives(text) if one.kind == "all-gather")
    assert gathered.group == size


def test_a_collective_that_is_spread_over_fusions_counts_once():
    line = "%a{} = f32[64] all-gather(%p), channel_id=7, replica_groups=[4,8]<=[32]"
    lines = [line.format(number) for number in range(3)]
    chained = [f'{one}, frontend_attributes={{chain_id="0"}}' for one in lines]
    for listed, expected in ((lines, 3), (chained, 1)):
        text = "\n  ".join(["ENTRY %main (p: f32[8]) -> f32[64] {", *listed]) + "\n}"
        (found,) = hlo.collectives(text)
        assert found.runs == found.places == expected


@pytest.mark.parametrize("tokens", [1024, 4096, 8192])
def test_keys_of_a_window_are_those_that_its_layout_lists(tokens):
    mask = Causal() & parse(f"window({WINDOW - 1}, 0) | sinks({SINKS})")
    layout = BlockLayout.from_mask(mask, q_tokens=tokens, block_q=128, block_kv=128)
    listed = int(layout.row_starts[-1])
    counted = arithmetic.window_keys(tokens, 128, window=WINDOW, sinks=SINKS)
    assert counted * tokens == listed * 128 * 128


@pytest.mark.parametrize("tokens", [1024, 5000])
def test_keys_of_dense_attention_are_those_that_its_layout_lists(tokens):
    layout = BlockLayout.from_mask(Causal(), q_tokens=tokens, block_q=128, block_kv=128)
    counted = arithmetic.dense_keys(tokens, 128)
    assert counted * layout.q_blocks == int(layout.row_starts[-1]) * 128


def test_weights_are_those_of_the_model():
    config = case_of("v5p-256", "dense", {"fsdp": 32, "tensor": 8}, 32).config
    shapes = flat_parameters(abstract_state(config).parameters)
    products = {path: x.size for path, x in shapes.items() if "norm" not in path}
    layers = sum(size for path, size in products.items() if path.startswith("layers"))
    assert layers == LLAMA_8B.layers * arithmetic.layer_weights(LLAMA_8B)
    assert sum(x.size for x in shapes.values()) == 8_030_261_248
    assert arithmetic.weight_flops(LLAMA_8B) == 8 * (layers + products["head"])


def test_a_plan_of_the_whole_budget_is_dense_attention_and_the_selector():
    dense = arithmetic.dense_cost(LLAMA_8B, 32768, BLOCK)
    plan = arithmetic.planned_cost(LLAMA_8B, 32768, BLOCK, 1.0)
    assert plan.attention == dense.attention
    assert plan.total == dense.total + plan.selector
    assert plan.selector < 0.1 * dense.attention


@pytest.mark.parametrize("path", OUTCOMES, ids=lambda path: path.stem)
def test_a_committed_outcome_has_what_the_page_needs(path):
    outcome = json.loads(path.read_text(encoding="utf-8"))
    named = dict(outcome["case"])
    assert named.pop("name") == path.stem
    case = ScaleCase.model_validate(named)
    assert case.name == path.stem
    compiler = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin"}[case.machine.platform]
    assert outcome["versions"][compiler] and outcome["dirty"] is False
    if outcome["verdict"] != "compiled":
        assert outcome["message"]
        return
    memory = outcome["memory"]
    needed = memory["arguments"] + memory["outputs"] - memory["shared_by_both"]
    assert memory["needed"] == needed + memory["temporaries"] + memory["program"]
    assert memory["limit"] == case.machine.memory_bytes
    assert memory["fits"] == (memory["needed"] <= memory["limit"])
    assert outcome["kernels"] >= 3
    assert {one["kind"] for one in outcome["collectives"]} <= set(hlo.KINDS)


def test_the_page_says_what_the_files_and_the_arithmetic_say():
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, tables()) == text
