"""The command line in this process, a tiny checkpoint on disk, and texts for it."""

import pytest
from typer.testing import CliRunner

from tests.cli import tiny
from xsake.cli import app
from xsake.model import observer


@pytest.fixture(scope="session")
def run():
    """Runs `xsake` with the given words; gives its output and exit code."""

    def invoke(*words, **options):
        return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160"}, **options)

    return invoke


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny.save_checkpoint(tmp_path_factory.mktemp("models"))


@pytest.fixture
def texts(tmp_path):
    return tiny.save_texts(tmp_path / "texts.txt")


@pytest.fixture
def quick(monkeypatch):
    """A model that measures nothing."""
    reader = type("Reader", (tiny.QuickObserver,), {})
    monkeypatch.setattr(observer, "Observer", reader)
    return reader
