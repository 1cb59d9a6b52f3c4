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


def test_images_are_named_by_digest():
    digest = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
    stages = re.findall(
        r"^FROM (\S+) AS (\w+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.M
    )
    names = [name for _, name in stages]
    outside = [image for image, _ in stages if image not in names]
    services = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
    outside += [service["image"] for service in services.values() if "build" not in service]
    assert outside and all(digest.fullmatch(image) for image in outside), outside


@pytest.mark.parametrize("path", [".ci/jax_range", ".ci/release", "deploy/Dockerfile"])
def test_a_wheel_is_built_by_the_locked_backend(path):
    builds = re.findall(r"^.*\buv\"? build .*$", (ROOT / path).read_text(), re.M)
    assert builds
    for line in builds:
        assert "--build-constraint requirements/build.txt --require-hashes" in line, line
    locked = (ROOT / "requirements" / "build.txt").read_text()
    assert re.search(r"^hatchling==\S+ \\$\n +--hash=sha256:[0-9a-f]{64}", locked, re.M)


def test_every_file_of_a_release_is_attested_before_it_is_published():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    (attest,) = [
        step
        for step in jobs["attest"]["steps"]
        if step["uses"].startswith("actions/attest-build-provenance@")
    ]
    assert attest["with"]["subject-path"] == "dist/*"
    assert "attest" in jobs["publish"]["needs"]


def test_everything_that_is_pinned_is_updated_and_audited():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    folders = {update["package-ecosystem"]: update["directory"] for update in updates}
    assert folders.keys() == {"docker", "docker-compose", "github-actions", "npm", "pip"}
    assert all((ROOT / folder.strip("/")).is_dir() for folder in folders.values())
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert "just audit" in nightly and re.search(r"^audit:$", (ROOT / "justfile").read_text(), re.M)


def test_versions_of_the_pages_are_listed_newest_first():
    entries = runpy.run_path(str(ROOT / ".ci" / "switcher.py"))["entries"]
    found = entries(["v0.2.0", "v0.10.0", "v0.9.1", "nightly", "v0.2.0"])
    assert [entry["version"] for entry in found] == ["v0.10.0", "v0.9.1", "v0.2.0"]
    assert [entry["preferred"] for entry in found] == [True, False, False]


def test_every_supported_minor_version_of_jax_has_a_lock_and_a_row():
    """The range in pyproject.toml, the locks, the recipe that makes them and the table agree."""
    project = (ROOT / "pyproject.toml").read_text()
    first, end = map(int, re.search(r'"jax>=0\.(\d+),<0\.(\d+)"', project).groups())
    names = [f"0.{minor}" for minor in range(first, end)]
    locks = {path.stem.removeprefix("jax_"): path for path in ROOT.glob("requirements/jax_*.txt")}
    assert locks.keys() == set(names)
    assert f"for minor in {' '.join(names)};" in (ROOT / "justfile").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    for name, path in locks.items():
        (release,) = re.findall(rf"^jax==({name}(?:\.\d+)+) \\$", path.read_text(), re.M)
        assert re.search(rf"^\| {release} \| runs \| \d+ passed \|", page, re.M), release
    developed = re.search(r"^jax==\S+", (ROOT / "requirements" / "dev.txt").read_text(), re.M)
    assert developed.group() in locks[names[-1]].read_text()
