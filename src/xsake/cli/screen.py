"""The moving line that long commands show on a terminal; elsewhere it stays silent."""

import rich.console
import rich.progress


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
