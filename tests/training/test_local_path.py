"""Addresses of object stores: refused by name wherever a path is given, before anything is made."""

import pytest
from typer.testing import CliRunner

from tests.training.test_config import config
from xsake._io import require_local
from xsake.cli import app
from xsake.errors import ArgumentError


@pytest.mark.parametrize(
    "name", ["checkpoint.folder", "data.folder", "attention.plan", "attention.profile"]
)
@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://b", "gs:/bucket/run", "file:///run"])
def test_an_address_in_a_setting_is_refused_by_the_settings_name(name, address):
    with pytest.raises(ArgumentError, match=rf"{name}: \w+:// is not supported"):
        config('attention.kind="plan"', f'{name}="{address}"')


@pytest.mark.parametrize("path", ["run", "/runs/gs:/x", "c:/run", "a b/c:d", "-rf", "..hidden"])
def test_a_path_of_this_machine_is_accepted(path):
    require_local(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "gs://b/run.toml"],
        ["data", "build", "--text", "a.txt", "-o", "gs://b/data", "--train-tokenizer", "300"],
        ["data", "build", "--text", "s3://b/a.txt", "-o", "data", "--train-tokenizer", "300"],
        ["data", "show", "gs://b/data"],
        ["export", "gs://b/run", "-o", "model"],
        ["export", "run", "-o", "gs://b/model"],
        ["serve", "runs", "gs://b/runs"],
    ],
)
def test_an_address_on_the_command_line_is_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert ":// is not supported" in found.output
    assert not list(tmp_path.iterdir())
