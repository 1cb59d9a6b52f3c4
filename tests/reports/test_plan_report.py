"""The report of a plan: one page that stands alone, shows the files' numbers and trusts no text."""

import functools
import json
import math
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.observability.browser import NoBrowserError, chromium
from tests.bench.sample_rows import sample_row
from tests.hads.sample import POOLED, profile
from tests.reports.html_page import parse, words
from xsake import cli
from xsake.errors import ArgumentError, MissingExtraError
from xsake.hads.plan import SparsityPlan
from xsake.hads.policies import KL, EntropyRandom, Static
from xsake.reports import bench_report, pages
from xsake.reports.plan_report import (
    BoundFigures,
    ReportData,
    draw,
    interpolate_share,
    page,
    read_bounds,
    read_comparisons,
)

EVIL = '<script>alert("&")</script>$x_1$'


@functools.cache
def data(**sizes) -> ReportData:
    measured = profile(**{"n": 12, "weights": 3} | sizes)
    return ReportData(SparsityPlan.of(measured, KL(), 0.6, selector=POOLED), measured)


def rows(rule: str = "hads", cost: float = 0.01, **changes) -> list[dict]:
    """KL halves with every tenth of the blocks."""
    base = {"context": 768, "block": 64, "documents": 3, "kept": 0.9}
    return [
        base | {"rule": rule, "budget": b, "effective": b + cost, "kl": 2 ** (-10 * b)} | changes
        for b in (0.2, 0.3, 0.5)
    ]


