"""Environments: built once, whole or not at all. Nothing is downloaded here."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.certify import fake_family
from tests.certify.sample import ROOT
from xsake.certify import environments
from xsake.certify.record import CertifyError


def test_an_environment_is_built_once_and_works_after_its_move(tmp_path, monkeypatch):
    told = []
    monkeypatch.chdir(tmp_path.parent)  # a relative folder, but a path that works from everywhere
    python = environments.prepare("tiny", (), Path(tmp_path.name), told.append)
    assert python.is_absolute()
    assert environments.prepare("tiny", (), tmp_path, told.append) == python
    assert len(told) == 1
    command = [python, "-c", "import sys; print(sys.prefix != sys.base_prefix, sys.prefix)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["True", str(python.parent.parent)]
    (marker,) = tmp_path.glob("*.json")
    assert json.loads(marker.read_text())["requirements"] == []


def test_a_failed_build_leaves_nothing_and_says_what_pip_said(tmp_path, monkeypatch):
    def venv_only(command, real=environments._call):
        # Making an environment takes seconds and is not what fails here.
        if "venv" in command:
            (python := tmp_path.joinpath(command[-1], "bin", "python")).parent.mkdir()
            python.symlink_to(sys.executable)
        else:
            real([sys.executable, "-c", "import sys; sys.exit('no such package')"])

    monkeypatch.setattr(environments, "_call", venv_only)
    with pytest.raises(CertifyError, match="(?s)XSK-601.*no such package.*network"):
        environments.prepare("bad", ("no-such-thing",), tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_the_running_interpreter_serves_if_it_has_the_packages(tmp_path, monkeypatch):
    def build(*_):
        raise AssertionError("nothing is to be built")

    monkeypatch.setattr(environments, "prepare", build)
    assert str(environments.find_interpreter(fake_family, tmp_path, print)) == sys.executable
    monkeypatch.setattr(fake_family, "PACKAGES", ("jaxlib", "not-there"))
    with pytest.raises(AssertionError, match="built"):
        environments.find_interpreter(fake_family, tmp_path, print)


def test_environments_get_what_the_package_needs():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    beside = tuple(name for name in declared if not name.startswith("jax>"))
    assert beside == environments.DEPENDENCIES
    version = environments.list_requirements(fake_family)[0]
    assert version.startswith("jax==0.")


def test_an_environment_is_built_for_other_requirements_and_if_it_is_unfinished(
    tmp_path, monkeypatch
):
    built = []
    monkeypatch.setattr(environments, "_build", lambda place, _: built.append(place.name))
    for requirement in ("a==1", "a==2", "a==2"):  # the last has a mark, but no Python
        environments.prepare("tiny", (requirement,), tmp_path, lambda _: None)
    one, other, unfinished = built
    assert one != other == unfinished
