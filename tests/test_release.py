"""A release: the files around the package agree with it and with each other."""

import pathlib
import re
import runpy

import pytest
import yaml

import xsake

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path: pathlib.Path) -> list[dict]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == xsake.__version__
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["message"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_to_a_commit(path):
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_a_person_can_run(path):
    """Scripts of `.ci` and recipes of the justfile; nothing is built by a workflow alone."""
    text = path.read_text()
    recipes = set(re.findall(r"^([a-z][\w-]*)(?: \*\w+)?:", (ROOT / "justfile").read_text(), re.M))
    for script in re.findall(r"\.ci/\w+", text):
        assert (ROOT / script).exists(), script
    for job in yaml.safe_load(text)["jobs"].values():
        for recipe in job.get("strategy", {}).get("matrix", {}).get("recipe", []):
            assert recipe.split()[0] in recipes, recipe


def test_what_an_image_copies_is_sent_to_the_builder():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    copies = re.findall(r"^COPY ((?!--from).*) \S+$", image, re.M)
    wanted = {name.split("/")[0] for line in copies for name in line.split()}
    assert wanted == sent and all((ROOT / name).exists() for name in wanted)


def test_versions_of_the_pages_are_listed_newest_first():
    entries = runpy.run_path(str(ROOT / ".ci" / "switcher.py"))["entries"]
    found = entries(["v0.2.0", "v0.10.0", "v0.9.1", "nightly", "v0.2.0"])
    assert [entry["version"] for entry in found] == ["v0.10.0", "v0.9.1", "v0.2.0"]
    assert [entry["preferred"] for entry in found] == [True, False, False]
