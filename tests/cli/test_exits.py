"""Exit codes and messages of errors that end a command."""

import errno

import pytest
import typer

from xsake.cli.exits import exit_codes
from xsake.errors import ArgumentError
from xsake.training.processes import RendezvousError, exit_code


def ending(error, capsys):
    with pytest.raises(typer.Exit) as raised, exit_codes():
        raise error
    return raised.value.exit_code, capsys.readouterr().err


def test_too_many_open_files_are_named(capsys):
    for number in (errno.EMFILE, errno.ENFILE):
        code, text = ending(OSError(number, "Too many open files", "shard-7.bin"), capsys)
        assert code == 2
        assert text.startswith("Too many files are open: shard-7.bin") and "ulimit -n" in text
        assert "written" not in text
    code, text = ending(OSError(errno.ENOSPC, "No space left on device", "x"), capsys)
    assert code == 2 and text.startswith("A file cannot be written")


def test_an_error_that_a_restart_may_heal_has_another_code(capsys):
    assert ending(ArgumentError("wrong"), capsys)[0] == exit_code(ArgumentError("wrong")) == 2
    assert ending(RendezvousError("late"), capsys)[0] == exit_code(RendezvousError("late")) == 1
