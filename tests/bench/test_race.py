import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.experiments.common import (
    BLOCK,
    LONG_ROUNDS,
    LONG_SLOW_ROUNDS,
    SLOW_ROUNDS,
    Contender,
    Settings,
    draw_inputs,
    limit_claim,
    race,
    take_turns,
)
from benchmarks.experiments.reference import TOLERANCE, relative_error, true_attention
from benchmarks.peers.client import Worker, WorkerError
from benchmarks.peers.jax_call import measured_function
from benchmarks.peers.recipes import interpreter
from tests.bench.sample_rows import sample_row
from xsake.benchmarking import Ratio, Shape, TimedSide, Verdict
from xsake.layout.synthetic import ragged_grid

SMALL = Shape.square(300, heads=3, head_dim=8)


def dense_attention(q, k, v, grid):
    """Softmax over an explicit token mask, in JAX's own words."""
    tokens = np.kron(grid, np.ones((BLOCK, BLOCK), bool))[:, : q.shape[1], : k.shape[1]]
    mask = tokens & np.tri(q.shape[1], dtype=bool)
    return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask[None]))


@pytest.mark.parametrize("is_backward", [False, True])
def test_the_truth_agrees_with_a_dense_mask(is_backward):
    arrays = draw_inputs(SMALL, seed=0)
    grid = ragged_grid(3, 3, 0.6, seed=0)
    inputs = [jnp.asarray(arrays[name]) for name in ("q", "k", "v", "cotangent")]
    dense = measured_function(lambda q, k, v: dense_attention(q, k, v, grid), is_backward)(*inputs)
    truth = true_attention(arrays, grid, BLOCK, is_backward=is_backward)
    assert relative_error({name: np.asarray(x) for name, x in dense.items()}, truth) < 1e-5


def test_the_truth_of_grouped_heads_and_of_one_query():
    grouped = SMALL.model_copy(update={"kv_heads": 1})
    for shape in (grouped, grouped.model_copy(update={"q_tokens": 1})):
        arrays = draw_inputs(shape, seed=0)
        truth = true_attention(arrays, None, BLOCK, is_backward=False)
        q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
        dense = jax.nn.dot_product_attention(q, k, v, is_causal=shape.q_tokens > 1)
        assert relative_error({"out": np.asarray(dense)}, truth) < 1e-5


def test_errors_of_nan_and_shape_are_infinite():
    truth = {"out": np.ones((2, 2))}
    assert relative_error({"out": np.full((2, 2), np.nan)}, truth) == float("inf")
    assert relative_error({"out": np.ones((2, 3))}, truth) == float("inf")
    assert relative_error({"out": np.ones((2, 2)) + 0.5}, truth) == 0.5 > max(TOLERANCE.values())


@pytest.mark.parametrize(
    "is_long, rounds, few", [(False, 15, SLOW_ROUNDS), (True, LONG_ROUNDS, LONG_SLOW_ROUNDS)]
)
def test_a_slow_side_leaves_after_a_few_rounds(is_long, rounds, few):
    seconds = {"quick": 0.1, "close": 0.3, "slow": 0.5}
    sides = [TimedSide(name, lambda name=name: seconds[name]) for name in seconds]
    times = take_turns(sides, Settings(), is_long=is_long)
    assert {name: len(each) for name, each in times.items()} == {
        "quick": rounds,
        "close": rounds,
        "slow": few,
    }


def test_a_race_checks_times_and_describes_every_side():
    contenders = [
        Contender("one", "jax.nn"),
        Contender("two", "jax.nn", is_backward=True),
        Contender("product", "jax.gemm"),
    ]
    settings = Settings(rounds=3, threads=1)
    rows = race("small", SMALL, contenders, settings=settings, baselines=["one"])
    *rows, product = rows
    assert product.seconds is not None and product.is_correct is None
    one, two = rows
    assert one.run == two.run
    assert one.ratios == ()
    assert two.ratio_to("one").median > 0
    assert two.direction == "forward+backward"
    assert all(row.is_correct and row.repeats == 3 and row.temp_bytes for row in rows)
    assert "jax" in one.versions


def test_a_peer_that_fails_has_a_row_that_says_why():
    grids = {"some": ragged_grid(3, 3, 0.6, seed=0)}
    contenders = [Contender("one", "jax.nn"), Contender("two", "jax.nn", "some")]
    settings = Settings(rounds=2, threads=1)
    rows = race(
        "small", SMALL, contenders, settings=settings, baselines=["one", "two"], grids=grids
    )
    one, two = rows
    assert one.seconds is not None and one.failure is None and one.ratios == ()
    assert two.seconds is None and "no block grid" in two.failure and two.is_correct is None
    claim = limit_claim("t", "p", rows, side="one", baseline="two", limit=1.0)
    assert claim.verdict is Verdict.UNCLEAR and "two failed" in claim.measured


def test_a_wrong_result_never_passes():
    ours = sample_row(ratios=(Ratio(baseline="old", median=0.5, q25=0.49, q75=0.51),))
    old = sample_row(side="old", ratios=())
    wrong = {"is_correct": False, "max_error": 0.3}

    def verdict(*rows):
        claim = limit_claim("t", "p", rows, side="xsake", baseline="old", limit=1.0)
        return claim.verdict

    assert verdict(ours, old) is Verdict.PASS
    assert verdict(ours.model_copy(update=wrong), old) is Verdict.FAIL
    assert verdict(ours, old.model_copy(update=wrong)) is Verdict.UNCLEAR


def test_a_worker_tells_its_failures_and_lives_on(tmp_path):
    for name, array in draw_inputs(SMALL, seed=0).items():
        np.save(tmp_path / f"{name}.npy", array)
    case = {"call": "xla", "grid": None, "block": BLOCK, "backward": False, "dtype": "float32"}
    with Worker(Path(sys.executable), "jax_worker", threads=1, is_isolated=False) as worker:
        worker.load(tmp_path)
        with pytest.raises(WorkerError, match="no block grid"):
            worker.compile("bad", case | {"grid": "some"})
        worker.compile("good", case)
        assert worker.run("good") > 0
        assert worker.check("good")["out"].shape == (1, 300, 3, 8)


def test_a_missing_peer_names_the_command_that_builds_it(tmp_path):
    with pytest.raises(SystemExit, match="benchmarks.peers build torch"):
        interpreter("torch", tmp_path)
