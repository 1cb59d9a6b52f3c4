"""`xsake plan`: shows a plan, compares two, and checks whether one still fits other texts."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake.cli.calibrate import CalibrationTask, DocumentScreen
from xsake.cli.exits import exit_codes
from xsake.cli.report import PROFILE, profile_of
from xsake.cli.screen import echo
from xsake.cli.subject import evaluation_library
from xsake.errors import ArgumentError

DOES_NOT_FIT = 1  # exit code
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; may be given several times."
_PLAN = typer.Argument(help="A plan, as `xsake calibrate` makes it.")

plan_app = typer.Typer(no_args_is_help=True)


@plan_app.callback()
def about() -> None:
    """Show a plan, compare two, or check whether one still fits."""


@plan_app.command("show")
def show(plan: Annotated[Path, _PLAN]) -> None:
    """Show a plan on one screen: its budget, its layers and its extreme heads.

    Exit code 0, or 2 if the file is no plan.
    """
    from xsake.hads import SparsityPlan

    with exit_codes():
        found = SparsityPlan.load(plan)
    echo(str(found))


@plan_app.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.")],
    after: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """Tell what is different in a second plan, by field and by head.

    Exit code 0, or 2 if a file is no plan.
    """
    from xsake.hads import SparsityPlan

    with exit_codes():
        old, new = SparsityPlan.load(before), SparsityPlan.load(after)
    echo(old.diff(new))


@plan_app.command("check")
def check(
    plan: Annotated[Path, _PLAN],
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    documents: Annotated[
        int, typer.Option(min=1, help="Only the first so many that are long enough.")
    ] = 2,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens read of each; default: as calibrated.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Its profile; default PLAN.profile.json.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights and activations.")
    ] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures and nothing else.")
    ] = False,
) -> None:
    """Check whether a plan still fits: what its heads lose on other texts, or other weights.

    Reads the texts once, asks the plan's own selector which blocks it would choose, and compares
    the loss of every head with what calibration promised. Exit code 0 if the plan fits, 1 if it
    does not, 2 if that cannot be told, 130 after Ctrl-C.
    """
    console = rich.console.Console(quiet=as_json)
    with exit_codes(interrupted="Interrupted. Nothing was kept."):
        evaluation_library()
        from xsake.hads import SparsityPlan, drift

        found, calibrated = SparsityPlan.load(plan), profile_of(plan, profile)
        if calibrated is None:
            raise ArgumentError(
                "the plan's profile is not beside it",
                expected=plan.with_suffix(PROFILE),
                fix="name it with --profile",
            )
        promised = drift.promised_loss(found, calibrated)
        length = context or found.calibration.context
        with DocumentScreen(console, "loading, cutting texts, compiling") as screen:
            task = CalibrationTask.of(model, text, length, documents, devices=1, dtype=dtype)
            sizes = task.model.model_dump(include={"layers", "q_heads", "kv_heads", "head_dim"})
            found.validate_for(**sizes)
            read = drift.read_again(task.observe, found, task.readings, watch=screen.show)
            verdict = drift.Drift(promised, *drift.loss_on(found, read))
    if as_json:
        echo(json.dumps(verdict.to_dict() | {"notes": _notes(found, task, length)}))
    else:
        for note in [str(verdict), str(verdict.limits), *_notes(found, task, length)]:
            echo(note)
    if not verdict.fits:
        raise typer.Exit(code=DOES_NOT_FIT)


def _notes(plan: Any, task: CalibrationTask, context: int) -> list[str]:
    """What else is different from the calibration."""
    notes = []
    if task.model.digest != plan.model.digest:
        notes.append("The model's files are not those that were calibrated.")
    if context != plan.calibration.context:
        notes.append(f"Read {context:,} tokens; calibrated with {plan.calibration.context:,}.")
    return notes
