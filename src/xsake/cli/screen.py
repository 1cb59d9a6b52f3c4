"""What commands print: text that no terminal obeys, and the moving line of long ones."""

import rich.console
import rich.progress
import typer
from rich.markup import escape

from xsake.errors import PROSE, escape_controls


def echo(text: str, *, err: bool = False) -> None:
    """Print lines that may quote files; control characters are escaped.

    Args:
        text: plain, or JSON.
        err: on stderr.
    """
    typer.echo(escape_controls(text, keep=PROSE), err=err)


def escape_markup(text: str) -> str:
    """Text for a line of Rich that is neither markup nor obeyed by a terminal."""
    return escape(escape_controls(text, keep=PROSE))


class MovingLine:
    """One line that tells what is done, of how much, for how long; a context manager.

    Args:
        console: where it moves; nothing moves where nobody looks or quiet was asked for.
        description: shown until the first `update`.
    """

    def __init__(self, console: rich.console.Console, description: str = ""):
        self.console = console
        self._bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.MofNCompleteColumn(" of "),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task(description, total=None)

    def __enter__[Line: "MovingLine"](self: Line) -> Line:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, description: str) -> None:
        """What is done, and what is at hand."""
        self._bar.update(self._task, total=total, completed=done, description=description)
