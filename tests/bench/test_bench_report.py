from tests.bench.sample_rows import sample_row
from xsake.bench.report import page
from xsake.benchmarking import Shape


def test_a_page_shows_every_run_with_its_rows_failures_and_errors():
    rows = [
        sample_row(run="one", side="<ours>"),
        sample_row(run="one", side="theirs", seconds=None, failure="needs 51 GB", ratios=()),
        sample_row(run="two", side="wrong", is_correct=False, max_error=0.5),
        sample_row(run="three", side="x", shape=Shape.square(2048)),
        sample_row(run="four", side="x", shape=Shape.square(4096)),
        sample_row(run="five", side="x", shape=Shape.square(8192)),
    ]
    text = page(rows)
    assert "&lt;ours&gt;" in text and "<ours>" not in text
    assert "needs 51 GB" in text and "WRONG 5.0e-01" in text
    assert text.count("<svg") == 5
    # A length of another experiment is no point of this one's curve.
    assert "Growth" in text and "Growth" not in page([*rows[3:5], sample_row(experiment="other")])
    assert "<script" not in text and "http://" not in text and "https://" not in text
