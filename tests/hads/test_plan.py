"""Plans: the same bytes again, exact at every length, and nothing a stranger wrote is believed."""

import functools
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import hypothesis
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hads.sample import POOLED, profile
from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, closest_total, visible_blocks
from xsake.hads.plan import SparsityPlan
from xsake.hads.policies import (
    KL,
    POLICIES,
    Entropy,
    EntropyRandom,
    Policy,
    Static,
    TopP,
    Uniform,
    make_policy,
)
from xsake.schemas import schema_text

SETTINGS = {"original": {"seed": 3}, "top_p": {"p": 0.9}, "bounded": {"eps": 0.05, "floor": 0}}
EVERY_POLICY = [make_policy(name, **SETTINGS.get(name, {})) for name in POLICIES]
LIMIT = 100 * 10**6  # bytes that a malformed file may cost


def plan_of(policy: Policy, budget: float = 0.5, **sizes) -> SparsityPlan:
    asked = None if isinstance(policy, Entropy | TopP) else budget
    selector = None if isinstance(policy, Static | EntropyRandom) else POOLED
    return SparsityPlan.of(profile(**{"n": 12} | sizes), policy, asked, selector=selector)


COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks/results/hads").glob("plan_*.json"))
GOOD = plan_of(KL())
TEXT = GOOD.to_json()
STATIC = plan_of(Static()).to_json()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_plans_of_version_0_1_0_are_read_and_keep_their_keys(path):
    plan, before = SparsityPlan.load(path), json.loads(path.read_text())
    after = json.loads(plan.to_json())
    assert plan.forced == ForcedBlocks(1, 2) and after["always"] == {"sinks": 1, "locals": 2}
    assert all(after[name] == before[name] for name in before)


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=repr)
@given(seed=st.integers(0, 10**6), budget=st.floats(0.45, 1))
@settings(max_examples=10)
def test_plans_are_read_back_as_written(policy, seed, budget):
    plan = plan_of(policy, budget, seed=seed)
    again = SparsityPlan.from_json(plan.to_json().encode())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert plan.diff(again) == "no difference"


@functools.cache
def cached_plan(policy: Policy) -> SparsityPlan:
    return plan_of(policy)


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=repr)
def test_totals_are_exact_at_every_length(policy):
    plan = cached_plan(policy)
    np.testing.assert_array_equal(plan.totals(12), plan.blocks)
    for n in range(3, 301) if type(policy) is KL else (*range(3, 30), *range(30, 301, 9), 300):
        totals = plan.totals(n)
        expected = closest_total(plan.budget, heads=6, n=n, forced=plan.forced)
        assert totals.sum() == expected
        assert totals.min() >= plan.forced.total(n) and totals.max() <= visible_blocks(n)
        np.testing.assert_array_equal(plan.row_counts(n).sum(axis=-1), totals)


def test_heads_keep_their_shares_at_other_lengths():
    plan = plan_of(KL(), 0.2, n=64)
    np.testing.assert_allclose(
        plan.totals(128) / visible_blocks(128), plan.blocks / visible_blocks(64), atol=1e-3
    )


@given(st.integers(1, 40))
def test_static_heads_have_exactly_their_blocks_at_any_length(n):
    plan = cached_plan(Static())
    for layer, head in np.ndindex(2, 3):
        assert plan.static_grid(layer, head, n).sum() == plan.totals(n)[layer, head]


def test_only_static_heads_have_a_grid_before_the_input_is_known():
    with pytest.raises(ArgumentError, match="XSK-102.no-static-blocks"):
        GOOD.static_grid(0, 0, 12)


@pytest.mark.parametrize("n", [0, -1, 2**16 + 1, 10**12])
def test_impossible_lengths_are_refused(n):
    with pytest.raises(ArgumentError, match="XSK-102.plan-length"):
        GOOD.row_counts(n)


def test_a_head_with_all_its_blocks_is_dense_and_needs_no_selector():
    plan = plan_of(Uniform(), 1.0)
    assert {head.kind for layer in plan.heads for head in layer} == {"dense"}
    assert plan.effective_budget == 1.0


def test_the_effective_budget_counts_the_selector_for_heads_that_use_it():
    assert plan_of(Uniform()).effective_budget == pytest.approx(0.5 + POOLED.cost)
    assert plan_of(Static()).effective_budget == pytest.approx(0.5)


def test_the_original_draws_its_blocks_around_a_window():
    plan = plan_of(EntropyRandom(window=1, seed=3))
    assert plan.forced == ForcedBlocks(num_sink=0, num_local=2)
    assert (plan.selector.name, plan.selector.settings) == ("random", {"window": 1, "seed": 3})


def test_a_plan_names_its_policy_and_the_curves_it_was_made_by():
    assert GOOD.policy.settings == {"curve": "pooled"}
    other = SparsityPlan.of(profile(n=12), KL(curve="oracle", floor=2), 0.8, selector=POOLED)
    assert other.policy.settings == {"curve": "oracle", "floor": 2}
    assert other.heads[0][0].weights == GOOD.heads[0][0].weights


