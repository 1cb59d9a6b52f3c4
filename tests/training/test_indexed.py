"""Block indexers in the trainer: a dense warm-up, then selected blocks; both losses fall."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.test_config import config
from xsake.errors import ArgumentError
from xsake.model import Decoder, DenseAttention, huggingface
from xsake.training.attention import DenseWarmup, make_attention
from xsake.training.state import (
    DeviceSetup,
    build_optimizer,
    define_model,
    flat_parameters,
    init_state,
)
from xsake.training.step import make_step

INDEXED = (
    "data.context=48",
    "model.decoder.layers=1",
    'attention.kind="indexed"',
    "model.decoder.indexer={blocks={size=8, count=2}, dim=4}",
)
TOKENS = (np.arange(49)[None] * np.arange(1, 9)[:, None] % 90).astype(np.int32)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_warm_up_is_dense_and_both_losses_fall(parts):
    run = config(*INDEXED, "attention.indexer.dense_steps=6", f"optimizer.grad_accum_steps={parts}")
    attention = make_attention(run.attention, run.model.decoder)
    assert isinstance(attention.attend(5), DenseWarmup) and attention.attend(6) == DenseAttention()
    assert attention.budget(6) is None and not attention.is_probe_due(0)
    assert attention.record(6)["kind"] == "indexed"
    definition = define_model(run)
    optimizer, state, metrics = build_optimizer(run, definition), init_state(run), []
    steps = [make_step(run, definition, optimizer, attend) for attend in attention.attends]
    for number in range(16):
        state, told = steps[attention.level(number)](state, TOKENS)
        metrics.append([float(told.loss), float(told.indexer_loss)])
    assert np.isfinite(metrics).all() and [step._cache_size() for step in steps] == [1, 1]
    assert metrics[-1][0] < 0.8 * metrics[0][0]
    assert metrics[5][1] < metrics[0][1] and metrics[-1][1] < metrics[6][1]


def test_a_frozen_model_changes_in_its_indexers_only():
    run = config(
        *INDEXED, "attention.indexer={dense_steps=9, freeze_model=true}",
        "optimizer.weight_decay=0.1",
    )  # fmt: skip
    definition = define_model(run)
    step = make_step(run, definition, build_optimizer(run, definition), DenseWarmup())
    before, state = jax.device_get(init_state(run).parameters), init_state(run)
    for _ in range(2):
        state, told = step(state, TOKENS)
    assert told.indexer_loss > 0 and told.gradient_norm > 0
    for path, x in flat_parameters(state.parameters).items():
        has_changed = (np.asarray(x) != flat_parameters(before)[path]).any()
        assert has_changed == ("indexer" in path), path


def test_indexers_have_a_learning_rate_of_their_own():
    def changes_of(ratio):
        run = config(*INDEXED, f"attention.indexer.learning_rate_ratio={ratio}")
        definition = define_model(run)
        step = make_step(run, definition, build_optimizer(run, definition), DenseAttention())
        before = jax.device_get(init_state(run).parameters)
        state, _ = step(init_state(run), TOKENS)
        both = flat_parameters(before), flat_parameters(state.parameters)
        return {path: np.asarray(both[1][path]) - x for path, x in both[0].items()}

    once, more = changes_of(1), changes_of(8)
    for path, change in once.items():
        factor = 8 if "indexer" in path else 1
        np.testing.assert_allclose(more[path], factor * change, rtol=2e-2, atol=1e-6)


def test_a_dense_checkpoint_is_converted(tmp_path):
    """The dense weights are kept, the index is drawn, and a warm-up starts at the dense loss."""
    run = config(*INDEXED, "attention.indexer.dense_steps=2")
    decoder = run.model.decoder.model_copy(update={"indexer": None})
    dense = Decoder(decoder, rngs=nnx.Rngs(7))
    huggingface.export(dense, tmp_path / "dense", family="llama")
    run = run.model_copy(
        update={"model": run.model.model_copy(update={"weights": tmp_path / "dense"})}
    )
    state = DeviceSetup.from_config(run).init_state(run)
    np.testing.assert_array_equal(state.parameters["embedding"], dense.embedding[...])
    assert "indexer" in state.parameters["layers"]["attention"]
    definition = define_model(run)
    step = make_step(run, definition, build_optimizer(run, definition), DenseWarmup())
    log_p = jax.nn.log_softmax(dense(TOKENS[:, :-1]))
    expected = -np.take_along_axis(np.asarray(log_p), TOKENS[:, 1:, None], axis=-1).mean()
    _, told = step(state, TOKENS)
    np.testing.assert_allclose(told.loss, expected, rtol=1e-5)
    wider = decoder.model_copy(update={"mlp_width": 32, "indexer": run.model.decoder.indexer})
    run = run.model_copy(update={"model": run.model.model_copy(update={"decoder": wider})})
    with pytest.raises(ArgumentError, match=r"(?s)weights-config.*mlp_width=64"):
        DeviceSetup.from_config(run).init_state(run)


def test_moba_has_no_loss_of_its_own():
    moba = 'model.decoder.indexer={blocks={size=8, count=2, pooling="mean"}}'
    run = config(*INDEXED[:3], moba)
    assert run.indexer_loss is not None  # an index dimension is the default
    pure = run.model.decoder.indexer.model_copy(update={"dim": None})
    decoder = run.model.decoder.model_copy(update={"indexer": pure})
    run = run.model_copy(update={"model": run.model.model_copy(update={"decoder": decoder})})
    assert run.indexer_loss is None
    definition = define_model(run)
    step = make_step(run, definition, build_optimizer(run, definition), DenseAttention())
    _, told = step(init_state(run), TOKENS)
    assert told.indexer_loss is None and np.isfinite(told.loss)
