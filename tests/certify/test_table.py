import io

import pytest
import rich.console

from tests.certify.sample import ROOT, sample_certificate
from xsake.certify import table
from xsake.certify.record import MAX_CHARACTERS, read_certificates, sanitize
from xsake.errors import ArgumentError


def shown(certificate) -> str:
    console = rich.console.Console(width=160, record=True, file=io.StringIO())
    console.print(table.outcomes_table("v5e", certificate.outcomes))
    return console.export_text()


def test_the_screen_shows_figures_and_shouts_at_surprises():
    good = sample_certificate()
    text = shown(good)
    assert "3.0 MiB" in text and "2.0 KiB" in text and "2 ms" in text
    assert "refused (as expected)" in text
    assert table.format_failures(good.outcomes) == ""
    bad = good.outcomes[0].model_copy(update={"as_expected": False, "verdict": "refused"})
    assert "REFUSED, expected compiles" in shown(good.model_copy(update={"outcomes": [bad]}))
    assert table.format_failures([bad]).startswith("good: refused, expected compiles")


def test_markdown_counts_cases_and_controls_apart():
    text = table.markdown([sample_certificate()])
    assert "| v5e (TPU v5 lite) | 1 of 1 | 1 of 1 | 0 | jax 0.12.0.1, libtpu 0.0.50.1" in text
    assert "| fake | forward | 1 of 1, VMEM 3.0 MiB, spills 4 |" in text


def test_a_page_is_rewritten_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.START}\nold\n{table.END}\nafter\n")
    (tmp_path / "certificates").mkdir()
    assert table.main([str(page), str(tmp_path / "certificates")]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{table.START}\n| target") and text.endswith("after\n")
    assert "old" not in text
    with pytest.raises(ArgumentError, match="no markers"):
        table.update_page("a page", [])


def test_the_page_on_hardware_shows_the_committed_certificates():
    page = ROOT / "docs" / "hardware.md"
    if page.exists():
        text = page.read_text()
        assert text == table.update_page(text, read_certificates(ROOT / "certificates")), (
            "run `just hardware`"
        )


def test_long_messages_lose_their_middle_and_no_path_survives():
    message = "start \x1b[1m/place/lib/a.py\x1b[0m " + "x" * 9000 + " end"
    text = sanitize(message, {"/place": "<environment>"})
    assert text.startswith("start <environment>/lib/a.py ") and text.endswith(" end")
    assert "characters omitted" in text and len(text) < MAX_CHARACTERS + 100
