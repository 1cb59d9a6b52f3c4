"""Block-sparse rules of the literature: each finds what its paper says, at any budget."""

import doctest
import importlib
import itertools
import pkgutil

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from benchmarks import baselines
from benchmarks.baselines import (
    RULES,
    HeadSelectionRule,
    LayerSample,
    Ranking,
    RuleScope,
    SelectionRule,
)
from benchmarks.baselines.estimators import POOLED, MassEstimator, last_attention
from benchmarks.baselines.rule import causal_grid, forced_grid
from benchmarks.baselines.top_p import OracleModel, TopPRule
from benchmarks.baselines.vertical_slash import FlexPrefill, stripes
from tests.baselines.samples import (
    BLOCK,
    BLOCKS,
    HEADS,
    NEW,
    SCALE,
    TOKENS,
    calibrated,
    mean_loss,
    quiet,
    random_scene,
    scene_of,
    taken,
)
from xsake.errors import ArgumentError

ROW = BLOCKS - 2


def first_choice(name_or_rule, sample, row=ROW, head=0):
    """The best block of a row that nobody forces."""
    rule = RULES[name_or_rule]() if isinstance(name_or_rule, str) else name_or_rule
    priority = rule.rank(sample).priority[head, row]
    return int(np.argmax(np.where(np.isposinf(priority), -np.inf, priority)))


@pytest.mark.parametrize("name", RULES)
def test_rankings_are_causal_and_force_the_diagonal(name):
    rule = calibrated(name)
    assert isinstance(rule, SelectionRule) and rule.name == name
    assert isinstance(rule, HeadSelectionRule) == (rule.scope is RuleScope.HEADS)
    for sample in NEW:
        priority = rule.rank(sample).priority
        assert priority.shape == (HEADS, BLOCKS, BLOCKS) and priority.dtype == np.float32
        assert not np.isnan(priority).any()
        assert ((priority == -np.inf) == ~causal_grid(BLOCKS)).all()
        assert np.isposinf(np.diagonal(priority, axis1=1, axis2=2)).all()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_repeats_itself_and_spends_any_budget_exactly(name):
    rule = calibrated(name)
    first, again = ([rule.rank(sample) for sample in NEW] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.priority, other.priority)
    for share in (0.4, 0.6):
        kept = taken(rule, first, share)
        assert kept.sum() == round(share * len(NEW) * HEADS * causal_grid(BLOCKS).sum())
        assert not (kept & ~causal_grid(BLOCKS)).any()
        assert all(kept[i][ranking.forced].all() for i, ranking in enumerate(first))


def test_only_some_rules_force_other_blocks_than_sink_diagonal_and_previous():
    window = forced_grid(BLOCKS, num_sink=0, num_local=3)
    others = {
        "sliding_window": forced_grid(BLOCKS, num_sink=0),
        "random": np.eye(BLOCKS, dtype=bool),
        "entropy_original": window,
        "entropy_original_literal": window,
    }
    for name in RULES:
        forced = calibrated(name).rank(NEW[0]).forced
        assert (forced == others.get(name, forced_grid(BLOCKS))).all(), name


@pytest.mark.parametrize("name", ["random", "bigbird", "entropy_original"])
def test_draws_depend_on_the_seed_the_layer_and_the_head(name):
    scenes = [random_scene(seed, layer=layer) for seed, layer in ((3, 0), (4, 0), (3, 1))]
    one, other_seed, other_layer = (RULES[name]().rank(sample).priority for sample in scenes)
    assert (one != other_seed).any() and (one != other_layer).any() and (one[0] != one[1]).any()


def test_scenes_that_do_not_fit_are_refused():
    q, k = quiet()
    for queries, block in ((q, 48), (q[:128], BLOCK), (q[:, :3], BLOCK)):
        with pytest.raises(ArgumentError, match="invalid shapes"):
            LayerSample(q=queries, k=k, scale=SCALE, block=block, layer=0)
    with pytest.raises(ArgumentError, match="non-finite"):
        Ranking.of(np.full((1, 2, 2), np.nan), forced=forced_grid(2))


# Fixed patterns, written out for the eighth row of eight


