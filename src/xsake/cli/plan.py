"""`xsake plan`: show, compare and validate sparsity plans."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake.cli.aliases import App
from xsake.cli.calibrate import CalibrationProgressBar, CalibrationTask
from xsake.cli.exits import exit_codes
from xsake.cli.report import PROFILE, load_profile
from xsake.cli.screen import echo
from xsake.cli.subject import import_evaluation
from xsake.errors import ArgumentError

EXIT_DRIFTED = 1  # exit code
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; repeatable."
_PLAN = typer.Argument(help="Plan written by `xsake calibrate`.")

plan_app = App(no_args_is_help=True)


@plan_app.callback()
def about() -> None:
    """Show, compare or validate sparsity plans."""


@plan_app.command("show")
def show(plan: Annotated[Path, _PLAN]) -> None:
    """Summarize a plan: budget, layers, densest and sparsest heads.

    Exit code 0, or 2 if the file is not a plan.
    """
    from xsake.hads import SparsityPlan

    with exit_codes():
        summary = str(SparsityPlan.load(plan))
    echo(summary)


@plan_app.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(help="First plan.")],
    after: Annotated[Path, typer.Argument(help="Second plan.")],
) -> None:
    """List the differences between two plans, by field and by head.

    Exit code 0, or 2 if a file is not a plan.
    """
    from xsake.hads import SparsityPlan

    with exit_codes():
        old, new = SparsityPlan.load(before), SparsityPlan.load(after)
    echo(old.diff(new))


@plan_app.command("check", hidden=True)  # old name
@plan_app.command("validate")
def validate(
    plan: Annotated[Path, _PLAN],
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    max_documents: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of documents (shorter than --context: skipped)."),
    ] = 2,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per document; default: as calibrated.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the plan; default PLAN.profile.json.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of weights and activations.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check whether a plan is still valid for other texts or other weights.

    Runs the texts through the model once with the plan's selector, and compares the loss of every
    head with its calibrated loss. Exit code 0 if the plan is valid, 1 if it has drifted, 2 if the
    command cannot run, 130 after Ctrl-C.
    """
    console = rich.console.Console(quiet=as_json)
    with exit_codes(interrupted="Interrupted. No result was saved."):
        import_evaluation()
        from xsake.hads import SparsityPlan, drift

        loaded, calibrated = SparsityPlan.load(plan), load_profile(plan, profile)
        if calibrated is None:
            raise ArgumentError(
                "the profile of the plan is missing",
                expected=plan.with_suffix(PROFILE),
                fix="set --profile",
            )
        promised = drift.calibrated_loss(loaded, calibrated)
        length = context or loaded.calibration.context
        with CalibrationProgressBar(console, "loading, tokenizing, compiling") as bar:
            task = CalibrationTask.load(model, text, length, max_documents, devices=1, dtype=dtype)
            sizes = task.model.model_dump(include={"layers", "q_heads", "kv_heads", "head_dim"})
            loaded.validate_for(**sizes)
            read = drift.measure_documents(
                task.observe, loaded, task.readings, on_progress=bar.show
            )
            verdict = drift.Drift(promised, *drift.mean_loss(loaded, read))
    notes = _list_differences(loaded, task, length)
    if as_json:
        echo(json.dumps(verdict.to_dict() | {"notes": notes}))
    else:
        for note in [str(verdict), str(verdict.limits), *notes]:
            echo(note)
    if not verdict.fits:
        raise typer.Exit(code=EXIT_DRIFTED)


def _list_differences(plan: Any, task: CalibrationTask, context: int) -> list[str]:
    """List other differences from the calibration."""
    notes = []
    if task.model.digest != plan.model.digest:
        notes.append("The model's files differ from the calibrated ones.")
    if context != plan.calibration.context:
        notes.append(f"Context: {context:,} tokens; calibrated with {plan.calibration.context:,}.")
    return notes
