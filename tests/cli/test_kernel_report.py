"""`xsake doctor --kernels` as its user sees it: a short table of cases, and odd implementations."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from xsake.cli import app, kernel_report
from xsake.kernels.block_sparse import api, reference
from xsake.kernels.dispatch import BackendSpec
from xsake.masks import Causal
from xsake.testing.cases import ConformanceCase

TINY = ConformanceCase(
    "tiny", Causal(), block=(8, 8), q_tokens=12, kv_tokens=12, head_dim=8, value_dim=8
)
HALF = dataclasses.replace(TINY, name="tiny_bfloat16", dtype="bfloat16")


class Odd:
    """The reference, but it declines, fails or is wrong in bfloat16."""

    def __init__(self, oddity):
        self._oddity = oddity

    def unsupported_reason(self, inputs, config, platform):
        if self._oddity == "declines" and inputs.q.dtype == jnp.bfloat16:
            return "it has no [bfloat16]"
        return None

    def count_passes(self, inputs, config, platform):
        return reference.count_passes(inputs, config, platform)

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

    def backward(self, inputs, config, platform, *residuals):
        return reference.backward(inputs, config, platform, *residuals)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command over two cases with an odd implementation; gives result and report."""
    monkeypatch.setattr(kernel_report, "CASES", [TINY, HALF])
    kept = tuple(spec for spec in api.OP.backends if spec.name != "xla")  # compiles slowly
    monkeypatch.setattr(api.OP, "backends", kept)
    monkeypatch.chdir(tmp_path)

    def invoke(oddity, *arguments, every=False):
        # Named after its oddity, as what was compiled is remembered by name.
        platforms = ("tpu",) if oddity == "elsewhere" else None
        spec = BackendSpec(oddity, Odd(oddity), platforms, is_on_request=True)
        monkeypatch.setattr(api.OP, "backends", (*kept, spec))
        chosen = [] if every else ["--implementation", oddity]
        command = ["doctor", "--kernels", *chosen, *arguments]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
        files = list(tmp_path.glob("*.json"))
        return result, json.loads(files[0].read_text()) if files else None

    return invoke


def test_what_is_right_passes_and_the_report_says_with_what(run):
    result, report = run("nothing", every=True)
    assert result.exit_code == 0, result.output
    assert "xsake-kernels-cpu.json" in result.output
    assert "4 of 4" in result.output
    assert report["schema_version"] == kernel_report.SCHEMA_VERSION
    assert report["complete"] and report["healthy"] and report["running"] is None
    assert report["summary"]["reference"] == {"passed": 2, "failed": 0, "declined": 0}
    assert (report["platform"], report["device_kind"]) == ("cpu", "cpu")
    assert {"jax", "jaxlib", "numpy", "python"} <= report["versions"].keys()
    assert len(report["source"]) == 16
    assert report["made_at"] and report["host_processor"] and "commit" in report
    row = report["rows"][0]
    assert [array["array"] for array in row["arrays"]] == ["out", "lse", "d_q", "d_k", "d_v"]
    assert all(0 <= array["allowance_used"] <= 1 for array in row["arrays"])


def test_a_wrong_result_fails_with_its_numbers(run):
    result, report = run("wrong")
    assert result.exit_code == 1
    assert "wrong tiny_bfloat16: out: max error" in result.output
    assert report["complete"] and not report["healthy"]
    assert [row["verdict"] for row in report["rows"]] == ["passed", "failed"]
    assert report["rows"][1]["arrays"][0]["allowance_used"] > 1


def test_nan_fails_and_is_valid_json(run):
    result, report = run("nan")
    assert result.exit_code == 1
    assert "non-finite" in report["rows"][1]["words"]
    assert report["rows"][1]["arrays"][0]["max_error"] is None


def test_an_error_is_a_failure_with_its_words_and_the_run_goes_on(run):
    result, report = run("breaks", every=True)
    assert result.exit_code == 1
    assert "RuntimeError: the compiler [gave up]" in result.output
    assert "long story" not in result.output
    assert "and a long story" in [row["words"] for row in report["rows"] if row["words"]][0]
    assert report["complete"]


def test_what_is_declined_is_listed_with_its_reason_and_fails_nothing(run):
    result, report = run("declines")
    assert result.exit_code == 0, result.output
    assert "declines declined 1: it has no [bfloat16] (tiny_bfloat16)" in result.output
    assert report["rows"][1]["verdict"] == "declined"
    assert report["rows"][1]["words"] == "it has no [bfloat16]"


def test_declining_everything_is_no_success(run, monkeypatch):
    monkeypatch.setattr(kernel_report, "CASES", [HALF])
    result, report = run("declines")
    assert result.exit_code == 1
    assert not report["healthy"]


def test_ctrl_c_keeps_what_is_done(run):
    result, report = run("interrupts", "--report", "mine.json")
    assert result.exit_code == kernel_report.INTERRUPTED
    assert "Interrupted after 1 of 2" in result.output
    assert not report["complete"]
    assert [row["case"] for row in report["rows"]] == ["tiny"]
    assert report["running"] == ["interrupts", "tiny_bfloat16"]


def test_the_report_is_written_before_every_case(run, monkeypatch, tmp_path):
    seen = []

    def look(name, case):
        found = json.loads((tmp_path / "xsake-kernels-cpu.json").read_text())
        seen.append((found["running"], len(found["rows"]), found["complete"]))
        return kernel_report.ConformanceRow(name, case.name, case.dtype, "passed", None, 0.0)

    monkeypatch.setattr(kernel_report, "_run_case", look)
    run("nothing")
    assert seen == [(["nothing", "tiny"], 0, False), (["nothing", "tiny_bfloat16"], 1, False)]


@pytest.mark.parametrize(
    ("more", "why"), [((), "tpu only"), (("--implementation", "x"), "unknown name")]
)
def test_what_cannot_run_here_is_an_error_with_the_reason(run, more, why):
    result, report = run("elsewhere", *more)
    assert result.exit_code == kernel_report.CANNOT_RUN
    assert why in result.output
    assert report is None


def test_what_cannot_run_here_is_named_beside_what_can(run):
    result, report = run("elsewhere", every=True)
    assert result.exit_code == 0
    assert "elsewhere cannot run here: it runs on tpu only" in result.output
    assert "elsewhere" not in report["summary"]


def test_a_report_that_cannot_be_written_is_an_error_before_the_first_case(run, tmp_path):
    result, _ = run("nothing", "--report", str(tmp_path / "missing" / "report.json"))
    assert result.exit_code == kernel_report.CANNOT_RUN
    assert "Cannot write the report" in result.output


def test_json_is_the_report_and_nothing_else(run):
    result, report = run("wrong", "--json")
    assert json.loads(result.stdout) == report


def test_its_options_alone_are_refused():
    result = CliRunner().invoke(app, ["doctor", "--implementation", "reference"])
    assert result.exit_code == 2


def test_plain_doctor_imports_no_oracle():
    code = "import sys, xsake.cli\nassert 'xsake.testing' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