def order_of(name):
    q, k = np.zeros((128, 1, 4)), np.zeros((128, 1, 4))
    sample = LayerSample(q=q, k=k, scale=1.0, block=16, layer=0)
    priority = RULES[name]().rank(sample).priority[0, 7]
    return np.argsort(-priority, kind="stable").tolist()


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("sliding_window", [6, 7, 5, 4, 3, 2, 1, 0]),
        ("a_shape", [0, 6, 7, 5, 4, 3, 2, 1]),
        ("longformer", [0, 6, 7, 5, 4, 3, 1, 2]),  # a column for every three near blocks
    ],
)
def test_fixed_patterns_have_their_order(name, order):
    assert order_of(name) == order


def test_bigbird_takes_two_columns_then_near_and_random_blocks_in_turns():
    priority = RULES["bigbird"]().rank(NEW[0]).priority
    randoms = set()
    for head, row in itertools.product(range(HEADS), range(10, BLOCKS)):
        best = set(np.argsort(-priority[head, row], kind="stable")[:8].tolist())
        assert best > {0, 1, row - 3, row - 2, row - 1, row}
        randoms |= best - {0, 1, row - 3, row - 2, row - 1, row}
    assert randoms >= set(range(2, 10))


# What each rule's paper says it finds


def test_vertical_slash_finds_a_column():
    q, k = quiet()
    q[..., 0], k[4 * BLOCK + 3, :, 0] = 3, 9
    sample = scene_of(q, k)
    assert all(first_choice("vertical_slash", sample, row=row) == 4 for row in range(7, BLOCKS))
    assert all(first_choice("flexprefill", sample, row=row) == 4 for row in range(7, BLOCKS))


def test_vertical_slash_finds_a_diagonal():
    q, k = quiet()
    turns = np.linspace(0, 40 * np.pi, TOKENS)[:, None]
    directions = np.concatenate([np.cos(turns * f) for f in (1, 1.7, 2.3, 3.1)], axis=1)
    k[:, :, :4] = 3 * directions[:, None]
    q[5 * BLOCK :, :, :4] = 6 * directions[: -5 * BLOCK, None]
    sample = scene_of(q, k)
    assert all(
        first_choice("vertical_slash", sample, row=row) == row - 5 for row in range(8, BLOCKS)
    )


def test_antidiagonals_find_a_hit_that_means_cannot_see():
    q, k = quiet()
    signs = np.where(np.arange(BLOCK) % 2, -1, 1)
    # On antidiagonals query and key agree; their means are nothing.
    k[5 * BLOCK : 6 * BLOCK, :, 0] = 6 * signs[:, None]
    q[ROW * BLOCK : (ROW + 1) * BLOCK, :, 0] = 6 * signs[::-1][:, None]
    sample = scene_of(q, k)
    for name in ("xattention_8_top_k", "xattention_16_top_k", "xattention_8_top_p"):
        assert first_choice(name, sample) == 5
    assert POOLED.mass(sample)[0, ROW, 5] < 1.1 / ROW


def test_bounds_find_a_spike_that_a_mean_dilutes():
    q, k = quiet()
    q[..., 0], k[5 * BLOCK + 7, :, 0], k[8 * BLOCK : 9 * BLOCK, :, 0] = 2, 8, 1
    sample = scene_of(q, k)
    assert first_choice("quest", sample) == 5
    assert first_choice("pooled_top_k", sample) == 8


def test_gates_count_tokens_where_means_add_up_scores():
    q, k = quiet()
    rows = slice(ROW * BLOCK, (ROW + 1) * BLOCK)
    q[rows, :, 0], k[5 * BLOCK : 6 * BLOCK, :, 0] = 1, 2  # all tokens like block 5 a little
    q[ROW * BLOCK, :, 1], k[8 * BLOCK : 9 * BLOCK, :, 1] = 200, 4  # one likes block 8 very much
    sample = scene_of(q, k)
    assert first_choice("moba", sample) == 5
    assert first_choice("pooled_top_k", sample) == 8


