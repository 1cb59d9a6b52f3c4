"""Balanced heads in a run: the same function, shards with equal work, and a way back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import processes
from tests.training.data_sample import letters, save_texts, save_tokenizer
from tests.training.test_config import config
from tests.training.test_guard import drawn_state
from xsake import hads
from xsake.errors import ArgumentError
from xsake.model.observer import Observer
from xsake.observability import read_metrics
from xsake.training.attention import (
    calibrate_model,
    choose_placement,
    make_attention,
    restore_attention,
    to_kv_order,
)
from xsake.training.build_data import build
from xsake.training.config import TrainingConfig
from xsake.training.state import define_model, reorder_heads
from xsake.training.train import train

BLOCK, SHARDS = 8, 2
RUN = config(
    'attention.kind="plan"', "attention.budget=0.8", f"attention.block={BLOCK}",
    "model.decoder.q_heads=8", "model.decoder.kv_heads=4", "model.decoder.vocab_size=300",
)  # fmt: skip
SECTION, DECODER = RUN.attention, RUN.model.decoder
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 64)).astype(np.int32)


@pytest.fixture(scope="module")
def definition():
    return define_model(RUN)


@pytest.fixture(scope="module")
def first():
    return drawn_state(RUN)


def unequal_profile(definition, first) -> hads.Profile:
    """Measured, and then made unequal: heads of the first half need far more than others."""
    model = definition.merge(first.parameters)
    found = calibrate_model(SECTION, model, TOKENS, name="tiny", digest="0")
    need = np.where(np.arange(DECODER.q_heads) < DECODER.q_heads // 2, 30.0, 0.1)
    curves = {name: curve * need[:, None] for name, curve in found.curves.items()}
    made = found.model_copy(update={"curves": curves})
    return hads.Profile.from_json(made.to_json().encode())


@pytest.fixture(scope="module")
def profile(definition, first):
    return unequal_profile(definition, first)


@pytest.fixture(scope="module")
def attention(profile):
    return make_attention(SECTION, DECODER, profile=profile)


@pytest.fixture(scope="module")
def placement(attention):
    found = choose_placement(attention, shards=SHARDS)
    assert found is not None
    return found


def work_of_shards(attention, model) -> np.ndarray:
    """Blocks that each shard lists, by layer, as the model really runs."""
    planned = attention.attends[-1].planned
    lengths = lambda q, k, v, call: jnp.diff(planned.layout(q, k, call).row_starts)
    found = Observer(model, attend=attention.attends[-1])(jnp.asarray(TOKENS), lengths)
    return np.asarray(found).reshape(DECODER.layers, len(TOKENS), SHARDS, -1).sum((1, 3)) / 2


@pytest.mark.slow  # quicker: a reordered plan asks for the same blocks
def test_another_order_is_the_same_function_with_equal_work(
    definition, first, profile, attention, placement
):
    order = to_kv_order(placement)
    model = definition.merge(first.parameters)
    moved = definition.merge(reorder_heads(order, first.parameters, definition.names))
    placed = make_attention(SECTION, DECODER, profile=profile, kv_order=order)
    before = model(TOKENS, attend=attention.attends[-1])
    after = moved(TOKENS, attend=placed.attends[-1])
    assert np.isfinite(after).all()
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(work_of_shards(attention, model), placement.before)
    np.testing.assert_array_equal(work_of_shards(placed, moved), placement.after)
    assert placement.excess_before > 1.08
    assert placement.excess_after < 1.02


def test_the_order_can_be_undone(definition, first, placement):
    order = to_kv_order(placement)
    moved = reorder_heads(order, first.parameters, definition.names)
    back = reorder_heads(order, moved, definition.names, is_inverse=True)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), back, first.parameters)
    assert all(jax.tree.leaves(same))
    is_moved = jax.tree.map(lambda a, b: bool((a != b).any()), moved, first.parameters)
    assert any(jax.tree.leaves(is_moved))


def test_a_checkpoint_brings_its_order_back(attention, profile, placement, tmp_path):
    placed = make_attention(SECTION, DECODER, profile=profile, kv_order=to_kv_order(placement))
    placed.save(tmp_path)
    record = placed.record(3)
    found = restore_attention(SECTION, DECODER, record, tmp_path, step=3)
    assert found.kv_order == placed.kv_order and found.plans[0].heads == placed.plans[0].heads
    with pytest.raises(ArgumentError, match="XSK-102.changed-attention"):
        restore_attention(SECTION, DECODER, record | {"kv_order": None}, tmp_path, step=3)


def test_nothing_is_moved_where_it_does_not_help(attention):
    assert choose_placement(attention, shards=1) is None
    assert choose_placement(attention, shards=4) is None  # a kv head each: no order is better
    dense = make_attention(config().attention, DECODER)
    assert choose_placement(dense, shards=SHARDS) is None
    left_alone = SECTION.model_copy(update={"balance_heads": False})
    plan = make_attention(left_alone, DECODER, profile=attention.profile)
    assert choose_placement(plan, shards=SHARDS) is None


def test_an_order_that_is_none_is_refused(attention):
    plan = attention.plans[0]
    assert plan is not None
    for order in ([], [[0, 1, 2, 3]], [[0, 0, 1, 2]] * DECODER.layers):
        with pytest.raises(ArgumentError, match="XSK-102.kv-order"):
            plan.reorder_heads(order)


def test_a_reordered_plan_asks_for_the_same_blocks(attention, placement):
    plan = attention.plans[0]
    moved = plan.reorder_heads(to_kv_order(placement))
    assert moved.blocks.sum() == plan.blocks.sum()
    assert hads.SparsityPlan.from_json(moved.to_json().encode()) == moved
    np.testing.assert_array_equal(moved.blocks[1], plan.blocks[1][placement.q_order[1]])


def losses_of(folder, mesh):
    """Train three steps on a mesh; return losses, the record of the checkpoint, and the probe."""
    name = "-".join(map(str, ["run", *mesh.values()]))
    settings = RUN.model_dump() | {
        "data": {"folder": folder / "data", "context": 64, "batch": 8},
        "attention": {"kind": "plan", "budget": 0.8, "block": 8, "profile": folder / "profile",
                      "probe_interval": 2},
        "mesh": mesh, "checkpoint": {"folder": folder / name, "save_interval": 0},
        "optimizer": {"peak_learning_rate": 1e-2}, "run": {"steps": 3, "log_interval": 0},
    }  # fmt: skip
    train(TrainingConfig.from_dict(settings))
    lines = read_metrics(folder / name / "metrics.jsonl")
    manifest = next((folder / name / "steps").glob("*/MANIFEST.json"))
    [probe] = [line for line in lines if "attn_mass_recall" in line]
    shape = (DECODER.layers, DECODER.q_heads)
    assert np.shape(probe["attn_mass_recall"]) == np.shape(probe["entropy"]) == shape
    losses = np.array([line["loss"] for line in lines if "loss" in line])
    return losses, json.loads(manifest.read_text())["extra"], probe


def train_on_a_mesh_and_on_one_device(folder) -> None:
    texts = [save_texts(folder / "texts.txt", letters(200))]
    build(save_tokenizer(folder / "tokenizer"), texts, folder / "data")
    unequal_profile(define_model(RUN), drawn_state(RUN)).save(folder / "profile")
    one, extra, alone = losses_of(folder, {})
    assert np.isfinite(one).all() and "kv_order" not in extra
    many, extra, probe = losses_of(folder, {"fsdp": 2, "tensor": 2, "context": 2})
    assert np.abs(many / one - 1).max() < 1e-5, (many, one)
    assert extra["kv_order"] == extra["attention"]["kv_order"], extra
    spent = [np.mean(x["block_density"]) for x in (alone, probe)]
    assert np.allclose(spent, 0.8, atol=0.02), spent
    assert alone["work_excess"] == 1 <= probe["work_excess"] < 1.2, probe["work_excess"]


@pytest.mark.timeout(900)  # two runs, each compiled twice
@pytest.mark.slow  # two runs on eight devices, minutes of compiling
def test_a_mesh_with_balanced_heads_trains_like_one_device(tmp_path):
    processes.run(train_on_a_mesh_and_on_one_device, tmp_path, devices=8, seconds=800)
