"""Benchmark rows: their file, comparison, tables and scaling fits."""

import io
import json
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError
from rich.console import Console

import xsake.bench
from tests.bench.sample_rows import sample_row
from xsake import benchmarking
from xsake._provenance import environment
from xsake.bench.tuned_file import load_tuned_tiles
from xsake.benchmarking import (
    BenchmarkRow,
    Claim,
    Ratio,
    Shape,
    Verdict,
    append_rows,
    claims_table,
    read_rows,
    rows_table,
    tuning,
)
from xsake.benchmarking.growth import fit_growth, fit_growths
from xsake.benchmarking.rows import PRODUCT, TimingStats, compare_rows
from xsake.errors import ArgumentError
from xsake.schemas import schema_text

ROOT = Path(__file__).parents[2]


def test_rows_survive_a_file_and_are_only_added(tmp_path):
    file = tmp_path / "deep" / "rows.jsonl"
    append_rows(file, [sample_row()])
    append_rows(file, [sample_row(side="other"), sample_row(seconds=None)])
    assert read_rows(file) == [sample_row(), sample_row(side="other"), sample_row(seconds=None)]
    schema = json.loads(schema_text("benchmark_row.schema.json"))
    jsonschema.validate(json.loads(file.read_text().splitlines()[0]), schema)
    file.write_text(file.read_text() + '{"side": 3}\n')
    with pytest.raises(ArgumentError, match="line 4"):
        read_rows(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"surprise": 1},
        {"seconds": {"median": 1.0, "q25": 2.0, "q75": 3.0}},
        {"seconds": {"median": 0.0, "q25": 0.0, "q75": 0.0}},
        {"max_error": float("nan")},
        {"threads": 0},
        {"direction": "sideways"},
    ],
)
def test_impossible_rows_are_refused(changes):
    with pytest.raises(ValidationError):
        sample_row(**changes)


@pytest.mark.parametrize(
    ("implementation", "is_own"),
    [
        ("xsake.native_sparse_attention", True),
        ("Planned, 30 layers", True),
        ("SmolLM2-135M with xsake.hads.Planned", True),
        ("SmolLM2-135M with jax.nn.dot_product_attention", False),
        ("torch.compile(flex_attention)", False),
        ("tokamax xla_chunked", False),
        ("jnp.matmul", False),
    ],
)
def test_rows_of_0_1_0_name_their_owner(implementation, is_own):
    old = json.loads(sample_row(implementation=implementation).model_dump_json())
    del old["is_own"]
    assert BenchmarkRow.model_validate(old).is_own == is_own


def test_committed_results_are_rows():
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        first = json.loads(file.read_text().splitlines()[0])
        if "experiment" in first and "run" in first:
            assert all(isinstance(row, BenchmarkRow) for row in read_rows(file))


def test_a_ratio_to_an_absent_side_is_an_error():
    assert sample_row().ratio_to("old").median == 0.5
    with pytest.raises(ArgumentError, match="absent"):
        sample_row().ratio_to("absent")


def test_environment_outside_a_checkout_has_no_commit(tmp_path):
    here = environment(tmp_path)
    assert here.commit is here.dirty is None and here.cpu
    assert {"python", "jax", "numpy"} <= set(here.versions)
    assert here.fields("cpu") == {"cpu": here.cpu}


def ratio_row(side, median, *, width=0.01, **more):
    low, high = median * (1 - width), median * (1 + width)
    ratio = Ratio(baseline=PRODUCT, median=median, q25=low, q75=high)
    return sample_row(side=side, ratios=(ratio,), **more)


def test_sides_are_held_against_the_product_of_their_own_run():
    before = [ratio_row("a", 2.0), ratio_row("b", 2.0), ratio_row("gone", 1.0)]
    after = [ratio_row("a", 2.5), ratio_row("b", 2.02), ratio_row("new", 1.0)]
    found = {change.side: change for change in compare_rows(before, after)}
    assert set(found) == {"a", "b"}
    assert found["a"].factor.median == pytest.approx(1.25) and found["a"].is_slower(1.1)
    assert not found["b"].is_slower(1.1) and found["b"].is_clear


def test_the_newest_row_counts_and_other_sizes_are_other_sides():
    early, late = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
    before = [ratio_row("a", 3.0, utc=late), ratio_row("a", 1.0, utc=early)]
    (change,) = compare_rows(before, [ratio_row("a", 3.0)])
    assert change.factor.median == pytest.approx(1)
    assert not compare_rows(before, [ratio_row("a", 3.0, dtype="bfloat16")])


def test_noise_is_not_a_regression():
    (change,) = compare_rows([ratio_row("a", 1.0, width=0.4)], [ratio_row("a", 1.3, width=0.4)])
    assert not change.is_slower(1.1) and not change.is_clear


CLAIM = Claim("speed", "<= 1x", "0.9x [0.8, 0.95]", Verdict.PASS)
HIDDEN = (Ratio(baseline="old", median=0.5, q25=0.3, q75=0.9),)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (rows_table([sample_row()]), ["20 ms [19 ms, 21 ms]", "0.500x [0.490, 0.520] of old"]),
        (rows_table([sample_row(ratios=HIDDEN)]), ["[0.3, 0.9] of old", "unclear: spread 120%"]),
        (rows_table([sample_row(max_error=0.3, is_correct=False)]), ["WRONG"]),
        (rows_table([sample_row(max_error=None, is_correct=False)]), ["WRONG"]),
        (claims_table([CLAIM]), ["speed", "<= 1x", "0.9x [0.8, 0.95]", "pass"]),
    ],
)
def test_tables_show_spreads_errors_and_verdicts(table, words):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()
    assert all(word in text for word in words)
    assert "unclear" not in text or "0.500x" not in text  # hidden by its spread


def timed(side, tokens, seconds):
    timing = TimingStats(median=seconds, q25=seconds, q75=seconds)
    return sample_row(side=side, shape=Shape.square(tokens), seconds=timing)


def test_each_side_gets_its_own_exponent_and_lines_cross_where_they_are_equal():
    rows = [timed("dense", n, 1e-9 * n**2) for n in (256, 512, 1024)]
    rows += [timed("sparse", n, 1e-7 * n) for n in (256, 512, 1024)]
    rows += [timed("seen once", 256, 1.0)]
    dense, sparse = fit_growths(rows)
    assert (dense.exponent, sparse.exponent) == (pytest.approx(2), pytest.approx(1))
    assert dense.crossover(sparse) == sparse.crossover(dense) == pytest.approx(100)
    assert dense.crossover(dense) is None
    assert fit_growth("bent", (1, 2, 4), (1.0, 4.0, 4.0)).largest_residual > 0.3
    with pytest.raises(ArgumentError, match="XSK-102.fit-lengths"):
        fit_growth("point", (8, 8), (1.0, 1.0))


def test_names_of_0_1_0_are_those_of_benchmarking():
    assert xsake.bench.BenchmarkRow is benchmarking.BenchmarkRow
    assert load_tuned_tiles is tuning.load_tuned_tiles
    with pytest.raises(AttributeError, match="nothing"):
        xsake.bench.nothing  # noqa: B018 (raises)
