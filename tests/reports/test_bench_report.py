import pytest

from tests.bench.sample_rows import sample_row
from tests.reports.html_page import parse, words
from xsake.benchmarking import Shape
from xsake.benchmarking.growth import fit_growths
from xsake.errors import ArgumentError
from xsake.reports.bench_report import draw_budgets, draw_growth, draw_times, page

LENGTHS = [sample_row(run=str(n), shape=Shape.square(n)) for n in (2048, 4096, 8192)]


def test_a_page_shows_every_run_with_its_rows_failures_and_errors():
    rows = [
        sample_row(run="one", side="<ours>"),
        sample_row(run="one", side="theirs", seconds=None, failure="needs 51 GB", ratios=()),
        sample_row(run="two", side="wrong", is_correct=False, max_error=0.5),
        *LENGTHS,
    ]
    text = page(rows)
    found = parse(text)
    assert "<ours>" in words(found, "th") and "<ours>" not in text
    assert "needs 51 GB" in text and "WRONG 5.0e-01" in text
    assert len(words(found, "i")) == 5, "a bar per time"
    # A length of another experiment is no point of this one's curve.
    assert "Growth" in text and "Growth" not in page([*LENGTHS[:2], sample_row(experiment="other")])


def test_earlier_runs_of_a_setup_are_folded():
    rows = [sample_row(run=str(i), side=f"of {i}", utc=f"2026-01-0{i}") for i in (1, 3, 2)]
    text = page(rows)
    assert words(parse(text), "summary") == ["2 earlier runs"]
    places = [text.index(part) for part in (">of 3<", "<details>", ">of 2<", ">of 1<")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("draw", "rows", "nothing"),
    [
        (lambda rows, path: draw_times(rows, path, "Times"),
         [sample_row(), sample_row(side="old", is_own=False)], [sample_row(seconds=None)]),
        (lambda rows, path: draw_budgets(rows, path, "Budgets", baseline="old"),
         [sample_row(budget=0.4)], [sample_row(budget=0.4, ratios=())]),
        (lambda rows, path: draw_growth(fit_growths(rows), rows, path), LENGTHS, LENGTHS[:1]),
    ],
    ids=["times", "budgets", "growth"],
)  # fmt: skip
def test_plots_are_written_and_a_plot_of_nothing_is_an_error(tmp_path, draw, rows, nothing):
    draw(rows, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="XSK-102.nothing-to-draw"):
        draw(nothing, tmp_path / "no.png")
