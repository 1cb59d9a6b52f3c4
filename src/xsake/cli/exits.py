"""What went wrong, as a message on stderr and an exit code; the same for every long command."""

import contextlib
import errno
import resource
from collections.abc import Iterator

import typer

from xsake.cli.screen import echo
from xsake.errors import XsakeError

FAILED, CANNOT_RUN, INTERRUPTED = 1, 2, 130  # exit codes
GOES_ON = "Interrupted. The same command, without --fresh, goes on from here."


@contextlib.contextmanager
def exit_codes(interrupted: str = GOES_ON) -> Iterator[None]:
    """Ends the command where the body cannot go on.

    Args:
        interrupted: what a stop by Ctrl-C means for what was done so far.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(interrupted, err=True)
        raise typer.Exit(code=INTERRUPTED) from stop
    except XsakeError as error:
        echo(str(error), err=True)
        raise typer.Exit(code=FAILED if error.is_transient else CANNOT_RUN) from error
    except OSError as error:
        echo(_describe(error), err=True)
        raise typer.Exit(code=CANNOT_RUN) from error


def _describe(error: OSError) -> str:
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return f"A file cannot be written: {error}"
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"Too many files are open: {error.filename or 'no file'} is one more than the limit of "
        f"{limit}.\nRaise it, such as with `ulimit -n {max(hard, limit)}`."
    )
