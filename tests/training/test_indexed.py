"""Block indexers in the trainer: a dense warm-up, then selected blocks; both losses fall."""

import numpy as np
import pytest

from tests.training.test_config import config
from xsake.model import DenseAttention
from xsake.training.attention import DenseWarmup, make_attention
from xsake.training.state import build_optimizer, define_model, init_state
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
