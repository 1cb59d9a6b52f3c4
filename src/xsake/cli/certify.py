"""`xsake certify`: compile kernels with the vendors' compilers."""

import json
from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake._io import cache_folder
from xsake.certify import cases, run, table
from xsake.certify.family import BOUND_LABEL, find_target, known_targets
from xsake.certify.record import Outcome
from xsake.cli.errors import FAILED, exit_codes
from xsake.cli.options import AsJson
from xsake.cli.progress import ProgressBar, escape_markup

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
    as_json: AsJson = False,
) -> None:
    """Compile the kernels with the vendors' compilers; no accelerator is needed.

    Checks that kernels compile and fit into memory, not their speed. An interrupted run resumes.
    Exit code 0 if every outcome is as expected, negative controls included, 1 if one is not, 2 if
    the command cannot run.
    """
    names = targets or list(cases.SMOKE_TARGETS if selection == "smoke" else known_targets())
    flags = {"--no-resume": no_resume, "--no-figures": not figures}
    arguments = [*names, "--cases", selection, *(name for name, given in flags.items() if given)]
    options = run.CertifyOptions(
        selection=selection,
        out=out,
        environments=environments or cache_folder("environments"),
        overwrite=no_resume,
        figures=figures,
        command=" ".join(["xsake certify", *arguments]),
        time_limit=time_limit,
    )
    console = rich.console.Console(quiet=as_json)
    results: dict[str, list[Outcome]] = {}
    with exit_codes(), ProgressBar(console, "starting compilers") as bar:
        announce = lambda message: console.print(f"[dim]{escape_markup(message)}[/]")
        for target in [find_target(name) for name in names]:
            results[target.name] = run.certify(
                target, options, on_progress=bar.show, announce=announce
            )[1]
    if as_json:
        plain = {
            name: [outcome.model_dump(mode="json") for outcome in outcomes]
            for name, outcomes in results.items()
        }
        typer.echo(json.dumps(plain, indent=2))
    for name, outcomes in results.items():
        console.print(table.outcomes_table(name, outcomes))
    for name, outcomes in results.items():
        unexpected = table.format_failures(outcomes)
        if unexpected:
            console.print(f"[bold red]{name}: not as expected[/]\n{escape_markup(unexpected)}")
    console.print(f"[dim]lower bound of time: {BOUND_LABEL}[/]")
    if any(not outcome.as_expected for outcomes in results.values() for outcome in outcomes):
        raise typer.Exit(code=FAILED)
