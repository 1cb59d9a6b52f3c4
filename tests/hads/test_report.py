"""The report: one page that stands alone, shows the files' numbers and believes no string."""

import functools
import html.parser
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.hads.sample import POOLED, profile
from xsake import cli
from xsake.errors import ArgumentError
from xsake.hads.plan import SparsityPlan
from xsake.hads.policies import KL, EntropyRandom, Static
from xsake.hads.report import BoundFigures, ReportData, draw, page, read_bounds, read_comparisons
from xsake.hads.report.chart import spread
from xsake.hads.report.ladder import interpolate_share
from xsake.pages.markup import element

EVIL = '<script>alert("&")</script>'
VOID = {"meta"}


class Page(html.parser.HTMLParser):
    """What a browser would find."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.words.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.found if name == tag]


@functools.cache
def figures(**sizes) -> ReportData:
    measured = profile(**{"n": 12, "weights": 3} | sizes)
    return ReportData(SparsityPlan.of(measured, KL(), 0.6, selector=POOLED), measured)


def rows(rule: str = "hads", cost: float = 0.01, **changes) -> list[dict]:
    """KL halves with every tenth of the blocks."""
    base = {"context": 768, "block": 64, "documents": 3, "kept": 0.9}
    budgets = (0.2, 0.3, 0.5)
    return [
        base | {"rule": rule, "budget": b, "effective": b + cost, "kl": 2 ** (-10 * b)} | changes
        for b in budgets
    ]


def write_rows(path, *groups):
    head = {"documents": ["book: a"], "environment": {"commit": "c0ffee"}}
    lines = [head, *(row for group in groups for row in group)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def ladder(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", rows("window", 0, kl=0.5), rows(), rows(EVIL, 0.1))


def test_a_page_of_270_heads_stays_small_and_needs_nothing_else():
    text = page(figures(layers=30, heads=9, n=64))
    assert len(text.encode()) < 2e6
    found = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {x for x, _ in found.found}
    assert not any("src" in attributes or "onload" in attributes for _, attributes in found.found)
    style = "".join(found.words["style"])
    assert "url(" not in style and "@import" not in style and "://" not in text
    assert len(found.all("details")) == 30
    points = [x["points"].split() for x in found.all("polyline") if "points" in x]
    assert len(points) >= 3 * 270 and max(map(len, points)) <= 24


def test_everybody_can_read_it(ladder):
    shown = ReportData(
        figures().plan, figures().profile, read_comparisons(ladder), BoundFigures({"bound": 0.5})
    )
    found = Page(page(shown))
    (language,) = found.all("html")
    assert language["lang"] == "en"
    assert any(x.get("name") == "viewport" for x in found.all("meta"))
    assert "prefers-color-scheme: dark" in "".join(found.words["style"])
    assert len(found.all("caption")) == len(found.all("table")) == 5
    assert len(found.all("summary")) == len(found.all("details")) == 2
    regions = [x for x in found.all("div") if x.get("role") == "region"]
    assert regions and all(x["tabindex"] == "0" and x["aria-label"] for x in regions)
    ids = [attributes["id"] for _, attributes in found.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {x["href"] for x in found.all("a")} <= {f"#{place}" for place in ids}
    # A number stands in every cell of the three maps: colour is not the only carrier.
    maps = Page(page(figures()))
    numbers = [word for word in maps.words["text"] if word.replace(".", "").isdigit()]
    assert len(numbers) == len(maps.all("rect")) == 3 * 6


def test_the_numbers_are_those_of_the_files():
    shown = figures()
    plan, measured = shown.plan, shown.profile
    titles = Page(page(shown)).words["title"]
    for layer, head in np.ndindex(2, 3):
        share = plan.heads[layer][head].share
        assert f"layer {layer}, head {head}: computes {share:.1%} of its blocks" in titles
        entropy = measured.entropy[layer, head]
        assert f"layer {layer}, head {head}: entropy {entropy:.3f} nats" in titles
    told = shown.to_dict()
    assert told["budget"] == 0.6 and told["model"]["name"] == "tiny"
    assert told["heads"][1][2]["outside"] == measured.outside[1, 2]
    losses = [head["kl"] for layer in told["heads"] for head in layer]
    assert told["means"]["kl"] == pytest.approx(np.mean(losses), rel=1e-4)
    lowest = measured.curves["pooled"][..., -1]
    assert (np.array(losses).reshape(2, 3) >= lowest - 1e-6).all()


@pytest.mark.parametrize("policy", [Static(), EntropyRandom()], ids=["static", "original"])
def test_plans_that_no_selector_chooses_for_have_a_page_too(policy):
    measured = profile(n=12)
    shown = ReportData(SparsityPlan.of(measured, policy, 0.6), measured)
    found = Page(page(shown))
    assert shown.losses() is None and "kl" not in shown.head_metrics()
    assert not [x for x in found.all("circle") if x.get("class") == "plan"]
    assert "was not calibrated" in "".join(found.words["p"])


def test_without_a_profile_there_are_shares_and_no_curves():
    found = Page(page(ReportData(figures().plan)))
    assert len(found.all("rect")) == 6 and not found.all("polyline")
    assert "Without a profile" in "".join(found.words["p"])


def test_a_profile_of_another_plan_is_refused():
    with pytest.raises(ArgumentError, match="built from another profile"):
        ReportData(figures().plan, profile(n=12, seed=9))


@given(st.text(), st.text())
def test_whatever_is_not_an_element_is_escaped(content, attribute):
    found = Page(element("p", content, title=attribute))
    ((tag, attributes),) = found.found
    assert tag == "p" and list(attributes) == ["title"]


def test_strings_from_files_stay_strings(tmp_path, ladder):
    plan = figures().plan.model_copy(
        update={"model": figures().plan.model.model_copy(update={"name": EVIL}), "summary": EVIL}
    )
    (tmp_path / "bounds.json").write_text(
        json.dumps({EVIL: 1.5, "text": EVIL, "list": [{EVIL: EVIL}]})
    )
    shown = ReportData(plan, None, read_comparisons(ladder), read_bounds(tmp_path / "bounds.json"))
    text = page(shown)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 5
    assert not Page(text).all("script")


def test_blocks_needed_lie_on_the_line_between_logarithms(ladder):
    (comparison,) = read_comparisons(ladder)
    names = [rule.name for rule in comparison.rules]
    assert names == ["hads", EVIL, "window"]  # those that need least first
    ours, costly, window = comparison.rules
    exact = -math.log2(0.089) / 10
    assert ours.blocks_for_kl().share == pytest.approx(exact, abs=1e-12)
    assert costly.blocks_for_kl(with_choosing=True).share == pytest.approx(exact + 0.1, abs=1e-12)
    assert str(window.blocks_for_kl()) == "> 50.0%"
    assert str(interpolate_share([0.1, 0.2], [0.05, 0.01], 0.089)) == "< 10.0%"
    assert (comparison.commit, comparison.documents) == ("c0ffee", 3)
    (told,) = ReportData(figures().plan, None, (comparison,)).to_dict()["comparisons"]
    assert told["rules"][2]["needed"] == {"share": 0.5, "relation": ">"}


@given(st.floats(0.5, 30), st.floats(0.01, 3), st.floats(0.001, 1))
def test_an_exponential_is_met_exactly(rate, start, target):
    shares = np.linspace(0.05, 1, 12).tolist()
    kls = [start * math.exp(-rate * share) for share in shares]
    found = interpolate_share(shares, kls, target)
    if found.relation == "=":
        assert start * math.exp(-rate * found.share) == pytest.approx(target, rel=1e-6)
    else:
        assert (min(kls) > target) == (found.relation == ">")


def test_our_line_is_told_from_others_by_more_than_its_colour(ladder):
    found = Page(page(ReportData(figures().plan, None, read_comparisons(ladder))))
    assert len([x for x in found.all("g") if x.get("class") == "rule"]) == 2
    assert len([x for x in found.all("g") if x.get("class") == "ours"]) == 1
    assert len(found.all("circle")) == 3  # points, of our line alone
    assert "hads" in found.words["text"] and found.words["strong"] == ["hads (thick line)"]


def test_contexts_and_blocks_are_compared_apart(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", rows(context=4096), rows(block=32), rows())
    assert [(x.context, x.block) for x in read_comparisons(path)] == [
        (768, 32),
        (768, 64),
        (4096, 64),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"rule": "x"}', "Field required"),
        ('{"rule": "x", "rule": "x"}', "twice"),
        ("[1]", "not an object"),
        ("nonsense", "not a row of a policy comparison"),
        (json.dumps(rows()[0] | {"kl": -1.0}), "kl"),
        (json.dumps(rows()[0] | {"kl": float("nan")}), "NaN"),
        (
            json.dumps(rows()[0]) + "\n" + json.dumps(rows()[0]),
            "duplicate row of a rule at one budget",
        ),
        ('{"environment": {"commit": 3}}', "no rows"),
    ],
)
def test_rows_that_make_no_sense_are_refused(tmp_path, line, words):
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(ArgumentError, match=words):
        read_comparisons(tmp_path / "rows.jsonl")


def test_bounds_are_read_from_any_shape(tmp_path):
    document = {
        "a": 1,
        "b": {"c": 0.5, "none": None},
        "list": [1, 2],
        "rows": [{"d": True}, {"e": "x", "f": [1]}],
    }
    (tmp_path / "bounds.json").write_text(json.dumps(document))
    found = read_bounds(tmp_path / "bounds.json")
    assert found == BoundFigures({"a": 1, "b / c": 0.5}, {"rows": [{"d": True}, {"e": "x"}]})
    told = Page(page(ReportData(figures().plan, None, (), found)))
    assert told.words["summary"][-1] == "rows" and {"d", "e"} <= set(told.words["th"])
    (tmp_path / "bounds.json").write_text('{"a": 1e999}')
    with pytest.raises(ArgumentError, match="not a finite number"):
        read_bounds(tmp_path / "bounds.json")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_names_of_lines_do_not_cover_each_other(ends):
    wanted = sorted(ends)
    places = spread(wanted, 10.0, 100.0)
    assert (np.diff(places) >= 10 - 1e-9).all() and places[-1] <= 100


def test_pictures_are_drawn_of_heads_and_rules(tmp_path, ladder):
    shown = ReportData(figures().plan, figures().profile, read_comparisons(ladder))
    files = draw(shown, tmp_path / "png")
    assert [file.name for file in files] == ["heads.png", "rules_768_64.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def invoke(*arguments):
    command = ["report", *map(str, arguments)]
    return CliRunner().invoke(cli.app, command, env={"COLUMNS": "160"})


@pytest.fixture
def saved(tmp_path):
    figures().plan.save(tmp_path / "plan.json")
    figures().profile.save(tmp_path / "plan.profile.json")
    return tmp_path / "plan.json"


def test_the_command_writes_the_page_beside_the_plan(saved, ladder):
    done = invoke(saved, "--comparison", ladder)
    assert done.exit_code == 0, done.output
    text = saved.with_suffix(".html").read_text()
    assert (
        f"{len(text.encode()) / 1e3:,.0f} kB, written to {saved.with_suffix('.html')}"
        in done.output
    )
    assert len(Page(text).all("rect")) == 3 * 6  # the profile beside the plan was found
    assert "Rules compared" in text


def test_json_is_all_that_the_command_prints(saved, tmp_path):
    done = invoke(saved, "--json")
    assert json.loads(done.stdout) == figures().to_dict()
    assert not list(tmp_path.glob("*.html"))
    assert invoke(saved, "--json", "-o", tmp_path / "there.html").stdout == done.stdout
    assert (tmp_path / "there.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.json",), "none.json"),
        (("--profile", "none.json"), "none.json"),
        (("--comparison", "none.jsonl"), "none.jsonl"),
        (("--bounds", "none.json"), "none.json"),
    ],
)
def test_what_cannot_be_shown_says_why_and_leaves_with_2(saved, arguments, words):
    done = invoke(*arguments) if len(arguments) == 1 else invoke(saved, *arguments)
    assert done.exit_code == 2 and words in done.stderr, done.output
    assert not saved.with_suffix(".html").exists()