def write_rows(path, *groups):
    head = {"documents": ["book: a"], "environment": {"commit": "c0ffee"}}
    lines = [head, *(row for group in groups for row in group)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def comparison(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", rows("window", 0, kl=0.5), rows(), rows(EVIL, 0.1))


def test_a_page_of_270_heads_stays_small_and_needs_nothing_else():
    text = page(data(layers=30, heads=9, n=64))
    assert len(text.encode()) < 2e6
    found = parse(text)
    assert len(words(found, "details")) == 30
    points = [line.get("points").split() for line in found.iter("polyline")]
    assert len(points) >= 3 * 270 and max(map(len, points)) <= 24


def test_hostile_text_stays_text_and_no_picture_carries_meaning_by_colour_alone(
    tmp_path, comparison
):
    model = data().plan.model.model_copy(update={"name": EVIL})
    plan = data().plan.model_copy(update={"model": model, "summary": EVIL})
    bounds = {EVIL: 1.5, "text": EVIL, "list": [{EVIL: EVIL}]}
    (tmp_path / "bounds.json").write_text(json.dumps(bounds))
    comparisons, bounds = read_comparisons(comparison), read_bounds(tmp_path / "bounds.json")
    text = page(ReportData(plan, data().profile, comparisons, bounds))
    found = parse(text)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 5
    assert len(words(found, "table")) == 9 and len(words(found, "details")) == 3
    cells = [x.text for x in found.iter("td") if x.get("style", "").startswith("--v:")]
    assert len(cells) == 3 * 6 and all(cell.replace(".", "").isdigit() for cell in cells)
    (chart,) = found.findall(".//svg[@class='chart'][@role='img']")
    assert "the table below has the numbers" in chart.get("aria-label")
    assert any(text.startswith("hads  ") for text in words(chart, "text"))
    assert words(found, "strong") == ["hads (thick line)"]
    assert not [x for x in found.iter() if "#" in x.get("style", "")], "colours by name"


def test_the_numbers_are_those_of_the_files():
    shown = data()
    plan, measured = shown.plan, shown.profile
    titles = [x.get("title") for x in parse(page(shown)).iter("td")]
    for layer, head in np.ndindex(2, 3):
        share, entropy = plan.heads[layer][head].share, measured.entropy[layer, head]
        assert f"layer {layer}, head {head}: computes {share:.1%} of its blocks" in titles
        assert f"layer {layer}, head {head}: entropy {entropy:.3f} nats" in titles
    values = shown.to_dict()
    assert values["budget"] == 0.6 and values["model"]["name"] == "tiny"
    assert values["heads"][1][2]["outside"] == measured.outside[1, 2]
    losses = [head["kl"] for layer in values["heads"] for head in layer]
    assert values["means"]["kl"] == pytest.approx(np.mean(losses), rel=1e-4)
    lowest = measured.curves["pooled"][..., -1]
    assert (np.array(losses).reshape(2, 3) >= lowest - 1e-6).all()


@pytest.mark.parametrize("policy", [Static(), EntropyRandom(), None], ids=["static", "random", "-"])
def test_plans_without_a_selector_or_a_profile_have_a_page_too(policy):
    measured = profile(n=12)
    shown = ReportData(data().plan)
    if policy is not None:
        shown = ReportData(SparsityPlan.of(measured, policy, 0.6), measured)
    found = parse(page(shown))
    assert shown.losses() is None and "kl" not in shown.head_metrics()
    assert not words(found, "circle") and bool(words(found, "polyline")) is bool(policy)
    note = "was not calibrated" if policy else "Without a profile"
    assert note in "".join(words(found, "p"))


def test_a_profile_of_another_plan_is_refused():
    with pytest.raises(ArgumentError, match="XSK-102.drift-profile"):
        ReportData(data().plan, profile(n=12, seed=9))


@settings(max_examples=25, deadline=None)
@given(st.text(), st.text(), st.text(min_size=1))
def test_any_text_stays_text(name, value, key):
    count = lambda *texts: len(
        list(parse(page(ReportData(data().plan, None, (), BoundFigures(*texts)))).iter())
    )
    assert count({name: value}, {name: [{key: value}]}) == count({"": ""}, {"": [{"": ""}]})


def test_blocks_needed_lie_on_the_line_between_logarithms(comparison):
    (found,) = read_comparisons(comparison)
    assert [rule.name for rule in found.rules] == ["hads", EVIL, "window"]  # least needed first
    ours, costly, window = found.rules
    exact = -math.log2(0.089) / 10
    assert ours.blocks_for_kl().share == pytest.approx(exact, abs=1e-12)
    assert costly.blocks_for_kl(with_choosing=True).share == pytest.approx(exact + 0.1, abs=1e-12)
    assert str(window.blocks_for_kl()) == "> 50.0%"
    assert str(interpolate_share([0.1, 0.2], [0.05, 0.01], 0.089)) == "< 10.0%"
    assert (found.commit, found.documents) == ("c0ffee", 3)
    (values,) = ReportData(data().plan, None, (found,)).to_dict()["comparisons"]
    assert values["rules"][2]["needed"] == {"share": 0.5, "relation": ">"}


@given(st.floats(0.5, 30), st.floats(0.01, 3), st.floats(0.001, 1))
def test_an_exponential_is_met_exactly(rate, start, target):
    kl = lambda share: start * math.exp(-rate * share)
    shares = np.linspace(0.05, 1, 12).tolist()
    found = interpolate_share(shares, [kl(share) for share in shares], target)
    if found.relation == "=":
        assert kl(found.share) == pytest.approx(target, rel=1e-6)
    else:
        assert (kl(1.0) > target) == (found.relation == ">")


def test_contexts_and_blocks_are_compared_apart(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", rows(context=4096), rows(block=32), rows())
    sizes = [(x.context, x.block) for x in read_comparisons(path)]
    assert sizes == [(768, 32), (768, 64), (4096, 64)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"rule": "x"}', "Field required"),
        ('{"rule": "x", "rule": "x"}', "twice"),
        ("[1]", "not an object"),
        ("nonsense", "not a row of a policy comparison"),
        (json.dumps(rows()[0] | {"kl": -1.0}), "kl"),
        (json.dumps(rows()[0] | {"kl": float("nan")}), "NaN"),
        (f"{json.dumps(rows()[0])}\n" * 2, "duplicate row of a rule at one budget"),
        ('{"environment": {"commit": 3}}', "no rows"),
    ],
)
def test_rows_that_make_no_sense_are_refused(tmp_path, line, reason):
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(ArgumentError, match=reason):
        read_comparisons(tmp_path / "rows.jsonl")


def test_bounds_are_read_from_any_shape(tmp_path):
    document = {
        "a": 1, "b": {"c": 0.5, "none": None}, "list": [1, 2],
        "rows": [{"d": True}, {"e": "x", "f": [1]}],
    }  # fmt: skip
    (tmp_path / "bounds.json").write_text(json.dumps(document))
    bounds = read_bounds(tmp_path / "bounds.json")
    assert bounds == BoundFigures({"a": 1, "b / c": 0.5}, {"rows": [{"d": True}, {"e": "x"}]})
    found = parse(page(ReportData(data().plan, None, (), bounds)))
    assert words(found, "summary")[-1] == "rows" and {"d", "e"} <= set(words(found, "th"))
    (tmp_path / "bounds.json").write_text('{"a": 1e999}')
    with pytest.raises(ArgumentError, match="not a finite number"):
        read_bounds(tmp_path / "bounds.json")


def test_plots_are_drawn_of_heads_and_rules(tmp_path, comparison):
    shown = ReportData(data().plan, data().profile, read_comparisons(comparison))
    files = {file.name: file.read_bytes()[:4] for file in draw(shown, tmp_path / "png")}
    assert files == {"heads.png": b"\x89PNG", "rules_768_64.png": b"\x89PNG"}


@pytest.mark.parametrize("module", ["jinja2", "matplotlib.figure"])
def test_a_missing_library_says_what_to_install(monkeypatch, comparison, module):
    pages._templates.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    shown = ReportData(data().plan, None, read_comparisons(comparison))
    with pytest.raises(MissingExtraError, match=r"pip install 'xsake\[viz\]'"):
        page(shown)


def invoke(*arguments):
    command = ["report", *map(str, arguments)]
    return CliRunner().invoke(cli.app, command, env={"COLUMNS": "160"})


@pytest.fixture
def saved(tmp_path):
    data().plan.save(tmp_path / "plan.json")
    data().profile.save(tmp_path / "plan.profile.json")
    return tmp_path / "plan.json"


def test_the_command_writes_the_page_next_to_the_plan(saved, comparison):
    done = invoke(saved, "--comparison", comparison)
    assert done.exit_code == 0, done.output
    path = saved.with_suffix(".html")
    text = path.read_text()
    assert f"{len(text.encode()) / 1e3:,.0f} kB, written to {path}" in done.output
    assert len(words(parse(text), "figure")) == 6  # the profile next to the plan was read
    assert "Rules compared" in text


def test_json_is_all_that_the_command_prints(saved, tmp_path):
    done = invoke(saved, "--json")
    assert json.loads(done.stdout) == data().to_dict()
    assert not list(tmp_path.glob("*.html"))
    assert invoke(saved, "--json", "-o", tmp_path / "there.html").stdout == done.stdout
    assert (tmp_path / "there.html").exists()


@pytest.mark.parametrize("option", [None, "--profile", "--comparison", "--bounds"])
def test_a_file_that_is_missing_ends_with_2_and_no_page(saved, option):
    done = invoke("none.json") if option is None else invoke(saved, option, "none.json")
    assert done.exit_code == 2 and "none.json" in done.stderr, done.output
    assert not saved.with_suffix(".html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_a_phone(tmp_path, comparison, scheme):
    axe = pytest.importorskip("axe_core_python").__path__[0] + "/axe.min.js"
    shown = ReportData(data().plan, data().profile, read_comparisons(comparison))
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    try:
        with chromium(tmp_path) as browser:
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.call("Emulation.setEmulatedMedia", features=media)
            for text in (page(shown), bench_report.page([sample_row()])):
                (tmp_path / "page.html").write_text(text.replace("<details", "<details open"))
                browser.open(f"file://{tmp_path}/page.html")
                browser.run(pathlib.Path(axe).read_text() + "; true")
                assert browser.run("axe.run().then((x) => x.violations.map((y) => y.id))") == []
                assert browser.run("document.documentElement.scrollWidth") <= 390
                assert browser.problems == []
    except NoBrowserError as error:
        pytest.skip(str(error))
