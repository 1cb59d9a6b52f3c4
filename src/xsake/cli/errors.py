"""Map exceptions of a command to a message on stderr and an exit code."""

import contextlib
import errno
import resource
from collections.abc import Iterator

import typer

from xsake.cli.progress import echo
from xsake.errors import XsakeError

FAILED, CANNOT_RUN, INTERRUPTED = 1, 2, 130  # exit codes
RESUMABLE = "Interrupted. Run the same command without --no-resume to resume."


@contextlib.contextmanager
def exit_codes(interrupted: str = RESUMABLE) -> Iterator[None]:
    """Print errors raised in the body and exit with the matching code.

    Args:
        interrupted: message after Ctrl-C.
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
