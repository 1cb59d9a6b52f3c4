"""Certifying with a family that misbehaves: what is kept, what is retried, what fails the run."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.certify import fake_family
from xsake.certify import process, record, run
from xsake.certify.record import CertifyError
from xsake.schemas import schema_text

TARGET = fake_family.TARGETS["f1"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """One run over all cases of the family, good and bad."""
    folder = tmp_path_factory.mktemp("everything")
    plan = run.CertifyOptions(
        "[fb]a[kd]*_*", folder, folder, command="xsake certify f1", time_limit=4.0
    )
    seen = []
    certificate, outcomes = run.certify(
        TARGET, plan, on_progress=seen.append, families=fake_family.FAMILIES
    )
    return folder, certificate, {outcome.case.name: outcome for outcome in outcomes}, seen


@pytest.fixture
def certify(tmp_path):
    def call(selection, **changes):
        plan = run.CertifyOptions(
            selection, tmp_path / "certificates", tmp_path / "none", **changes
        )
        seen = []
        certificate, _ = run.certify(
            TARGET, plan, on_progress=seen.append, families=fake_family.FAMILIES
        )
        return certificate, [event.label.split()[1] for event in seen if event.is_new]

    return call


class QuickWorker(process.Worker):
    """Answers at once, by the name of the case."""

    device_kind, versions = "quick", {"jax": "0"}
    is_interrupted = False

    def __init__(self, *arguments, **limits):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def compile(self, case):
        if case.name == "fake_good_dq" and self.is_interrupted:
            raise KeyboardInterrupt
        return record.CompileResult(verdict="crashed" if case.name == "bad_crash" else "compiled")


@pytest.fixture
def quick(monkeypatch):
    worker = type("Worker", (QuickWorker,), {})
    monkeypatch.setattr(run, "Worker", worker)
    return worker


def test_good_cases_compile_and_controls_are_refused_with_their_words(everything):
    _, certificate, outcomes, seen = everything
    assert [outcomes[f"fake_good{end}"].verdict for end in ("", "_dq", "_dkv")] == ["compiled"] * 3
    assert outcomes["fake_refused"].message == "ValueError: tile too large in <scratch>/cwd"
    assert outcomes["fake_unsplit"].message == "ValueError: list too long"
    assert outcomes["fake_good"].facts.vmem_bytes == 4096
    assert outcomes["fake_good"].cost.steps == 4
    assert outcomes["fake_good"].bound.seconds >= 2e-9
    assert "not a measurement" in outcomes["fake_good"].bound.label
    shown = {event.label: (event.detail, event.is_failure) for event in seen}
    for name, outcome in outcomes.items():
        assert outcome.as_expected == name.startswith("fake")
        verdict = f"{outcome.verdict} {'ok' if outcome.as_expected else 'NOT AS EXPECTED'}"
        assert shown[f"f1 {name}"] == (verdict, not outcome.as_expected)
    assert (seen[-1].done, seen[-1].total, seen[-1].remaining_seconds) == (12, 12, 0.0)


def test_the_file_is_the_certificate_and_fits_the_schema(everything):
    folder, certificate, _, _ = everything
    assert certificate.device_kind == "f1 of cpu"
    assert {"xsake", "jax", "jaxlib", "numpy", "python"} <= certificate.versions.keys()
    text = (folder / "fake_f1.json").read_text()
    jsonschema.validate(json.loads(text), json.loads(schema_text("certificate.schema.json")))
    assert record.Certificate.model_validate_json(text) == certificate
    assert not any(place in text for place in (str(folder), str(Path.home()), sys.prefix))


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("bad_crash", "crashed", "SIGABRT\ncompiler chatter\nfatal: stack of the compiler"),
        ("bad_exit", "crashed", "exited with code 7"),
        ("bad_hang", "crashed", "timed out after 4 s"),
        ("bad_refusal", "refused", "ValueError: tile too large"),
        ("bad_control", "compiled", None),
        ("bad_reason", "refused", "tile too large"),
        ("bad_constant", "refused", "NO_SUCH"),
    ],
)
def test_what_is_not_as_expected_is_said_so(everything, name, verdict, words):
    outcome = everything[2][name]
    assert (outcome.verdict, outcome.as_expected) == (verdict, False)
    assert outcome.message is None if words is None else words in outcome.message


def test_a_run_goes_on_where_it_stopped_and_tries_crashes_again(quick, certify):
    assert certify("fake_good")[1] == ["fake_good"]
    assert certify("[fb]a[kd]*_[gc]r*")[1] == ["bad_crash"]
    certificate, new = certify("[fb]a[kd]*_[gc]*")
    assert new == ["fake_good_dq", "fake_good_dkv", "bad_crash", "bad_control", "bad_constant"]
    assert len(certificate.outcomes) == 6
    certificate, new = certify("fake_good", overwrite=True)
    assert new == ["fake_good"]
    assert [outcome.case.name for outcome in certificate.outcomes] == ["fake_good"]


@pytest.mark.parametrize("what", ["source", "case", "versions"])
def test_outcomes_are_not_kept_once_something_changed(quick, certify, monkeypatch, what):
    certify("fake_good")
    assert certify("fake_good")[1] == []
    if what == "source":
        monkeypatch.setattr(run, "source_digest", lambda module: "other")
    elif what == "case":
        changed = fake_family.case("fake_good", tokens=64)
        monkeypatch.setattr(fake_family, "CONTROLS", (changed,))
    else:
        quick.versions = {"jax": "1"}
    assert certify("fake_good")[1] == ["fake_good"]


def test_outcomes_of_older_sources_stay_until_they_are_asked_again(quick, certify, monkeypatch):
    first, _ = certify("fake_good*")
    monkeypatch.setattr(run, "source_digest", lambda module: "other")
    quick.versions = quick.versions | {"xsake": "later"}
    second, new = certify("fake_good")
    assert new == ["fake_good"]
    sources = {outcome.case.name: outcome.source for outcome in second.outcomes}
    old = first.outcomes[0].source
    assert sources == {"fake_good": "other", "fake_good_dkv": old, "fake_good_dq": old}


def test_an_interrupted_run_leaves_what_it_has(quick, certify, tmp_path):
    quick.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        certify("fake_good*")
    (path,) = (tmp_path / "certificates").iterdir()
    assert [outcome.case.name for outcome in record.read_certificate(path).outcomes] == [
        "fake_good"
    ]
    quick.is_interrupted = False
    assert certify("fake_good*")[1] == ["fake_good_dq", "fake_good_dkv"]


def test_the_digest_covers_kernels_and_what_the_family_reads():
    assert run.source_digest("tests.certify.fake_family") == run.source_digest(fake_family.KERNELS)
    assert run.source_digest("xsake.certify.tpu") != run.source_digest(fake_family.KERNELS)


def test_a_worker_that_does_not_start_is_an_error_with_its_last_words(certify, monkeypatch):
    monkeypatch.setattr(fake_family, "process_variables", lambda dump: {"JAX_PLATFORMS": "nothing"})
    with pytest.raises(CertifyError, match="(?s)does not start.*nothing"):
        certify("fake_good")
