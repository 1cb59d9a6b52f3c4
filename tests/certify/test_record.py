import pytest

from tests.certify.fake_family import case
from tests.certify.sample import ROOT, sample_certificate
from xsake import _io
from xsake.certify import record
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


def test_committed_certificates_are_certificates_without_surprises():
    for certificate in record.read_certificates(ROOT / "certificates"):
        assert isinstance(certificate, Certificate) and not certificate.unexpected
        assert all(x.commit and not x.dirty for x in certificate.outcomes)


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
