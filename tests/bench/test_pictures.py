import pytest
from rich.console import Console

from tests.bench.sample_rows import sample_row
from xsake.benchmarking import Claim, Ratio, Verdict, claims_table, rows_table


def printed(table) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_the_table_shows_times_and_ratios_with_their_spread():
    text = printed(rows_table([sample_row()]))
    assert "20 ms [19 ms, 21 ms]" in text
    assert "0.500x [0.490, 0.520] of old" in text


def test_the_table_refuses_a_ratio_hidden_by_its_spread():
    hidden = Ratio(baseline="old", median=0.5, q25=0.3, q75=0.9)
    text = printed(rows_table([sample_row(ratios=(hidden,))]))
    assert "unclear: spread 120%" in text
    assert "0.500x" not in text


@pytest.mark.parametrize("error", [0.3, None])
def test_a_wrong_result_is_shown_as_wrong(error):
    assert "WRONG" in printed(rows_table([sample_row(max_error=error, is_correct=False)]))


def test_claims_show_limit_measurement_and_verdict():
    text = printed(claims_table([Claim("speed", "<= 1x", "0.9x [0.8, 0.95]", Verdict.PASS)]))
    assert all(word in text for word in ("speed", "<= 1x", "0.9x [0.8, 0.95]", "pass"))
