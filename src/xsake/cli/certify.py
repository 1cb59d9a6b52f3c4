"""`xsake certify`: compile kernels with the vendors' compilers."""

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
        list[str] | None, typer.Argument(help="Targets, such as v5e v6e; default: all.")
    ] = None,
    selection: Annotated[str, typer.Option("--cases", help=_SELECTION)] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder of certificates.")] = Path("certificates"),
    environments: Annotated[
        Path | None, typer.Option(help="Folder of compiler environments; default: user cache.")
    ] = None,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Recompile cases that are already certified.")
    ] = False,
    figures: Annotated[
        bool, typer.Option(help="Also record memory, spills and schedule; slower.")
    ] = True,
    time_limit: Annotated[float, typer.Option(help="Timeout per case (s).")] = run.CASE_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print outcomes as JSON.")] = False,
) -> None:
    """Compile the kernels with the vendors' compilers; no accelerator is needed.

    Checks that kernels compile and fit into memory, not their speed. An interrupted run resumes.
    Exit code 0 if every outcome is as expected, negative controls included, 1 if one is not, 2 if
    the command cannot run.
    """
    names = targets or _default_targets(selection)
    flags = {"--no-resume": no_resume, "--no-figures": not figures}
    arguments = [*names, "--cases", selection, *(name for name, given in flags.items() if given)]
    options = run.CertifyOptions(
        selection=selection,
        out=out,
        environments=environments or default_folder(),
        overwrite=no_resume,
        figures=figures,
        command=" ".join(["xsake certify", *arguments]),
        time_limit=time_limit,
    )
    callbacks = (
        run.CertifyCallbacks() if as_json else run.CertifyCallbacks(_print_progress, _announce)
    )
    results: dict[str, list[Outcome]] = {}
    try:
        for target in [find_target(name) for name in names]:
            results[target.name] = run.certify(target, options, callbacks)[1]
    except XsakeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(code=2) from error
    _print(results, as_json)
    if any(not outcome.as_expected for outcomes in results.values() for outcome in outcomes):
        raise typer.Exit(code=1)


def _default_targets(selection: str) -> list[str]:
    return list(cases.SMOKE_TARGETS if selection == "smoke" else known_targets())


def _print(results: dict[str, list[Outcome]], as_json: bool) -> None:
    if as_json:
        plain = {
            name: [outcome.model_dump(mode="json") for outcome in outcomes]
            for name, outcomes in results.items()
        }
        typer.echo(json.dumps(plain, indent=2))
        return
    for name, outcomes in results.items():
        rich.print(table.outcomes_table(name, outcomes))
    for name, outcomes in results.items():
        unexpected = table.format_failures(outcomes)
        if unexpected:
            rich.print(f"[bold red]{name}: not as expected[/]\n{escape(unexpected)}")
    rich.print(f"[dim]lower bound of time: {escape(bound.LABEL)}[/]")


def _announce(message: str) -> None:
    rich.print(f"[dim]{escape(message)}[/]")


def _print_progress(progress: run.CertifyProgress) -> None:
    outcome = progress.outcome
    mark = "[green]ok[/]" if outcome.as_expected else "[bold red]NOT AS EXPECTED[/]"
    times = f"{progress.elapsed_seconds:.0f} s"
    if progress.remaining_seconds is not None:
        times += f", {progress.remaining_seconds:.0f} s remaining"
    rich.print(
        f"{progress.target} {progress.done}/{progress.total} {outcome.case.name}: "
        f"{outcome.verdict} {mark} [dim]{times if progress.is_new else 'cached'}[/]"
    )
