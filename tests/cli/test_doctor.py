"""`xsake doctor` as its user sees it, and --kernels with few cases and odd implementations."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import xsake
from tests.lanes import slow
from xsake.cli import doctor
from xsake.errors import UnsupportedError
from xsake.kernels.block_sparse import api, reference
from xsake.kernels.dispatch import BackendSpec
from xsake.masks import Causal
from xsake.testing import report as conformance
from xsake.testing.cases import ConformanceCase

PASSED = doctor.SelfTest("xla", max_error=1e-7, seconds=0.5, problem=None)._asdict()
REPORT = {
    "healthy": True,
    "versions": {"xsake": "0.1.0", "jax": "0.12", "flax": None},
    "backend": "cpu",
    "devices": ["TFRT_CPU_0 (cpu)"],
    "implementations": {"xla": None, "mosaic_tpu": "needs a TPU; this is [cpu]"},
    "libraries": {},
    "compilation_cache": {"directory": None, "writable": None},
    "self_tests": [PASSED],
}


def test_a_healthy_machine_passes_its_self_test_and_json_is_one_object(run):
    done = run("doctor", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["healthy"] is True
    assert printed["implementations"]["xla"] is None
    assert printed["compilation_cache"] == {"directory": None, "writable": None}
    assert {test["implementation"] for test in printed["self_tests"]} >= {"reference", "xla"}
    assert printed["versions"]["xsake"] == xsake.__version__
    assert printed["versions"]["jax"] == jax.__version__


WRONG = PASSED | {"max_error": 0.3, "problem": "differs from the reference"}


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({}, 0, "self-test passed"),
        ({"libraries": {"xla": "a-library 0.1, avx2"}}, 0, "a-library 0.1, avx2"),
        ({"healthy": False, "self_tests": [WRONG]}, 1, "self-test failed: differs"),
        ({"healthy": False, "self_tests": []}, 1, "cannot run here"),
    ],
)
def test_the_table_names_what_cannot_run_and_why(run, monkeypatch, changes, code, text):
    monkeypatch.setattr(doctor, "collect_report", lambda: REPORT | changes)
    result = run("doctor")
    assert result.exit_code == code
    assert all(x in result.output for x in (text, "needs a TPU; this is [cpu]", "flax"))
    assert len(result.output.splitlines()) < 24


@pytest.mark.parametrize("tests", [[], [doctor.SelfTest(**WRONG)]])
def test_a_machine_where_nothing_runs_or_is_right_is_not_healthy(monkeypatch, tests):
    monkeypatch.setattr(doctor, "run_self_tests", lambda names: tests)
    assert doctor.collect_report()["healthy"] is False


def _wrong(q, k, v, *, mask, implementation):
    return q + (implementation == "xla") * 1e-3


def _raising(q, k, v, *, mask, implementation):
    if implementation == "xla":
        raise UnsupportedError("never", "not today")
    return q


@pytest.mark.parametrize(
    ("attention", "problem"),
    [
        (_wrong, "away from the reference"),
        (_raising, "not today"),
        (lambda q, k, v, **_: q * float("nan"), "NaN or infinity in the results"),
    ],
)
def test_a_wrong_implementation_is_found(monkeypatch, attention, problem):
    monkeypatch.setattr(xsake, "attention", attention)
    doctor.forward_and_gradients.clear_cache()
    (test,) = doctor.run_self_tests(["xla"])
    doctor.forward_and_gradients.clear_cache()
    assert problem in test.problem
    assert test.max_error is None or attention is _wrong  # NaN never reaches JSON


def test_a_cache_below_a_missing_directory_is_judged_by_its_parent(tmp_path):
    folder = tmp_path / "not" / "there"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        found = doctor.find_compilation_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert found == {"directory": str(folder), "writable": True}
    assert not (tmp_path / "not").exists()


def test_version_is_the_package_version_and_options_of_kernels_need_it(run):
    assert run("--version").output.strip() == xsake.__version__
    assert run("doctor", "--implementation", "reference").exit_code == 2


TINY = ConformanceCase(
    "tiny", Causal(), block=(8, 8), q_tokens=12, kv_tokens=12, head_dim=8, value_dim=8
)
HALF = dataclasses.replace(TINY, name="tiny_bfloat16", dtype="bfloat16")


class Odd:
    """The reference, but it declines, fails or is wrong in bfloat16."""

    count_passes = staticmethod(reference.count_passes)
    backward = staticmethod(reference.backward)

    def __init__(self, oddity):
        self._oddity = oddity

    def unsupported_reason(self, inputs, config, platform):
        declines = self._oddity == "declines" and inputs.q.dtype == jnp.bfloat16
        return "it has no [bfloat16]" if declines else None

    def forward(self, inputs, config, platform):
        out, lse = reference.forward(inputs, config, platform)
        if inputs.q.dtype == jnp.bfloat16:
            if self._oddity == "interrupts":
                raise KeyboardInterrupt
            if self._oddity == "breaks":
                raise RuntimeError("the compiler [gave up]\nand a long story")
            wrong = {"wrong": 0.5, "nan": jnp.nan}.get(self._oddity, 0)
            out = out + jnp.asarray(wrong, out.dtype)
        return out, lse


@pytest.fixture
def kernels(run, monkeypatch, tmp_path):
    """Runs the suite over two cases with an odd implementation; gives result and report."""
    monkeypatch.setattr(conformance, "CASES", [TINY, HALF])
    # `xla` compiles slowly, and `native_cpu` is not installed everywhere.
    kept = tuple(spec for spec in api.OP.backends if spec.name not in ("xla", "native_cpu"))
    monkeypatch.chdir(tmp_path)

    def invoke(oddity, *arguments, every=False):
        # Named after its oddity, as what was compiled is remembered by name.
        platforms = ("tpu",) if oddity == "elsewhere" else None
        spec = BackendSpec(oddity, Odd(oddity), platforms, is_on_request=True)
        monkeypatch.setattr(api.OP, "backends", (*kept, spec))
        chosen = [] if every else ["--implementation", oddity]
        result = run("doctor", "--kernels", *chosen, *arguments)
        files = list(tmp_path.glob("*.json"))
        return result, json.loads(files[0].read_text()) if files else None

    return invoke


def test_what_is_right_passes_and_the_report_says_with_what(kernels):
    result, report = kernels("nothing", every=True)
    assert result.exit_code == 0, result.output
    hidden = "cannot run here: it runs on tpu only"
    assert hidden in result.output and "mosaic_tpu" not in report["summary"]
    assert "xsake-kernels-cpu.json" in result.output and "4 of 4" in result.output
    assert report["schema_version"] == 1
    assert report["complete"] and report["healthy"] and report["running"] is None
    assert report["summary"]["reference"] == {"passed": 2, "failed": 0, "declined": 0}
    assert (report["platform"], report["device_kind"]) == ("cpu", "cpu")
    assert {"jax", "jaxlib", "numpy", "python"} <= report["versions"].keys()
    assert len(report["source"]) == 16
    assert report["made_at"] and report["host_processor"] and "commit" in report
    row = report["rows"][0]
    assert [array["array"] for array in row["arrays"]] == ["out", "lse", "d_q", "d_k", "d_v"]
    assert all(0 <= array["allowance_used"] <= 1 for array in row["arrays"])


@pytest.mark.parametrize(
    ("oddity", "code", "verdict", "words", "shown"),
    [
        ("wrong", 1, "failed", "max error", "wrong tiny_bfloat16: out: max error"),
        slow("nan", 1, "failed", "non-finite", "nan tiny_bfloat16: "),
        slow("breaks", 1, "failed", "and a long story", "RuntimeError: the compiler [gave up]"),
        slow("declines", 0, "declined", "it has no [bfloat16]",
             "declines declined 1: it has no [bfloat16] (tiny_bfloat16)"),
    ],
)  # fmt: skip
def test_failures_and_declined_cases_have_reasons_and_the_run_goes_on(
    kernels, oddity, code, verdict, words, shown
):
    result, report = kernels(oddity, every=True)
    assert result.exit_code == code, result.output
    assert shown in result.output and "long story" not in result.output
    assert report["complete"] and report["healthy"] == (code == 0)
    row = report["rows"][-1]
    assert (row["verdict"], words in row["words"]) == (verdict, True)
    if oddity == "wrong":
        assert row["arrays"][0]["allowance_used"] > 1
    if oddity == "nan":
        assert row["arrays"][0]["max_error"] is None
    assert json.loads(kernels(oddity, "--json")[0].stdout)["asked"] == [oddity]


def test_declining_everything_is_no_success(kernels, monkeypatch):
    monkeypatch.setattr(conformance, "CASES", [HALF])
    result, report = kernels("declines")
    assert result.exit_code == 1 and not report["healthy"]


def test_ctrl_c_keeps_what_is_done(kernels):
    result, report = kernels("interrupts", "--report", "mine.json")
    assert result.exit_code == 130
    assert "Interrupted after 1 of 2" in result.output
    assert not report["complete"]
    assert [row["case"] for row in report["rows"]] == ["tiny"]
    assert report["running"] == ["interrupts", "tiny_bfloat16"]


def test_the_report_is_written_before_every_case(kernels, monkeypatch, tmp_path):
    seen = []

    def look(attention, name, case):
        found = json.loads((tmp_path / "xsake-kernels-cpu.json").read_text())
        seen.append((found["running"], len(found["rows"]), found["complete"]))
        return conformance.ConformanceRow(name, case.name, case.dtype, "passed", None, 0.0)

    monkeypatch.setattr(conformance, "run_case", look)
    kernels("nothing")
    assert seen == [(["nothing", "tiny"], 0, False), (["nothing", "tiny_bfloat16"], 1, False)]


@pytest.mark.parametrize(
    ("oddity", "more", "why"),
    [
        ("elsewhere", (), "tpu only"),
        ("elsewhere", ("--implementation", "x"), "unknown name"),
        ("nothing", ("--report", "missing/report.json"), "Cannot write the report"),
    ],
)
def test_what_cannot_run_here_is_an_error_with_the_reason(kernels, oddity, more, why):
    result, report = kernels(oddity, *more)
    assert result.exit_code == 2 and why in result.output and report is None
