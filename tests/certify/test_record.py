"""Certificates: written whole, read strictly, bounded by peak figures, shown and published."""

import io

import pytest
import rich.console

from tests.certify.fake_family import case
from tests.certify.sample import COST, ROOT, sample_certificate
from xsake import _io
from xsake.certify import bound, record, table, tpu
from xsake.certify.family import PeakFigures
from xsake.certify.record import Certificate, CompileResult
from xsake.errors import ArgumentError


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = record.write_certificate(sample_certificate(), tmp_path)
    before = path.read_text()
    monkeypatch.setattr(_io.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        record.write_certificate(sample_certificate(command="other"), tmp_path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_file_is_named_with_the_way_out(tmp_path):
    path = record.write_certificate(sample_certificate(), tmp_path)
    path.write_text(path.read_text().replace('"compiled"', '"rejected"', 1))
    with pytest.raises(ArgumentError, match="(?s)tpu_v5e.json: outcomes.0.verdict.*--no-resume"):
        record.read_certificate(path)


def test_committed_certificates_have_no_surprises_and_are_those_of_the_page_on_hardware():
    certificates = record.read_certificates(ROOT / "certificates")
    for certificate in certificates:
        assert isinstance(certificate, Certificate) and not certificate.unexpected
        assert all(x.commit and not x.dirty for x in certificate.outcomes)
    page = ROOT / "docs" / "hardware.md"
    if page.exists():
        text = page.read_text()
        assert text == table.update_page(text, certificates), "run `just hardware`"


@pytest.mark.parametrize(
    ("expects", "because", "verdict", "message", "is_expected"),
    [
        ("compiles", None, "compiled", None, True),
        ("compiles", None, "refused", "no", False),
        ("compiles", None, "crashed", "abort", False),
        ("refused", "vmem", "refused", "Ran out of memory in memory space VMEM", True),
        ("refused", "vmem", "refused", "TypeError: our own bug", False),
        ("refused", "vmem", "crashed", "vmem", False),
        ("refused", "vmem", "compiled", None, False),
    ],
)
def test_a_control_counts_only_if_refused_for_its_reason(
    expects, because, verdict, message, is_expected
):
    asked = case("x", expects=expects, because=because)
    given = CompileResult(verdict=verdict, message=message)
    assert record.is_as_expected(asked, given) is is_expected


@pytest.mark.parametrize(
    ("flops", "least_bytes", "computed", "seconds"),
    [
        (3 * 10**12, 2 * 10**9, 9, 3),
        (10**12, 4 * 10**9, 9, 4),
        (4 * 10**12, 0, 18, 2),  # only what was asked for counts
        (4 * 10**12, 0, None, None),
    ],
)
def test_the_slower_of_products_and_bytes_bounds_the_time(flops, least_bytes, computed, seconds):
    changes = {"flops": flops, "least_bytes": least_bytes, "computed": computed}
    limit = bound.lower_bound(
        COST.model_copy(update=changes), PeakFigures(1e12, 1e9, 2**34, None, "made up")
    )
    assert (limit and limit.seconds) == seconds
    assert limit is None or limit.label == "lower bound from public peak figures, not a measurement"


def test_a_full_chip_bounds_dense_attention_by_its_peak():
    """4 T^2 D flops of one head at 16k tokens and D 128 on v5e: 0.7 ms at 197 Tflop/s."""
    cost = COST.model_copy(update={"flops": 4 * 16384**2 * 128, "least_bytes": 10**6})
    limit = bound.lower_bound(cost, tpu.TARGETS["v5e"].peak)
    assert limit.seconds == pytest.approx(6.977e-4, rel=1e-3)


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
    with pytest.raises(ArgumentError, match="XSK-102.table-markers"):
        table.update_page("a page", [])


def test_long_messages_lose_their_middle_and_no_path_survives():
    message = "start \x1b[1m/place/lib/a.py\x1b[0m " + "x" * 9000 + " end"
    text = record.sanitize(message, {"/place": "<environment>"})
    assert text.startswith("start <environment>/lib/a.py ") and text.endswith(" end")
    assert "characters omitted" in text and len(text) < record.MAX_CHARACTERS + 100
