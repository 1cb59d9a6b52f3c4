"""Addresses of object stores: refused by name wherever a path is given, before anything is made."""

import pytest
from typer.testing import CliRunner

from tests.training.test_config import config
from xsake._io import require_local
from xsake.cli import app
from xsake.errors import ArgumentError


@pytest.mark.parametrize("setting", ["checkpoint.folder", "data.folder"])
@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://b", "gs:/bucket/run", "file:///run"])
def test_an_address_in_a_setting_is_refused_by_the_settings_name(setting, address):
    with pytest.raises(ArgumentError, match=rf"{setting}: \w+:// is not supported"):
        config(f'{setting}="{address}"')


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_an_address_of_a_file_of_the_attention_is_refused(name):
    with pytest.raises(ArgumentError, match=rf"attention\.{name}: gs:// is not supported"):
        config('attention.kind="plan"', f'attention.{name}="gs://b/x.json"')


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
