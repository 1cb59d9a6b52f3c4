"""`xsake certify`: its arguments, its progress lines and its tables; the work is done elsewhere."""

import json
from pathlib import Path
from typing import Annotated

import rich
import typer
from rich.markup import escape

from xsake.certify import bound, cases, run, table
from xsake.certify.environments import default_folder
from xsake.certify.family import find_target, known_targets
from xsake.certify.record import Outcome
from xsake.errors import XsakeError

_SELECTION = "smoke (minutes), all (an hour or more), or a pattern on case names."


def run_certify(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Such as v5e v6e; all known targets if none.")
    ] = None,
    selection: Annotated[str, typer.Option("--cases", help=_SELECTION)] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder of the certificates.")] = Path("certificates"),
    environments: Annotated[
        Path | None, typer.Option(help="Folder of compilers' environments; default: user cache.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compile again what is already certified.")
    ] = False,
    figures: Annotated[
        bool, typer.Option(help="Ask for memory, spills and schedule too; compiles take longer.")
    ] = True,
    time_limit: Annotated[float, typer.Option(help="Seconds for one case.")] = run.CASE_SECONDS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Compile our kernels with the vendors' compilers; no accelerator is needed.

    Proves that kernels compile and fit, never how fast they are. An interrupted run goes on where
    it stopped. Exit code 0 if every outcome is as expected, controls included, 1 if one is not,
    2 if the command cannot run.
    """
    names = targets or _default_targets(selection)
    options = {"--fresh": fresh, "--no-figures": not figures}
    words = [*names, "--cases", selection, *(name for name, given in options.items() if given)]
    plan = run.Plan(
        selection=selection,
        out=out,
        environments=environments or default_folder(),
        fresh=fresh,
        figures=figures,
        command=" ".join(["xsake certify", *words]),
        time_limit=time_limit,
    )
    watcher = run.Watcher() if as_json else run.Watcher(_print_progress, _announce)
    found: dict[str, list[Outcome]] = {}
    try:
        wanted = [find_target(name) for name in names]
        for target in wanted:
            found[target.name] = run.certify(target, plan, watcher)[1]
    except XsakeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(code=2) from error
    _print(found, as_json)
    if any(not outcome.as_expected for outcomes in found.values() for outcome in outcomes):
        raise typer.Exit(code=1)


def _default_targets(selection: str) -> list[str]:
    return list(cases.SMOKE_TARGETS if selection == "smoke" else known_targets())


def _print(found: dict[str, list[Outcome]], as_json: bool) -> None:
    if as_json:
        plain = {
            name: [outcome.model_dump(mode="json") for outcome in outcomes]
            for name, outcomes in found.items()
        }
        typer.echo(json.dumps(plain, indent=2))
        return
    for name, outcomes in found.items():
        rich.print(table.outcomes_table(name, outcomes))
    for name, outcomes in found.items():
        surprises = table.surprises_text(outcomes)
        if surprises:
            rich.print(f"[bold red]{name}: not as expected[/]\n{escape(surprises)}")
    rich.print(f"[dim]not faster than: {escape(bound.LABEL)}[/]")


def _announce(message: str) -> None:
    rich.print(f"[dim]{escape(message)}[/]")


def _print_progress(progress: run.Progress) -> None:
    outcome = progress.outcome
    mark = "[green]ok[/]" if outcome.as_expected else "[bold red]NOT AS EXPECTED[/]"
    times = f"{progress.elapsed_seconds:.0f} s"
    if progress.remaining_seconds is not None:
        times += f", about {progress.remaining_seconds:.0f} s to go"
    rich.print(
        f"{progress.target} {progress.done}/{progress.total} {outcome.case.name}: "
        f"{outcome.verdict} {mark} [dim]{times if progress.is_new else 'known'}[/]"
    )
