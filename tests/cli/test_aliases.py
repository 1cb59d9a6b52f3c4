"""Old names of options and commands still work, and --help does not show them."""

import pytest
import typer
from typer.testing import CliRunner

from xsake.cli import app
from xsake.cli.aliases import RENAMED_OPTIONS

FLAGS = {"--check", "--fresh"}
POSITIONAL = {
    "bench quality": 1, "bench training": 1, "calibrate": 1, "evaluate": 1, "launch": 1,
    "plan validate": 2, "report": 1, "train": 1,
}  # fmt: skip
COMMANDS = {
    "--budgets": (
        "bench attention", "bench backward", "bench memory", "bench quality", "bench tune",
    ),
    "--check": ("train",),
    "--clients": ("serve",),
    "--documents": ("bench quality", "calibrate", "evaluate", "plan validate"),
    "--fresh": ("calibrate", "certify", "data build", "evaluate"),
    "--healthy-seconds": ("launch",),
    "--ladder": ("report",),
    "--most-restarts": ("launch",),
    "--rounds": (
        "bench attention", "bench backward", "bench decode", "bench growth", "bench training",
        "bench tune",
    ),
    "--threads": (
        "bench attention", "bench backward", "bench decode", "bench growth", "bench training",
        "bench tune",
    ),
}  # fmt: skip


def _parse(path: str, *arguments: str) -> dict:
    command = typer.main.get_command(app)
    for name in path.split():
        command = command.commands[name]
    values = [*arguments, *["x"] * POSITIONAL.get(path, 0)]
    return command.make_context(path, values, resilient_parsing=True).params


@pytest.mark.parametrize(
    ("old", "path"), [(old, path) for old, paths in COMMANDS.items() for path in paths]
)
def test_an_old_option_is_the_new_one_and_hidden(old: str, path: str) -> None:
    value = [] if old in FLAGS else ["7"]
    parsed = _parse(path, old, *value)
    assert parsed == _parse(path, RENAMED_OPTIONS[old], *value) != _parse(path)
    shown = CliRunner().invoke(app, [*path.split(), "--help"], env={"COLUMNS": "200"}).output
    assert RENAMED_OPTIONS[old] in shown and f"{old} " not in shown


def test_every_renamed_option_is_tested() -> None:
    assert COMMANDS.keys() == RENAMED_OPTIONS.keys()


@pytest.mark.parametrize(("group", "old", "new"), [("plan", "check", "validate"),
                                                   ("profile", "open", "show")])  # fmt: skip
def test_an_old_command_is_the_new_one_and_hidden(group: str, old: str, new: str) -> None:
    commands = typer.main.get_command(app).commands[group].commands
    assert commands[old].callback.__wrapped__ is commands[new].callback.__wrapped__
    assert commands[old].hidden and not commands[new].hidden
    assert f"│ {old} " not in CliRunner().invoke(app, [group, "--help"]).output
