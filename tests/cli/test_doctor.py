"""`xsake doctor` as its user sees it."""

import json
import subprocess
import sys

import jax
import pytest
from typer.testing import CliRunner

import xsake
from xsake.cli import app, doctor
from xsake.errors import UnsupportedError

SELF_TEST = doctor.SelfTest("xla", max_error=1e-7, seconds=0.5, problem=None)
REPORT = doctor.DoctorReport(
    versions={"xsake": "0.1.0", "jax": "0.12", "flax": None},
    backend="cpu",
    devices=["TFRT_CPU_0 (cpu)"],
    implementations={"xla": None, "mosaic_tpu": "needs a TPU; this is [cpu]"},
    compilation_cache=doctor.CompilationCache(directory=None, writable=None),
    self_tests=[SELF_TEST],
)


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


@pytest.fixture
def report(monkeypatch):
    """Replaces what doctor finds, so that printing is tested without computing."""

    def replace(**changes):
        changed = REPORT.__class__(**{**vars(REPORT), **changes})
        monkeypatch.setattr(doctor, "collect_report", lambda: changed)

    return replace


def test_a_healthy_machine_passes_its_self_test():
    found = doctor.collect_report()
    assert found.healthy, found.self_tests
    assert {test.implementation for test in found.self_tests} >= {"reference", "xla"}
    assert found.versions["xsake"] == xsake.__version__
    assert found.versions["jax"] == jax.__version__
    assert found.backend == jax.default_backend()


def test_json_is_one_object_and_nothing_else():
    command = [sys.executable, "-c", "from xsake.cli import app; app()", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["healthy"] is True
    assert printed["implementations"]["xla"] is None
    assert printed["compilation_cache"] == {"directory": None, "writable": None}


def test_the_table_names_what_cannot_run_and_why(report):
    report()
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "needs a TPU; this is [cpu]" in result.output
    assert "flax" in result.output
    assert "self-test passed" in result.output
    assert len(result.output.splitlines()) < 24


def test_a_failed_self_test_is_shown_and_ends_with_exit_code_1(report):
    report(self_tests=[doctor.SelfTest("xla", 0.3, 0.5, "differs from the reference")])
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "self-test failed: differs" in result.output


@pytest.fixture
def replace_attention(monkeypatch):
    """Puts another function in the place of attention, and forgets what was compiled with it."""

    def replace(function):
        monkeypatch.setattr(xsake, "attention", function)
        doctor._forward_and_gradients.clear_cache()

    yield replace
    doctor._forward_and_gradients.clear_cache()


def test_a_wrong_implementation_is_found(replace_attention):
    def wrong(q, k, v, *, mask, implementation):
        return q + (implementation == "xla") * 1e-3

    replace_attention(wrong)
    reference, xla = doctor._self_tests(["reference", "xla"])
    assert reference.problem is None
    assert xla.problem is not None and "away from the reference" in xla.problem


def test_an_implementation_that_raises_is_reported(replace_attention):
    def picky(q, k, v, *, mask, implementation):
        if implementation == "xla":
            raise UnsupportedError("not today")
        return q

    replace_attention(picky)
    (test,) = doctor._self_tests(["xla"])
    assert test.problem is not None and "not today" in test.problem


def test_nan_is_a_failure_and_never_reaches_json(replace_attention):
    replace_attention(lambda q, k, v, **_: q * float("nan"))
    (test,) = doctor._self_tests(["xla"])
    assert test.problem == "NaN or infinity in the results"
    assert test.max_error is None


def test_a_machine_where_nothing_runs_is_not_healthy(report):
    report(implementations={"xla": "no device"}, self_tests=[])
    assert invoke("doctor").exit_code == 1


def test_a_cache_below_a_missing_directory_is_judged_by_its_parent(tmp_path):
    wanted = tmp_path / "not" / "there"
    jax.config.update("jax_compilation_cache_dir", str(wanted))
    try:
        assert doctor._compilation_cache() == doctor.CompilationCache(str(wanted), writable=True)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert not (tmp_path / "not").exists()


def test_version_is_the_package_version():
    assert invoke("--version").output.strip() == xsake.__version__
