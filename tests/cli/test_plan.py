"""`xsake plan` as its user sees it: shown, compared, and checked on other texts."""

import json

import pytest

from tests.cli import tiny
from tests.hads.sample import POOLED, profile
from xsake.hads import Profile, SparsityPlan, drift
from xsake.hads.policies import KL, Static, Uniform


@pytest.fixture
def plan(run, checkpoint, texts, tmp_path):
    out = tmp_path / "plan.json"
    sizes = "--context", 96, "--block", tiny.BLOCK, "--policy", "kl", "--budget", "60%"
    done = run("calibrate", checkpoint, "--text", texts, *sizes, "-o", out)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture
def check(run, checkpoint, texts):
    return lambda plan, *flags: run("plan", "validate", plan, checkpoint, "--text", texts, *flags)


def saved(path, policy, **options):
    SparsityPlan.of(profile(n=12), policy, 0.6, **options).save(path)
    return path


def test_plans_are_shown_and_compared(run, tmp_path):
    old = saved(tmp_path / "old.json", Uniform(), selector=POOLED)
    new = saved(tmp_path / "new.json", KL(), selector=POOLED)
    done = run("plan", "show", new)
    assert done.exit_code == 0
    assert done.output == str(SparsityPlan.load(new)) + "\n" and "densest heads" in done.output
    done = run("plan", "diff", old, new)
    assert done.exit_code == 0 and "policy.name: uniform -> kl" in done.output
    assert run("plan", "diff", old, old).output == "no difference\n"


def test_a_plan_fits_the_texts_it_was_calibrated_on(plan, check, tmp_path):
    """The real model: what is read again is what was promised."""
    done = check(plan)
    assert done.exit_code == 0, done.output
    promised = drift.calibrated_loss(
        SparsityPlan.load(plan), Profile.load(tmp_path / "plan.profile.json")
    ).mean()
    assert "2 of 2: texts.txt#2" in done.output
    sentence = f"mean KL {promised:.4f} nats on 2 documents, {promised:.4f} calibrated"
    assert f"The plan still fits: {sentence}; 0 of 2 heads drifted." in done.output
    assert "exceeds 2 times the calibrated KL and is 0.1 nats larger" in done.output
    assert "at most 1.5 times" in done.output and "at most 5% of the heads" in done.output


def test_a_plan_that_does_not_fit_leaves_with_1(quick, plan, check):
    quick.far = True
    done = check(plan, "--max-documents", 1)
    assert done.exit_code == 1, done.output
    assert "The plan does not fit: mean KL" in done.output and "on 1 document," in done.output
    assert "2 of 2 heads drifted: L0H" in done.output
    done = check(plan, "--json")  # which is all that is printed
    assert done.exit_code == 1
    verdict = json.loads(done.stdout)
    assert verdict["fits"] is False and verdict["documents"] == 2 and verdict["notes"] == []
    assert verdict["mean_kl"] > 1.5 * verdict["promised_mean_kl"] > 0
    assert verdict["limits"]["head_nats"] == 0.1


def test_other_differences_are_listed_and_the_profile_may_lie_elsewhere(
    quick, plan, check, tmp_path
):
    changed = json.loads(plan.read_text())
    changed["model"]["digest"] = "another"
    plan.write_text(json.dumps(changed))
    elsewhere = (tmp_path / "plan.profile.json").rename(tmp_path / "moved.json")
    done = check(plan)
    assert done.exit_code == 2 and "set --profile" in done.stderr
    done = check(plan, "--context", 128, "--profile", elsewhere)
    assert done.exit_code in (0, 1), done.output
    assert "Context: 128 tokens; calibrated with 96." in done.output
    assert "The model's files differ from the calibrated ones." in done.output


def test_ctrl_c_leaves_with_130(quick, plan, check):
    quick.stops_after = 0
    done = check(plan)
    assert done.exit_code == 130 and "No result was saved" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--context", "5000"), "at least 5000 tokens"),
        (("--context", "24"), "too short for block selection"),
        (("--profile", "none.json"), "none.json"),
    ],
)
def test_what_cannot_run_says_why_and_leaves_with_2(quick, plan, check, flags, words):
    done = check(plan, *flags)
    assert done.exit_code == 2 and words in done.stderr, done.output


def test_plans_of_other_models_and_static_ones_cannot_be_checked(check, tmp_path):
    profile(n=12).save(tmp_path / "plan.profile.json")
    done = check(saved(tmp_path / "plan.json", KL(), selector=POOLED), "--context", 96)
    assert done.exit_code == 2 and "belongs to another model" in done.stderr, done.output
    done = check(saved(tmp_path / "plan.json", Static()))
    assert done.exit_code == 2 and "xsake evaluate --plan" in done.stderr, done.output


@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_plan_cannot_command_the_terminal(run, tmp_path, command):
    mine = saved(tmp_path / "mine.json", Uniform(), selector=POOLED)
    plan = json.loads(mine.read_text())
    plan["calibration"]["environment"]["cpu"] = "\x1b]0;pwned\x07\x9b2J"
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(plan))
    done = run("plan", command, *([mine] if command == "diff" else []), theirs)
    assert done.exit_code == 0, done.output
    assert not set("\x1b\x07\x9b") & set(done.output)
    if command == "diff":
        assert "\\u001b]0;pwned" in done.output
