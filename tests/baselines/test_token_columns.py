"""Rules as attention: single columns next to blocks, thresholds, and equal work."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.baselines.calibrated import gate_masses
from benchmarks.baselines.estimators import pooled_mass
from benchmarks.baselines.rule import causal_grid
from benchmarks.baselines.token_columns import PATTERNS, TokenColumns, _row_masses, recall
from benchmarks.hads.ruled import RuleAttention, RuleCalibration, attend_columns
from tests.baselines.samples import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    KV_HEADS,
    NEW,
    SCALE,
    TOKENS,
    WATCHED,
    attention_of,
    calibrated,
    quiet,
    scene_of,
)
from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, row_counts, visible_blocks
from xsake.masks import Causal
from xsake.model import LayerCall

VISIBLE = visible_blocks(BLOCKS)
CALL = LayerCall(layer=0, mask=Causal(), scale=SCALE)


def counts_of(share):
    total = np.full(HEADS, round(share * VISIBLE))
    return row_counts(total, BLOCKS, ForcedBlocks())


def pairs_of(choice):
    """[Hq, rows, T]: the keys of each row of blocks."""
    pairs = np.repeat(choice.blocks, BLOCK, axis=-1)
    for head, row, place in np.argwhere(choice.columns >= 0):
        key = choice.columns[head, row, place]
        assert not pairs[head, row, key] and key < row * BLOCK
        pairs[head, row, key] = True
    return pairs


def watched():
    rule = TokenColumns()
    for sample in WATCHED:
        rule.observe(sample)
    rule.finish()
    return rule


@pytest.mark.parametrize("pattern", range(len(PATTERNS)), ids=PATTERNS)
def test_every_row_has_the_pairs_of_its_blocks(pattern):
    counts = counts_of(0.4)
    choice = TokenColumns().choose(NEW[0], counts, np.full(HEADS, pattern))
    assert (pairs_of(choice).sum(-1) == counts * BLOCK).all()
    assert not (choice.blocks & ~causal_grid(BLOCKS)).any()


def test_a_column_that_every_query_attends_to_is_taken_alone():
    q, k = quiet()
    q[..., 0], k[100, :, 0] = 4, 8  # in block 6
    columns = PATTERNS.index("columns")
    choice = TokenColumns().choose(scene_of(q, k), counts_of(0.4), np.full(HEADS, columns))
    row = BLOCKS - 2
    assert not choice.blocks[:, row, 6].any()
    assert (choice.columns[:, row] == 100).any(-1).all()


def test_recall_is_the_attention_of_the_chosen_pairs():
    sample = NEW[0]
    choice = watched().choose(sample, counts_of(0.4))
    masses = attention_of(sample.q, sample.k).reshape(HEADS, BLOCKS, BLOCK, TOKENS).mean(2)
    ours = np.asarray(_row_masses(sample.q, sample.k, SCALE, block=BLOCK))
    np.testing.assert_allclose(ours, masses, atol=1e-5)
    kept = (masses * pairs_of(choice)).sum(-1).mean(-1)
    np.testing.assert_allclose(recall(choice, ours), kept, atol=1e-5)


def test_calibration_is_required():
    with pytest.raises(ArgumentError, match="token-columns-calibration"):
        TokenColumns().choose(NEW[0], counts_of(0.4))


def test_attention_by_columns_is_attention_by_a_mask():
    """The whole path of a rule: blocks and columns, merged."""
    sample, rule = NEW[0], watched()
    rule.patterns[0] = np.resize([PATTERNS.index(x) for x in ("1/2", "columns", "window")], HEADS)
    v = np.random.default_rng(0).normal(size=(TOKENS, KV_HEADS, DIM)).astype(np.float32)
    attend = RuleAttention(rule, 0.4 + rule.cost(TOKENS, BLOCK, DIM), block=BLOCK)
    arrays = (jnp.asarray(x)[None] for x in (sample.q, sample.k, v))
    out = np.asarray(attend(*arrays, CALL))[0]
    pairs = np.repeat(
        pairs_of(rule.choose(sample, attend.row_counts(HEADS, TOKENS, DIM))), BLOCK, axis=1
    )
    p = attention_of(sample.q, sample.k) * pairs
    p /= p.sum(-1, keepdims=True)
    expected = np.einsum("hqk,khd->qhd", p, np.repeat(v, HEADS // KV_HEADS, axis=1))
    np.testing.assert_allclose(out, expected, atol=1e-4)
    assert attend.measured_work(TOKENS, DIM) == pytest.approx(attend.work, abs=0.01)


def test_rows_without_columns_have_no_attention():
    q = jnp.ones((1, 4, 2, 8))
    out, lse = attend_columns(q, q, q, jnp.full((2, 2, 3), -1), scale=1.0)
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("name", ["flexprefill", "xattention_16", "sparge"])
def test_a_threshold_does_the_work_that_was_asked_for_on_average(name):
    rule = calibrated(name)
    calibration = RuleCalibration([rule], BLOCK)
    calibration.samples.extend(WATCHED)
    (level,) = calibration.levels(rule, [0.5 + rule.cost(TOKENS, BLOCK, DIM)])
    taken = np.mean([(rule.rank(x).priority >= level).sum() for x in WATCHED]) / (HEADS * VISIBLE)
    assert taken == pytest.approx(0.5, abs=0.01)


def test_a_calibration_shows_true_masses_and_computes_dense_attention():
    seen = []

    class Rule:
        observe, finish = seen.append, lambda self: None

    rule = Rule()
    calibration = RuleCalibration([rule], BLOCK)
    sample = NEW[0]
    arrays = [jnp.asarray(x)[None] for x in (sample.q, sample.k, sample.k)]
    out = calibration(*arrays, CALL)
    np.testing.assert_allclose(seen[0].masses, sample.masses, atol=1e-5)
    p = attention_of(sample.q, sample.k)
    expected = np.einsum("hqk,khd->qhd", p, np.repeat(sample.k, HEADS // KV_HEADS, axis=1))
    np.testing.assert_allclose(out[0], expected, atol=1e-4)


def test_key_means_do_not_count_as_similarity():
    """Keys that share one large component are similar, until their mean is subtracted."""
    q, k = quiet()
    q[..., 1] = 3
    k[..., 0] += 50
    sample = scene_of(q, k)
    pooled = pooled_mass(sample)
    assert not gate_masses(sample, pooled, 0.6)[0].any()
    assert gate_masses(sample, pooled, 0.6, center_keys=True)[0].all()
