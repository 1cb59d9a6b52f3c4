"""What `--help` shows is what was written."""

from typing import Any

import pytest
import typer

from xsake.cli import app


def _commands(command: Any, name: str = "xsake"):
    yield pytest.param(command, id=name)
    for part, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {part}")


@pytest.mark.parametrize("command", list(_commands(typer.main.get_command(app))))
def test_no_words_that_look_like_tags(command: Any) -> None:
    """They would not be shown: `<plan>.json` becomes `.json`."""
    texts = [command.help or "", *(getattr(x, "help", None) or "" for x in command.params)]
    assert not [text for text in texts if "<" in text]
