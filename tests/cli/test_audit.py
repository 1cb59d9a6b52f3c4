"""`xsake audit` as its user sees it, with a tiny checkpoint on disk."""

import json

import jax.numpy as jnp
import pytest

from tests.cli import tiny
from xsake.cache import Int8Keys
from xsake.evaluation import PageAudit, page_audit


@pytest.fixture
def audit(run, checkpoint, texts, tmp_path):
    def call(*arguments):
        always = "--text", texts, "--context", 320, "--positions", 8, "-o", tmp_path / "a.json"
        return run("audit", checkpoint, *always, *arguments)

    return call


def read(tmp_path):
    return PageAudit.model_validate_json((tmp_path / "a.json").read_text())


def test_a_checkpoint_is_audited_with_one_budget(audit, tmp_path):
    done = audit("--page-budget", "30%", "--eps", "0.2")
    assert done.exit_code == 0, done.output
    report = read(tmp_path)
    assert (report.plan, report.selector, report.eps) == (None, "Int8Keys", 0.2)
    assert report.total.queries == 2 * 8 * 2 and report.total.violations == 0
    assert "2 of 2: 320 tokens, texts.txt#2" in done.output
    assert "queries with at most 0.2" in done.output and "written to" in done.output
    assert "All 32 certificates hold" in done.output


def test_a_plan_is_audited_as_it_decodes(run, checkpoint, texts, audit, tmp_path):
    plan = tmp_path / "plan.json"
    sizes = "--context", 96, "--block", tiny.BLOCK, "--policy", "kl", "--budget", "60%"
    assert run("calibrate", checkpoint, "--text", texts, *sizes, "-o", plan).exit_code == 0
    for flags, selector in ((), "Labels"), (("--selector", "quest"), "Quest"):
        done = audit("--plan", plan, "--page-budget", "0.5", *flags)
        assert done.exit_code == 0, done.output
        report = read(tmp_path)
        assert (report.selector, report.budget) == (selector, 0.5)
        assert report.plan.description and report.plan.description[:20] in done.output


def test_a_violated_certificate_leaves_with_1(audit, monkeypatch, tmp_path):
    no_bound = lambda self, q, *_, **__: jnp.zeros(q.shape[:2])
    monkeypatch.setattr(Int8Keys, "certify", no_bound)
    done = audit("--page-budget", "29%", "--json")
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout) == json.loads((tmp_path / "a.json").read_text())
    report = read(tmp_path)
    assert report.total.violations > 0
    done = audit("--page-budget", "28%")
    assert done.exit_code == 1 and "certificates are violated" in done.output


def test_ctrl_c_and_wrong_options(audit, monkeypatch, tmp_path):
    for flags in ("--page-budget", "0"), ("--eps", "2"), ("--positions", "999"):
        done = audit(*flags)
        assert done.exit_code == 2, done.output

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(page_audit, "measure_document", interrupt)
    done = audit()
    assert done.exit_code == 130 and "No result was saved" in done.stderr
    assert not (tmp_path / "a.json").exists()