@pytest.mark.parametrize(
    ("policy", "selector"),
    [(Uniform(), None), (Static(), POOLED), (EntropyRandom(), POOLED)],
    ids=repr,
)
def test_a_plan_has_one_way_to_choose_blocks(policy, selector):
    with pytest.raises(ArgumentError, match="requires a selector|takes no selector"):
        SparsityPlan.of(profile(n=12), policy, 0.5, selector=selector)


def test_a_plan_tells_what_it_is():
    text = str(GOOD)
    assert "tiny" in text and "50.00%" in text and "densest heads:  L" in text
    assert text.count("#") > 20
    assert len(text.splitlines()) < 20


def test_two_plans_are_compared_by_field_and_by_head():
    text = GOOD.diff(plan_of(Static(), 0.6))
    assert "budget: 0.5 -> 0.6" in text
    assert "policy.name: kl -> static" in text
    assert "of 6 differ" in text and "dynamic -> static" in text
    assert "6 -> 4, not compared" in GOOD.diff(plan_of(KL(), heads=2))


def test_a_plan_carries_what_its_selector_needs_and_can_be_a_key():
    found = profile(n=12)
    np.testing.assert_array_equal(GOOD.weights, found.selector_weights["pooled"])
    np.testing.assert_array_equal(GOOD.components_array, found.components)
    assert plan_of(Static()).components == () and plan_of(Static()).weights.shape == (2, 3, 0)
    assert {GOOD: 1}[SparsityPlan.from_json(TEXT.encode())] == 1


def test_a_plan_fits_its_model_only():
    GOOD.validate_for(2, 3, kv_heads=1, head_dim=8, digest="0")
    for sizes in ({"layers": 3}, {"q_heads": 6}, {"kv_heads": 3}, {"digest": "1"}):
        with pytest.raises(ArgumentError, match="XSK-102.plan-model"):
            GOOD.validate_for(**{"layers": 2, "q_heads": 3} | sizes)


def test_a_real_models_plan_is_small_and_has_a_head_per_line(tmp_path):
    plan = plan_of(KL(), 0.2, layers=30, heads=9, n=64, weights=16)
    path = tmp_path / "deep" / "plan.json"
    plan.save(path)
    assert path.stat().st_size < 100_000
    assert sum('"kind"' in line for line in path.read_text().splitlines()) == 270
    assert SparsityPlan.load(path) == plan


def test_a_written_plan_fits_the_schema():
    schema = json.loads(schema_text("plan.schema.json"))
    for text in (TEXT, STATIC):
        jsonschema.validate(json.loads(text), schema)


def refused_within_limits(data: bytes) -> bool:
    """Whether the bytes are refused, cleanly; they may be read if they are harmless."""
    try:
        plan = SparsityPlan.from_json(data)
    except ArgumentError as error:
        assert str(error).replace("\n", "").isprintable() and len(str(error)) < 1000
        return True
    assert plan.totals(20).sum() and str(plan) and plan.diff(GOOD) and plan.row_counts(3).size
    return False


def changed(**changes) -> bytes:
    return json.dumps(json.loads(TEXT) | changes).encode()


HEAD = json.loads(TEXT)["heads"][0][0]
LAYERS = json.loads(TEXT)["heads"]


def with_head(**changes) -> bytes:
    return changed(heads=[[HEAD | changes, *LAYERS[0][1:]], LAYERS[1]])


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"null", b"\xff\xfe", TEXT.encode()[:-3]),
        TEXT.replace('"budget": 0.5', '"budget": NaN').encode(),
        TEXT.replace('"budget": 0.5', '"budget": 1e999').encode(),
        TEXT.replace('"budget": 0.5', '"budget": 0.5, "budget": 0.5').encode(),
        TEXT.replace('"budget": 0.5', '"budget": ' + "9" * 5000).encode(),
        *(changed(budget=value) for value in (0.51, "0.5", True)),
        changed(effective_budget=0.5),
        changed(schema_version=2),
        changed(summary="\x1b[2Jcleared"),
        *(changed(block=size) for size in (0, 1)),
        changed(always={"sinks": 0, "locals": 0}),
        changed(always={"sinks": 2**70, "locals": 0}),
        changed(heads=[]),
        changed(heads=LAYERS[:1]),
        changed(heads=[LAYERS[0], LAYERS[1][:2]]),
        changed(model={**json.loads(TEXT)["model"], "layers": 512, "q_heads": 512}),
        changed(calibration={**json.loads(TEXT)["calibration"], "context": 2**50}),
        *(with_head(blocks=blocks) for blocks in (HEAD["blocks"] + 1, 10**17, 0)),
        with_head(share=0.1),
        with_head(kind="dense"),
        with_head(kind="static", offsets=[5, 4]),
        with_head(kind="static", offsets=[12]),
        with_head(kind="static", columns=[2**40]),
        with_head(columns=[3]),
        *(with_head(weights=weights) for weights in (["a"], [1.0], [0] * 257)),
        changed(components=[[[0]]] * 2),
        changed(components=[[[0, 1, 2, 3, 4, 5, 6, 6]]] * 2),
        changed(components=[[list(range(8))]] * 3),
        changed(components=[[]] * 2),
    ],
    ids=lambda data: data[-30:].decode(errors="replace"),
)
def test_what_is_no_plan_is_refused(data):
    assert refused_within_limits(data)


