"""Terminal output: escaped text and progress bars."""

import rich.console
import rich.progress
import typer
from rich.markup import escape

from xsake.errors import PROSE, escape_controls


def echo(text: str, *, err: bool = False) -> None:
    """Print text with control characters escaped; it may quote untrusted files.

    Args:
        text: plain text or JSON.
        err: print to stderr.
    """
    typer.echo(escape_controls(text, keep=PROSE), err=err)


def escape_markup(text: str) -> str:
    """Escape Rich markup and control characters."""
    return escape(escape_controls(text, keep=PROSE))


class ProgressBar:
    """Progress bar with a count and the elapsed time; a context manager.

    Args:
        console: output; the bar is disabled if it is quiet or not a terminal.
        description: text until the first `update`.
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

    def __enter__[Bar: "ProgressBar"](self: Bar) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, description: str) -> None:
        """Set the number of finished items and the description of the current one."""
        self._bar.update(self._task, total=total, completed=done, description=description)
