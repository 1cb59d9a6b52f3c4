"""Exit codes and messages of errors that end a command."""

import errno

import pytest
import typer

from xsake.cli.errors import exit_codes
from xsake.errors import ArgumentError
from xsake.training.processes import RendezvousError, exit_code

FILES = "Too many files are open: shard-7.bin"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OSError(errno.EMFILE, "Too many open files", "shard-7.bin"), 2, FILES),
        (OSError(errno.ENFILE, "Too many open files", "shard-7.bin"), 2, FILES),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "A file cannot be written"),
        (ArgumentError("wrong", "wrong"), 2, "XSK-102"),
        (RendezvousError("late", "late"), 1, "XSK-"),  # a restart may succeed
    ],
)
def test_errors_have_a_code_and_a_message(error, code, text, capsys):
    with pytest.raises(typer.Exit) as raised, exit_codes():
        raise error
    shown = capsys.readouterr().err
    assert raised.value.exit_code == code and shown.startswith(text)
    assert ("ulimit -n" in shown) == (text == FILES)
    if not isinstance(error, OSError):
        assert exit_code(error) == code