FLOODS = """
import json, resource, sys, time
from xsake.errors import ArgumentError
from xsake.hads.plan import MAX_BYTES, SparsityPlan

text = sys.stdin.read()
SparsityPlan.from_json(text.encode())
document = json.loads(text)

def with_head(**changes):
    heads = [[document["heads"][0][0] | changes, *document["heads"][0][1:]], *document["heads"][1:]]
    return json.dumps(document | {"heads": heads}).encode()

floods = [
    lambda: b"[" * MAX_BYTES,
    lambda: b'{"a":' * (MAX_BYTES // 5),
    lambda: b"]" * MAX_BYTES,
    lambda: b'"' * MAX_BYTES,
    lambda: b'"' + b'\\\\"' * 2**17,
    lambda: b'"' + b"x" * (MAX_BYTES - 1),
    lambda: b'{"heads":[' + b"[]," * (MAX_BYTES // 3 - 9) + b"[]]}",
    lambda: b'{"heads":[' + b"{}," * (MAX_BYTES // 3 - 9) + b"{}]}",
    lambda: b'{"heads":[' + b"{}," * (2**17 - 9) + b"{}]}",
    lambda: b'{"heads":[[' + b'{"kind":3},' * (2**17 - 9) + b"{}]]}",
    lambda: b'{"heads":[' + b"999," * (MAX_BYTES // 4 - 9) + b"0]}",
    lambda: b'{"heads":[' + b"1.5," * (MAX_BYTES // 4 - 9) + b"0]}",
    lambda: b'{"heads":[' + b'"ab",' * (2**17 - 9) + b"0]}",
    lambda: b"{" + b",".join(b'"%05x":0' % i for i in range(2**17 - 9)) + b"}",
    lambda: b"{" + b",".join(b'"%05x":0' % i for i in range(400_000)) + b"}",
    lambda: with_head(weights=["ab"] * 2**16),
    lambda: with_head(weights=[1.5] * 800_000),
    lambda: with_head(kind="static", columns=[999] * 800_000),
    lambda: json.dumps(document | {"components": [[list(range(500_000))]]}).encode(),
    lambda: json.dumps(document | {"summary": "x" * (MAX_BYTES - 9000)}).encode(),
    lambda: b" " * (MAX_BYTES + 1),
]
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, slowest = used(), 0.0
for number, flood in enumerate(floods):
    data, started = flood(), time.monotonic()
    try:
        SparsityPlan.from_json(data)
    except ArgumentError as error:
        slowest = max(slowest, time.monotonic() - started)
        assert len(str(error)) < 1000
    else:
        sys.exit(f"flood {number} was read")
print(used() - before, slowest)
"""


def test_floods_are_refused_in_little_time_and_memory():
    """In a process of its own: what is measured is what a user's process would need."""
    command = [sys.executable, "-c", FLOODS]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spent, slowest = done.stdout.split()
    assert int(spent) < LIMIT
    assert float(slowest) < 10  # under a second where nothing else runs


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**64, 10**400, 1e-308, 1e300, -0.0, "", "\ud800", "kl"])
    | st.floats(allow_nan=True)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def malformed(draw) -> bytes:
    """A good plan of which a few places hold something else, or whose bytes are damaged."""
    text = draw(st.sampled_from([TEXT, STATIC]))
    document = json.loads(text)
    for _ in range(draw(st.integers(0, 3))):
        place = document
        while True:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
            if not (isinstance(place[key], dict | list) and place[key] and draw(st.booleans())):
                break
            place = place[key]
        if isinstance(place, dict) and draw(st.booleans()):
            del place[key]
        else:
            place[key] = draw(JUNK)
    data = bytearray(json.dumps(document).encode())
    for _ in range(draw(st.integers(0, 2))):
        first = draw(st.integers(0, len(data)))
        data[first : first + draw(st.integers(0, 5))] = draw(st.binary(max_size=5))
    return bytes(data)


@settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
@given(malformed())
def test_a_malformed_plan_is_read_or_refused_but_never_crashes(data):
    refused_within_limits(data)


@pytest.mark.slow
@settings(max_examples=10_000, suppress_health_check=list(hypothesis.HealthCheck))
@given(malformed())
def test_ten_thousand_malformed_plans_stay_within_limits(data):
    tracemalloc.start()
    try:
        refused_within_limits(data)
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()