def test_flexprefill_is_a_pooled_map_or_stripes_by_its_own_test():
    sample = NEW[0]
    aware, striped = (FlexPrefill(tau=tau).rank(sample).priority for tau in (np.inf, 0.0))
    columns, slashes = stripes(last_attention(sample, 128), BLOCK)
    is_choice = causal_grid(BLOCKS) & ~forced_grid(BLOCKS)
    for gamma in (0.5, 0.8, 0.95):
        for head in range(HEADS):
            whole = covering(POOLED.mass(sample)[head].ravel() / BLOCKS, gamma)
            expected = whole.reshape(BLOCKS, BLOCKS)[is_choice]
            assert (expected == (aware[head] > 1 - gamma)[is_choice]).all()
            on_column, on_slash = covering(columns[head], gamma), covering(slashes[head], gamma)
            steps = np.subtract.outer(np.arange(BLOCKS), np.arange(BLOCKS))
            expected = (on_column[None, :] | on_slash[np.abs(steps)])[is_choice]
            assert (expected == (striped[head] > 1 - gamma)[is_choice]).all()
    distances = FlexPrefill().distances(sample, columns)
    assert (distances >= 0).all() and (distances <= np.sqrt(np.log(2))).all()
    between = FlexPrefill(tau=float(np.sort(distances)[1:3].mean())).rank(sample).priority
    is_aware = distances < np.sort(distances)[1:3].mean()
    assert (between == np.where(is_aware[:, None, None], aware, striped)).all()


def covering(mass, share):
    """The smallest set of the greatest masses that holds a share of all."""
    kept, covered = np.zeros(mass.shape, bool), 0.0
    for index in np.argsort(-mass, kind="stable"):
        if covered >= share:
            break
        kept[index], covered = True, covered + float(mass[index])
    return kept


@hypothesis.given(seed=st.integers(0, 99), threshold=st.floats(0.05, 0.99))
def test_levels_of_cumulative_rules_are_their_thresholds(seed, threshold):
    random = np.random.default_rng(seed)
    mass = random.exponential(size=(2, 12, 12)) ** 3 * causal_grid(12)
    mass /= mass.sum(axis=-1, keepdims=True)
    sample = LayerSample(
        q=np.zeros((12, 2, 1)), k=np.zeros((12, 1, 1)), scale=1.0, block=1, layer=0
    )
    ranking = TopPRule("any", MassEstimator(lambda _: mass, POOLED.cost)).rank(sample)
    for head, row in itertools.product(range(2), range(12)):
        forced = forced_grid(12)[row]
        covered, expected = mass[head, row, forced].sum(), forced.copy()
        for block in np.argsort(-np.where(forced, -1, mass[head, row])):
            if covered >= threshold or forced[block] or block > row:
                break
            covered, expected[block] = covered + mass[head, row, block], True
        assert (expected == (ranking.priority[head, row] > 1 - threshold)).all()


# The oracles


def test_nothing_beats_the_oracle_of_the_model():
    losses, share = {}, 0.5
    for name in RULES:
        rule = calibrated(name)
        losses[name] = mean_loss(NEW, taken(rule, [rule.rank(sample) for sample in NEW], share))
    assert all(np.isfinite(loss) for loss in losses.values())
    assert all(losses["oracle_model"] < losses[name] for name in RULES if name != "oracle_model")
    for name in ("pooled_top_k", "quest", "moba", "vertical_slash", "a_shape"):
        assert losses["oracle_rows"] < losses[name]


def test_the_oracle_of_the_model_is_the_best_of_all_choices():
    random = np.random.default_rng(0)
    masses = random.exponential(size=(1, 6, 6)) ** 2 * causal_grid(6)
    masses = (masses / masses.sum(axis=-1, keepdims=True)).astype(np.float32)
    q, k = np.zeros((6, 1, 1)), np.zeros((6, 1, 1))
    sample = LayerSample(q=q, k=k, scale=1.0, block=1, layer=0, masses=masses)
    priority = OracleModel().rank(sample).priority[0]
    forced = forced_grid(6)
    free = np.flatnonzero(causal_grid(6) & ~forced)
    for count in range(len(free) + 1):
        losses = []
        for chosen in itertools.combinations(free, count):
            kept = forced.copy()
            kept.flat[list(chosen)] = True
            losses.append(mean_loss([sample], kept))
        kept = np.zeros(36, bool)
        kept[np.argsort(-priority.ravel(), kind="stable")[: forced.sum() + count]] = True
        np.testing.assert_allclose(mean_loss([sample], kept.reshape(6, 6)), min(losses), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.iter_modules(baselines.__path__)]
)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"benchmarks.baselines.{name}")
    assert doctest.testmod(module).failed == 0
