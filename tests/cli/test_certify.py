"""`xsake certify` as its user sees it, with compilers that answer at once."""

import json

import pytest

from tests.certify.sample import sample_certificate
from xsake.certify import run as certification
from xsake.certify.record import CertifyError


@pytest.fixture
def invoke(run):
    return lambda *words: run("certify", *words)


@pytest.fixture
def answers(monkeypatch):
    """Replaces the compilers; returns the plans that were carried out, by target."""
    plans = {}
    certificate = sample_certificate()

    def certify(target, plan, watcher):
        plans[target.name] = plan
        for done, outcome in enumerate(answers.outcomes, start=1):
            watcher.progress(
                certification.CertifyProgress(target.name, done, 2, outcome, True, 1.5, 3.0)
            )
        return certificate, answers.outcomes

    answers = type("Answers", (), {"outcomes": certificate.outcomes, "plans": plans})
    monkeypatch.setattr(certification, "certify", certify)
    return answers


def test_it_shows_progress_and_a_table_and_leaves_with_0(invoke, answers, tmp_path):
    done = invoke("v5e", "--out", tmp_path, "--environments", tmp_path, "--no-resume")
    assert done.exit_code == 0, done.output
    assert "1 of 2: v5e good: compiled ok, 2 s, 3 s remaining" in done.output
    assert "3.0 MiB" in done.output and "not a measurement" in done.output
    plan = answers.plans["v5e"]
    assert (plan.out, plan.environments, plan.overwrite) == (tmp_path, tmp_path, True)
    assert plan.command == "xsake certify v5e --cases smoke --no-resume"


def test_a_control_that_compiles_fails_the_run(invoke, answers):
    control = answers.outcomes[1]
    wrong = control.model_copy(update={"verdict": "compiled", "as_expected": False})
    answers.outcomes = [answers.outcomes[0], wrong]
    done = invoke("v5e")
    assert done.exit_code == 1
    assert "NOT AS EXPECTED" in done.output
    assert "control: compiled, expected refused with 'vmem'" in done.output


def test_targets_default_to_the_smoke_pair_and_to_all(invoke, answers):
    invoke()
    assert list(answers.plans) == ["v5e", "v6e"]
    invoke("--cases", "all")
    assert set(answers.plans) >= {"v4", "v5e", "v5p", "v6e", "tpu7x"}


def test_json_is_all_that_is_printed(invoke, answers):
    done = invoke("v5e", "--json")
    assert [one["case"]["name"] for one in json.loads(done.stdout)["v5e"]] == ["good", "control"]


def test_what_cannot_run_says_why_and_leaves_with_2(invoke, answers, monkeypatch):
    done = invoke("v9")
    assert done.exit_code == 2
    assert "XSK-102" in done.stderr and "v5e" in done.stderr

    def fail(*_):
        raise CertifyError(
            "environment-build", "An environment could not be built.", got="no network"
        )

    monkeypatch.setattr(certification, "certify", fail)
    done = invoke("v5e")
    assert (done.exit_code, "no network" in done.stderr) == (2, True)
