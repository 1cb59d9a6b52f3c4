"""Old names of options and commands still work, --help does not show them, and shows the rest."""

from typing import Any

import pytest
import typer

from xsake.cli import app
from xsake.cli.options import RENAMED_OPTIONS

FLAGS = {"--check", "--fresh"}
POSITIONAL = {
    "bench quality": 1, "bench training": 1, "calibrate": 1, "evaluate": 1, "launch": 1,
    "plan validate": 2, "report": 1, "train": 1,
}  # fmt: skip
TIMED = tuple(
    f"bench {x}" for x in ("attention", "backward", "decode", "growth", "training", "tune")
)
COMMANDS = {
    "--budgets": tuple(
        f"bench {x}" for x in ("attention", "backward", "memory", "quality", "tune")
    ),
    "--check": ("train",),
    "--clients": ("serve",),
    "--documents": ("bench quality", "calibrate", "evaluate", "plan validate"),
    "--fresh": ("calibrate", "certify", "data build", "evaluate"),
    "--healthy-seconds": ("launch",),
    "--ladder": ("report",),
    "--most-restarts": ("launch",),
    "--rounds": TIMED,
    "--threads": TIMED,
}
PAIRS = [(old, path) for old, paths in COMMANDS.items() for path in paths]


def _parse(path: str, *arguments: str) -> dict:
    command = typer.main.get_command(app)
    for name in path.split():
        command = command.commands[name]
    values = [*arguments, *["x"] * POSITIONAL.get(path, 0)]
    return command.make_context(path, values, resilient_parsing=True).params


@pytest.mark.parametrize(("old", "path"), PAIRS)
def test_an_old_option_is_the_new_one_and_hidden(run, old: str, path: str) -> None:
    value = [] if old in FLAGS else ["7"]
    parsed = _parse(path, old, *value)
    assert parsed == _parse(path, RENAMED_OPTIONS[old], *value) != _parse(path)
    shown = run(*path.split(), "--help").output
    assert RENAMED_OPTIONS[old] in shown and f"{old} " not in shown


def test_every_renamed_option_is_tested() -> None:
    assert COMMANDS.keys() == RENAMED_OPTIONS.keys()


@pytest.mark.parametrize(("group", "old", "new"), [("plan", "check", "validate"),
                                                   ("profile", "open", "show")])  # fmt: skip
def test_an_old_command_is_the_new_one_and_hidden(run, group: str, old: str, new: str) -> None:
    commands = typer.main.get_command(app).commands[group].commands
    assert commands[old].callback.__wrapped__ is commands[new].callback.__wrapped__
    assert commands[old].hidden and not commands[new].hidden
    assert f"│ {old} " not in run(group, "--help").output


def _commands(command: Any, name: str = "xsake"):
    yield pytest.param(command, id=name)
    for part, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {part}")


@pytest.mark.parametrize("command", list(_commands(typer.main.get_command(app))))
def test_help_has_no_words_that_look_like_tags(command: Any) -> None:
    """They would not be shown: `<plan>.json` becomes `.json`."""
    texts = [command.help or "", *(getattr(x, "help", None) or "" for x in command.params)]
    assert not [text for text in texts if "<" in text]
