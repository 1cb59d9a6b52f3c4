"""`xsake plan`: show, compare and validate sparsity plans."""

import json
from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake.cli.errors import FAILED, exit_codes
from xsake.cli.load import PROFILE, import_extra, load_calibration, load_profile
from xsake.cli.options import (
    App,
    AsJson,
    MaxDocuments,
    ModelDtype,
    ModelFolder,
    PlanFile,
    TextFiles,
)
from xsake.cli.progress import ProgressBar, echo
from xsake.errors import ArgumentError

plan_app = App(no_args_is_help=True, help="Show, compare or validate sparsity plans.")


@plan_app.command("show")
def show(plan: PlanFile) -> None:
    """Summarize a plan: budget, layers, densest and sparsest heads.

    Exit code 0, or 2 if the file is not a plan.
    """
    from xsake.hads import SparsityPlan

    with exit_codes():
        echo(str(SparsityPlan.load(plan)))


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
        echo(SparsityPlan.load(before).diff(SparsityPlan.load(after)))


@plan_app.command("check", hidden=True)  # old name
@plan_app.command("validate")
def validate(
    plan: PlanFile,
    model: ModelFolder,
    text: TextFiles,
    max_documents: MaxDocuments = 2,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per document; default: as calibrated.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the plan; default PLAN.profile.json.")
    ] = None,
    dtype: ModelDtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Check whether a plan is still valid for other texts or other weights.

    Runs the texts through the model once with the plan's selector, and compares the loss of every
    head with its calibrated loss. Exit code 0 if the plan is valid, 1 if it has drifted, 2 if the
    command cannot run, 130 after Ctrl-C.
    """
    console = rich.console.Console(quiet=as_json)
    with exit_codes(interrupted="Interrupted. No result was saved."):
        import_extra("xsake.evaluation")
        from xsake.hads import SparsityPlan, drift

        loaded, calibrated = SparsityPlan.load(plan), load_profile(plan, profile)
        if calibrated is None:
            expected = plan.with_suffix(PROFILE)
            raise ArgumentError(
                "plan-profile",
                "the profile of the plan is missing",
                expected=expected,
                fix="set --profile",
            )
        promised = drift.calibrated_loss(loaded, calibrated)
        length = context or loaded.calibration.context
        with ProgressBar(console, "loading, tokenizing, compiling") as bar:
            inputs = load_calibration(model, text, length, max_documents, dtype)
            sizes = inputs.model.model_dump(include={"layers", "q_heads", "kv_heads", "head_dim"})
            loaded.validate_for(**sizes)
            measured = drift.measure_documents(
                inputs.observe, loaded, inputs.documents, on_progress=bar.show
            )
            verdict = drift.Drift(promised, *drift.mean_loss(loaded, measured))
    notes = []
    if inputs.model.digest != loaded.model.digest:
        notes.append("The model's files differ from the calibrated ones.")
    if length != loaded.calibration.context:
        calibrated_length = f"calibrated with {loaded.calibration.context:,}"
        notes.append(f"Context: {length:,} tokens; {calibrated_length}.")
    if as_json:
        echo(json.dumps(verdict.to_dict() | {"notes": notes}))
    else:
        echo("\n".join([str(verdict), str(verdict.limits), *notes]))
    if not verdict.fits:
        raise typer.Exit(code=FAILED)
