"""`xsake calibrate` as its user sees it, with a tiny checkpoint on disk."""

import json

import numpy as np
import pytest

from tests.cli import tiny
from xsake.evaluation import read_report
from xsake.hads import Profile, SparsityPlan

PAIRS = 2 * 78  # visible blocks of both heads


@pytest.fixture
def invoke(run, checkpoint, texts, tmp_path):
    """Runs the command; by the policy that needs no gradients unless another is given."""

    def call(*arguments, name="plan.json", policy="kl"):
        always = ["--text", texts, "--context", 96, "-o", tmp_path / name, "--block", tiny.BLOCK]
        return run("calibrate", checkpoint, *always, "--policy", policy, *arguments)

    return call


def test_a_checkpoint_is_calibrated_and_its_plan_evaluated(
    invoke, run, checkpoint, texts, tmp_path
):
    done = invoke("--budget", "60%", "--max-documents", 1, policy="effect")
    assert done.exit_code == 0, done.output
    plan = SparsityPlan.load(tmp_path / "plan.json")
    profile = Profile.load(tmp_path / "plan.profile.json")
    assert plan.calibration.profile == profile.digest
    assert (plan.budget, plan.policy.name, plan.selector.name) == (0.6, "effect", "sampled")
    assert (plan.n, plan.calibration.documents) == (12, 1)
    assert plan.blocks.sum() == round(0.6 * PAIRS)
    assert profile.documents[0].name.startswith("texts.txt#1")
    assert np.isfinite(profile.entropy).all() and profile.entropy.min() > 0
    assert profile.effects["sampled"].shape == profile.curves["sampled"].shape
    assert "2 of 2: texts.txt#1" in done.output and plan.summary in done.output
    assert f"written to {tmp_path / 'plan.json'}" in " ".join(done.output.split())

    out = tmp_path / "evaluation.json"
    flags = "--context", 96, "--no-far-copy", "--max-documents", 1, "-o", out
    done = run("evaluate", checkpoint, "--text", texts, "--plan", tmp_path / "plan.json", *flags)
    assert done.exit_code == 0, done.output
    (result,) = read_report(out).contexts
    assert result.comparison.kl.value > 0
    assert result.comparison.budget == pytest.approx(plan.blocks.sum() / PAIRS)


def test_one_layer_on_the_device_at_a_time_makes_the_same_plan(invoke, tmp_path):
    flags = "--budget", "60%", "--max-documents", 1
    for name, more in (("whole.json", ()), ("streamed.json", ("--stream-layers",))):
        done = invoke(*flags, *more, name=name, policy="effect")
        assert done.exit_code == 0, done.output
    whole, streamed = (SparsityPlan.load(tmp_path / f"{x}.json") for x in ("whole", "streamed"))
    assert (whole.blocks == streamed.blocks).all()
    np.testing.assert_allclose(whole.weights, streamed.weights, rtol=1e-4)


def test_json_is_all_that_is_printed(quick, invoke, tmp_path):
    done = invoke("--budget", "0.6", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((tmp_path / "plan.json").read_text())


def test_ctrl_c_leaves_with_130_and_the_same_command_goes_on(quick, invoke, tmp_path):
    quick.stops_after = 1
    done = invoke("--budget", "60%")
    assert done.exit_code == 130 and "Run the same command without --no-resume" in done.stderr
    assert "1 of 2" in done.output and not (tmp_path / "plan.json").exists()
    done = invoke("--budget", "60%")  # measures one document, which is the one that is missing
    assert done.exit_code == 0 and "1 of 2: earlier runs, cached" in done.output
    whole = SparsityPlan.load(tmp_path / "plan.json")
    quick.stops_after = 0
    done = invoke("--budget", "60%")
    assert done.exit_code == 0 and "2 of 2: earlier runs, cached" in done.output
    assert invoke("--budget", "60%", "--no-resume").exit_code == 130
    quick.stops_after = None
    assert invoke("--budget", "60%", "--no-resume").exit_code == 0
    assert SparsityPlan.load(tmp_path / "plan.json").heads == whole.heads


def test_other_plans_of_the_same_texts_measure_nothing(quick, invoke, tmp_path):
    """Policies with a budget, with settings by name, and one that finds its own budget."""
    assert invoke("--budget", "60%").exit_code == 0
    quick.stops_after = 0
    asked = dict.fromkeys(("uniform", "mass", "static", "original"), ("--budget", "70%"))
    asked |= {"entropy_budget": ("--budget", "70%"), "entropy": (), "top_p": ("--set", "p=0.9")}
    asked["bounded"] = ("--set", "eps=0.05", "--budget", "70%")
    for policy, flags in asked.items():
        done = invoke(*flags, policy=policy)
        assert done.exit_code == 0, done.output
        plan = SparsityPlan.load(tmp_path / "plan.json")
        assert plan.policy.name == policy
        if "--set" in flags:
            name, number = flags[1].split("=")
            assert plan.policy.settings[name] == float(number)
        elif flags:
            assert plan.blocks.sum() == round(0.7 * PAIRS)
        else:
            assert plan.budget == plan.blocks.sum() / PAIRS


def test_texts_that_begin_alike_are_refused(quick, invoke, texts):
    texts.write_text("\n<|endoftext|>\n".join(["the cat sat on the mat. " * 20] * 2))
    done = invoke("--budget", "60%")
    assert done.exit_code == 2 and "duplicate calibration document" in done.stderr


@pytest.mark.slow  # one more calibration
def test_loss_is_measured_against_cost(invoke, run, quick, checkpoint, texts, tmp_path):
    assert invoke("--budget", "60%").exit_code == 0
    rows, picture = tmp_path / "quality.jsonl", tmp_path / "quality.png"
    words = ["bench", "quality", checkpoint, "--text", texts, "--context", 96, "--densities", "80%"]
    words += ["--profile", tmp_path / "plan.profile.json", "--policy", "kl", "-o", rows]
    done = run(*words, "--plot", picture)
    assert done.exit_code == 0, done.output
    plan, window = map(json.loads, rows.read_text().splitlines())
    assert (plan["name"], window["name"]) == ("plan", "window")
    assert plan["effective"] == pytest.approx(0.8) and 0.6 < window["effective"] <= 0.8
    for row in (plan, window):
        compared = row["report"]["contexts"][0]["comparison"]
        assert compared["kl"]["value"] > 0 and 0 < compared["budget"] < row["effective"] + 1e-5
    assert picture.stat().st_size > 1000 and "80.0%" in done.output
