"""`xsake calibrate`: profile the attention heads of a model and write a sparsity plan."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer

from xsake.cli.errors import exit_codes
from xsake.cli.load import PROFILE, import_extra, load_calibration, parse_density
from xsake.cli.options import AsJson, MaxDocuments, ModelDtype, ModelFolder, NoResume, TextFiles
from xsake.cli.progress import ProgressBar, echo, escape_markup
from xsake.errors import ArgumentError

DEFAULT_BUDGET = 0.3
EFFECT_DOCUMENTS = 6  # a gradient takes three times as long as a forward pass
COPIED_DOCUMENTS = 2  # at most EFFECT_DOCUMENTS
_BUDGET = "Density; default 30%, unless the policy sets it (entropy, top_p)."
_POLICY = "effect, kl, mass, uniform, entropy_budget, static, ..."
_SELECTOR = "sampled, cumulant, antidiagonal or pooled."
_DEVICES = "Number of devices, for documents, or with --stream-layers for heads and MLP."
_SETTING = "Policy parameter, such as eps=0.05 or p=0.9."
_STREAM = "Keep the weights in host memory and one layer on the device."


def run_calibrate(
    model: ModelFolder,
    text: TextFiles,
    context: Annotated[int, typer.Option(min=1, help="Tokens per document.")] = 4096,
    budget: Annotated[str | None, typer.Option(help=_BUDGET)] = None,
    policy: Annotated[str, typer.Option(help=_POLICY)] = "effect",
    setting: Annotated[list[str] | None, typer.Option("--set", help=_SETTING)] = None,
    selector: Annotated[str, typer.Option(help=_SELECTOR)] = "sampled",
    block: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 64,
    max_documents: MaxDocuments = 12,
    devices: Annotated[int, typer.Option(min=1, help=_DEVICES)] = 1,
    stream_layers: Annotated[bool, typer.Option("--stream-layers", help=_STREAM)] = False,
    dtype: ModelDtype = "float32",
    out: Annotated[Path, typer.Option("--out", "-o", help="Output plan.")] = Path("plan.json"),
    profile: Annotated[
        Path | None, typer.Option(help="Output profile; default PLAN.profile.json.")
    ] = None,
    as_json: AsJson = False,
    no_resume: NoResume = False,
) -> None:
    """Profile the attention heads of a model and allocate a block budget to each.

    Writes a plan for `xsake evaluate --plan` and its profile. An interrupted run resumes from the
    measurements cached next to the plan. Exit code 0 on success, 2 if the command cannot run, 130
    after Ctrl-C.
    """
    profile = profile or out.with_suffix(PROFILE)
    console = rich.console.Console(quiet=as_json)
    with exit_codes():
        import_extra("xsake.evaluation")
        from xsake import hads

        rule = hads.make_policy(policy, **_parse_settings(setting or []))
        density = _target_budget(rule, budget)
        scorer = hads.make_selector(selector)
        with ProgressBar(console, "loading, tokenizing, compiling") as bar:
            inputs = load_calibration(
                model, text, context, max_documents, dtype, devices, stream_layers=stream_layers
            )
            batch_size = 1 if stream_layers else devices
            settings = hads.CalibrationSettings(block, selectors=(scorer,), batch_size=batch_size)
            if policy == "effect":
                counts = {
                    "effect_documents": EFFECT_DOCUMENTS,
                    "copied_documents": COPIED_DOCUMENTS,
                }
                settings = dataclasses.replace(settings, **counts)
            _check_feasible(rule, density, inputs.model.heads, context, settings)
            cache = hads.MassCache(out.with_suffix(".masses"), overwrite=no_resume)
            measured = hads.calibrate(*inputs, settings, cache=cache, on_progress=bar.show)
        measured.save(profile)
        plan = hads.make_plan(measured, rule, density, scorer)
        plan.save(out)
    if as_json:
        echo(plan.to_json())
        return
    console.print(str(plan), markup=False, highlight=False)
    console.print(f"written to {escape_markup(out)} and {escape_markup(profile)}")


def _parse_settings(texts: list[str]) -> dict[str, float]:
    """Parse policy parameters, each written as name=number."""
    settings = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            settings[name] = float(number)
        except ValueError as error:
            raise ArgumentError(
                "set-option", "invalid --set", got=text, expected="eps=0.05"
            ) from error
    return settings


def _target_budget(policy: Any, budget: str | None) -> float | None:
    """Return the density for a policy; None for policies that set it themselves."""
    from xsake.hads.policies import Entropy, TopP

    sets_budget = isinstance(policy, Entropy | TopP)
    if budget is None:
        return None if sets_budget else DEFAULT_BUDGET
    if sets_budget:
        raise ArgumentError(
            "policy-budget-option",
            f"the policy {policy.name!r} sets its own budget",
            got=f"--budget {budget}",
            fix="omit --budget, or use a policy that takes one: kl, entropy_budget",
        )
    return parse_density(budget)


def _check_feasible(policy: Any, density: float | None, heads: int, context: int, settings) -> None:
    """Raise if the budget is infeasible, before calibration starts."""
    from xsake.hads.budget import total_blocks
    from xsake.layout.grid import count_blocks

    if density is not None:
        forced = getattr(policy, "forced", settings.forced)
        total_blocks(density, heads=heads, n=count_blocks(context, settings.block), forced=forced)
