"""Attention in training: plans that train, budgets that fall as scheduled, probes that see all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.test_config import config
from tests.training.test_guard import drawn_state
from xsake import hads
from xsake.errors import ArgumentError
from xsake.masks import Causal, Sinks, Window
from xsake.model import DenseAttention, LayerCall, MaskedAttention
from xsake.observability import METRICS
from xsake.training.attention import (
    StopGradientPlanAttention,
    calibrate_model,
    make_attention,
    plan_digest,
    quarantine_profile,
    restore_attention,
)
from xsake.training.probe import Probes, expected_kl, make_probe, probe_layer
from xsake.training.sections import AttentionSection, BudgetAnnealing
from xsake.training.state import DeviceSetup, build_optimizer, define_model, step_key
from xsake.training.step import make_loss, make_step

BLOCK, BUDGET = 8, 0.7
RUN = config(
    'attention.kind="plan"',
    f"attention.budget={BUDGET}",
    f"attention.block={BLOCK}",
    "attention.annealing={start_step = 10, steps = 20, levels = 3}",
    "attention.probe_interval=5",
    "attention.recalibration_interval=7",
)
SECTION, DECODER = RUN.attention, RUN.model.decoder
CALL = LayerCall(layer=1, mask=Causal(), scale=DECODER.scale)
TOKENS = np.random.default_rng(0).integers(0, 96, (8, 65)).astype(np.int32)


@pytest.fixture(scope="module")
def definition():
    return define_model(RUN)


@pytest.fixture(scope="module")
def first():
    return drawn_state(RUN)


@pytest.fixture(scope="module")
def profile(definition, first):
    model = definition.merge(first.parameters)
    return calibrate_model(SECTION, model, TOKENS[[0, 1, 1], :-1], name="tiny", digest="0")


@pytest.fixture(scope="module")
def attention(profile):
    return make_attention(SECTION, DECODER, profile=profile)


def projections(tokens: int = 64):
    keys = jax.random.split(jax.random.key(5), 3)
    heads = (DECODER.q_heads, DECODER.kv_heads, DECODER.kv_heads)
    return tuple(
        2 * jax.random.normal(key, (2, tokens, count, DECODER.head_dim))
        for key, count in zip(keys, heads, strict=True)
    )


def dense_weights(q, k) -> np.ndarray:
    """Causal attention weights [B, Hq, T, T], the slow way."""
    wide = np.asarray(k).repeat(DECODER.q_heads // DECODER.kv_heads, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, wide) * DECODER.scale
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_a_section_becomes_dense_attention_or_a_mask():
    assert make_attention(AttentionSection(), DECODER).attend(3) == DenseAttention()
    section = AttentionSection(kind="mask", mask="window(15, 0) | sinks(2)")
    found = make_attention(section, DECODER)
    assert found.attend(3) == MaskedAttention(Window(left=15, right=0) | Sinks(2))
    assert (found.budget(3), make_attention(AttentionSection(), DECODER).budget(3)) == (None, 1.0)


@pytest.mark.slow  # quicker: gradients of chosen blocks
def test_choices_are_made_row_by_row_in_training(attention):
    assert AttentionSection().scope is hads.BudgetScope.ROW
    planned = attention.attends[-1].planned
    assert planned.scope is hads.BudgetScope.ROW
    q, k, _ = projections()
    changed = [x.at[:, 5 * BLOCK :].multiply(-3) for x in (q, k)]
    before = np.asarray(planned.chosen(q, k, CALL))[:, :, :5]
    assert (before == np.asarray(planned.chosen(*changed, CALL))[:, :, :5]).all()


def test_the_budget_falls_as_scheduled_and_is_what_is_computed(attention):
    asked = {0: 1.0, 19: 1.0, 20: 0.85, 29: 0.85, 30: BUDGET, 99: BUDGET}
    assert {step: attention.budget(step) for step in asked} == asked
    assert len({attention.attend(step) for step in range(100)}) == 3
    assert attention.attend(0) == DenseAttention()
    q, k, _ = projections()
    for step in (20, 30):
        chosen = np.asarray(attention.attend(step).planned.chosen(q, k, CALL))
        plan = attention.plans[attention.level(step)]
        assert chosen.sum((1, 2, 3)).tolist() == [plan.totals(8)[1].sum()] * 2
        assert abs(plan.totals(8).sum() / (12 * 36) - attention.budget(step)) < 1 / (12 * 36)
        assert plan.calibration.profile == attention.profile.digest


@given(
    start=st.integers(0, 50), steps=st.integers(1, 200), levels=st.integers(2, 16),
    last=st.floats(0.05, 0.95),
)  # fmt: skip
def test_levels_stay_above_the_straight_line_and_end_on_it(start, steps, levels, last):
    annealing = BudgetAnnealing(start_step=start, steps=steps, levels=levels)
    budgets = annealing.budgets(last)
    found = np.array([budgets[annealing.level(step)] for step in range(start + steps + 5)])
    part = np.clip((np.arange(len(found)) - start) / steps, 0, 1)
    assert (np.diff(found) <= 0).all() and (found >= 1 + part * (last - 1) - 1e-6).all()
    assert (found[: start + 1] == 1).all() and np.abs(found[start + steps :] - last).max() < 1e-6
    assert len(budgets) == levels


def test_probes_and_calibrations_have_their_steps(attention):
    probes = [step for step in range(22) if attention.is_probe_due(step)]
    assert probes == [0, 5, 10, 15, 20]
    assert [step for step in range(22) if attention.is_calibration_due(step)] == [7, 14, 21]
    never = make_attention(AttentionSection(probe_interval=0), DECODER)
    assert not any(never.is_probe_due(x) or never.is_calibration_due(x) for x in range(9))


def test_gradients_flow_through_chosen_blocks_and_not_through_the_choice(attention):
    attend = attention.attends[-1]
    q, k, v = projections()
    layout = attend.planned.layout(q, k, CALL)
    out = lambda found: (found * jnp.cos(jnp.arange(found.size).reshape(found.shape))).sum()
    fixed = lambda *x: out(CALL.apply(attend.planned.operator, *x, layout))
    found = jax.grad(lambda *x: out(attend(*x, CALL)), (0, 1, 2))(q, k, v)
    for ours, expected in zip(found, jax.grad(fixed, (0, 1, 2))(q, k, v), strict=True):
        assert np.isfinite(ours).all() and np.abs(ours).max() > 0
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # quicker: gradients of chosen blocks
def test_a_model_trains_by_a_plan_without_compiling_again(definition, first, attention):
    attend = attention.attends[-1]
    step = make_step(RUN, definition, build_optimizer(RUN, definition), attend)
    state, losses = jax.tree.map(jnp.copy, first), []
    for _ in range(12):
        state, told = step(state, TOKENS)
        assert np.isfinite(told.gradient_norm) and not bool(told.is_skipped)
        losses.append(float(told.loss))
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    assert step._cache_size() == 1
    dense, count = jax.jit(make_loss(RUN, definition, DenseAttention()))(first.parameters, TOKENS)
    assert 1e-5 < abs(float(dense) / int(count) - losses[0]) < 0.5


@pytest.mark.parametrize("tokens", [64, 61])
def test_a_probe_measures_what_is_kept_of_all_attention(attention, tokens):
    q, k, _ = projections(tokens)
    attend = attention.attends[-1]
    rows = np.array([4, 6, 7])
    chosen = np.asarray(attend.planned.chosen(q, k, CALL)).repeat(BLOCK, 2).repeat(BLOCK, 3)
    position = np.concatenate([np.arange(r * BLOCK, min((r + 1) * BLOCK, tokens)) for r in rows])
    kept = (dense_weights(q, k) * chosen[:, :, :tokens, :tokens]).sum(-1)[:, :, position]
    found = probe_layer(attend, q, k, CALL, jnp.asarray(rows), BLOCK)
    assert np.isfinite(found.mass_recall).all() and kept.min() < 0.9
    np.testing.assert_allclose(found.mass_recall, kept.mean((0, 2)), rtol=1e-4)
    np.testing.assert_allclose(found.mass_recall_min, kept.min((0, 2)), rtol=1e-3)
    np.testing.assert_allclose(found.kl, -np.log(kept).mean((0, 2)), rtol=1e-3, atol=1e-5)


def test_a_probe_measures_what_a_mask_keeps():
    q, k, _ = projections()
    near = np.subtract.outer(np.arange(64), np.arange(64)) < 10
    kept = (dense_weights(q, k) * near).sum(-1)[:, :, 3 * BLOCK : 4 * BLOCK]
    judged = MaskedAttention(Window(left=9, right=0))
    found = probe_layer(judged, q, k, CALL, jnp.array([3]), BLOCK)
    assert np.isfinite(found.mass_recall).all() and kept.max() < 0.999
    np.testing.assert_allclose(found.mass_recall, kept.mean((0, 2)), rtol=1e-4)


@pytest.mark.slow  # one more model to compile
def test_a_probe_reads_with_the_attention_of_the_step(definition, first, attention):
    options = {"rows": SECTION.probe_rows, "block": SECTION.block}
    key = step_key(first)
    assert attention.probe_target(0) is attention.attends[1]  # dense keeps all: the plan to come
    assert attention.probe_target(99) is attention.attends[2]
    masses = []
    for judged in attention.attends[1:]:
        probe = make_probe(definition, attention.attend(0), judged, **options)
        found = probe(first.parameters, TOKENS[:2], key)
        assert found.mass_recall.shape == (DECODER.layers, DECODER.q_heads)
        assert (
            np.isfinite(found.kl).all()
            and (np.asarray(found.mass_recall_min) <= found.mass_recall).all()
        )
        masses.append(float(found.mass_recall.mean()))
    assert 0.5 < masses[1] < masses[0] < 1  # fewer blocks keep less
    with pytest.raises(ArgumentError, match="do not support this attention"):
        make_probe(definition, DenseAttention(), lambda q, k, v, call: v, **options)


def test_a_probe_measures_the_entropy_of_all_attention_and_the_blocks_that_were_spent(attention):
    q, k, _ = projections()
    weights = dense_weights(q, k)[:, :, 4 * BLOCK : 5 * BLOCK]
    entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1).mean((0, 2))
    for judged in (DenseAttention(), attention.attends[-1]):
        found = probe_layer(judged, q, k, CALL, jnp.array([4]), BLOCK)
        np.testing.assert_allclose(found.entropy, entropy, rtol=1e-4)
    grid = np.asarray(attention.attends[-1].planned.chosen(q, k, CALL))
    np.testing.assert_allclose(found.density, grid.sum((2, 3)).mean(0) / 36, rtol=1e-6)
    whole = probe_layer(DenseAttention(), q, k, CALL, jnp.array([4]), BLOCK)
    assert (np.asarray(whole.mass_recall) == 1).all() and (np.asarray(whole.kl) == 0).all()


@pytest.mark.slow  # quicker: gradients of chosen blocks
def test_what_a_probe_tells_has_the_names_of_metrics(definition, first, attention, profile):
    probes = Probes(RUN, DeviceSetup.from_config(RUN))
    found = probes.run(99, attention, first, TOKENS)
    assert found.keys() <= METRICS.keys()
    assert all(METRICS[name].source == "probe" for name in found)
    shape = (DECODER.layers, DECODER.q_heads)
    by_head = {name for name, metric in METRICS.items() if metric.axes}
    assert all(np.shape(found[name]) == shape for name in by_head)
    spent = np.mean(found["block_density"])
    assert spent == pytest.approx(BUDGET, abs=0.02) and found["work_excess"] == 1.0
    assert 0.2 < found["drift"] < 5  # the weights of the calibration, four rows of one sequence
    again = probes.run(99, attention, first, TOKENS)
    assert again["probe_seconds"] < found["probe_seconds"]  # nothing is compiled again
    assert {**again, "probe_seconds": 0} == {**found, "probe_seconds": 0}


def test_a_probe_of_dense_attention_tells_its_entropy(definition, first):
    run = config("attention.probe_interval=5")
    found = Probes(run, DeviceSetup.from_config(run)).run(
        0, make_attention(run.attention, run.model.decoder), first, TOKENS
    )
    assert found.keys() == {"entropy", "probe_seconds"}
    assert (np.array(found["entropy"]) > 0).all()


def test_promises_move_with_the_heads(attention, profile):
    order = [[1, 0] if layer % 2 else [0, 1] for layer in range(DECODER.layers)]
    order = [[*places, *range(2, DECODER.kv_heads)] for places in order]
    moved = make_attention(SECTION, DECODER, profile=profile, kv_order=tuple(map(tuple, order)))
    straight = expected_kl(attention.plans[-1], attention, profile.context)
    found = expected_kl(moved.plans[-1], moved, profile.context)
    group = DECODER.q_heads // DECODER.kv_heads
    for layer, places in enumerate(order):
        heads = [kv * group + i for kv in places for i in range(group)]
        np.testing.assert_allclose(found[layer], straight[layer][heads], rtol=1e-6)
    assert expected_kl(attention.plans[-1], attention, 2 * profile.context) is None


@pytest.mark.slow  # quicker: gradients of chosen blocks
def test_other_weights_make_another_plan(definition, first, attention):
    far = jax.tree.map(lambda x: 4 * x, first.parameters)
    attend = attention.attends[-1]
    again = calibrate_model(
        SECTION, definition.merge(far), TOKENS[:2, :-1], name="tiny", digest="1", attend=attend
    )
    found = attention.replan(again, DECODER)
    assert isinstance(found.attend(99), StopGradientPlanAttention) and found.budget(99) == BUDGET
    old, new = (x.record(99) for x in (attention, found))
    assert old["budget"] == new["budget"] and old["kind"] == new["kind"] == "plan"
    assert old["plan"] != new["plan"] and old["profile"] != new["profile"]
    assert found.record(0)["plan"] is None  # dense


def test_a_checkpoint_finds_its_plan_again(attention, tmp_path):
    record = attention.record(99)
    attention.save(tmp_path)
    attention.save(tmp_path)
    found = restore_attention(SECTION, DECODER, record, tmp_path, step=99)
    assert [x and plan_digest(x) for x in found.plans] == [
        x and plan_digest(x) for x in attention.plans
    ]
    other = SECTION.model_copy(update={"budget": 0.65})
    with pytest.raises(ArgumentError, match="XSK-102.changed-attention"):
        restore_attention(other, DECODER, record, tmp_path, step=99)
    for digest in ("../../etc/passwd", "a" * 63, 3):
        with pytest.raises(ArgumentError, match="XSK-102.profile-digest"):
            restore_attention(SECTION, DECODER, record | {"profile": digest}, tmp_path, step=99)
    with pytest.raises(ArgumentError, match="XSK-102.file-unreadable"):
        restore_attention(SECTION, DECODER, record, tmp_path / "elsewhere", step=99)


def test_a_profile_that_was_cut_is_set_aside_and_one_that_is_made_again_takes_its_place(
    profile, attention, tmp_path
):
    record = attention.record(99)
    attention.save(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(ArgumentError):
        restore_attention(SECTION, DECODER, record, tmp_path, step=99)
    found = restore_attention(SECTION, DECODER, record, tmp_path, step=99, profile=profile)
    quarantine_profile(tmp_path, record["profile"])
    found.save(tmp_path)
    assert path.read_bytes() == whole
    assert (tmp_path / f"{path.name}.damaged").read_bytes() == whole[:100]


def test_a_plan_from_a_file_is_used_as_it_is_and_made_again_alike(profile, attention, tmp_path):
    plan = attention.plans[-1]
    plan.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    section = AttentionSection(kind="plan", plan=tmp_path / "plan.json")
    found = make_attention(section, DECODER)
    assert found.plans == (plan,) and found.budget(0) == BUDGET
    again = found.replan(profile, DECODER)
    assert plan_digest(again.plans[0]) == plan_digest(plan) == found.record(0)["plan"]
    by_profile = AttentionSection(
        kind="plan", profile=tmp_path / "profile.json", budget=BUDGET, block=BLOCK
    )
    assert plan_digest(make_attention(by_profile, DECODER).plans[0]) == plan_digest(plan)
    with pytest.raises(ArgumentError, match=r"another block size[\s\S]*8 tokens[\s\S]*16 tokens"):
        make_attention(by_profile.model_copy(update={"block": 16}), DECODER)
    other = DECODER.model_copy(update={"layers": 3})
    with pytest.raises(ArgumentError, match="XSK-102.plan-model"):
        make_attention(section, other)


def test_a_plan_needs_something_to_be_made_of():
    assert SECTION.needs_calibration and not AttentionSection().needs_calibration
    with pytest.raises(ArgumentError, match="XSK-102.plan-without-profile"):
        make_attention(SECTION, DECODER)
