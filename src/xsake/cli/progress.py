"""Terminal output: escaped text and a progress bar."""

import rich.console
import rich.progress
import typer
from rich.markup import escape

from xsake._progress import Progress
from xsake.errors import PROSE, escape_controls


def echo(text: str, *, err: bool = False) -> None:
    """Print text with control characters escaped; it may quote untrusted files."""
    typer.echo(escape_controls(text, keep=PROSE), err=err)


def escape_markup(text: object) -> str:
    """Escape Rich markup and control characters."""
    return escape(escape_controls(str(text), keep=PROSE))


class ProgressBar:
    """Progress bar with a count and the elapsed time; a context manager.

    Args:
        console: output; the bar is disabled if it is quiet or not a terminal.
        description: text until the first event.
        item: name of an item in printed lines.
    """

    def __init__(self, console: rich.console.Console, description: str = "", item: str = ""):
        self.console, self._item = console, item
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

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, event: Progress) -> None:
        """Show an event on the bar only."""
        text = f"{_remaining(event)} [dim]{escape_markup(event.label)}[/]"
        self._bar.update(self._task, total=event.total, completed=event.done, description=text)

    def show(self, event: Progress) -> None:
        """Show an event; failures, and all events without a terminal, also get a line."""
        self.update(event)
        if event.is_failure or not self.console.is_terminal:
            line = f"{self._item} {event.done} of {event.total}: {escape_markup(event.label)}"
            if event.detail:
                style = "bold red" if event.is_failure else "default"
                line += f": [{style}]{escape_markup(event.detail)}[/]"
            elapsed = "" if event.elapsed_seconds is None else f"{event.elapsed_seconds:.0f} s"
            times = (elapsed, _remaining(event)) if event.is_new else ("cached",)
            line += "".join(f"[dim], {text}[/]" for text in times if text)
            self.console.print(line.lstrip(), soft_wrap=True, highlight=False)


def _remaining(event: Progress) -> str:
    left = event.remaining_seconds
    return "" if left is None else f"{left:.0f} s remaining"
