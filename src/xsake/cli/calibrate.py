"""`xsake calibrate`: profile the attention heads of a model and write a sparsity plan."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake.cli.exits import exit_codes
from xsake.cli.screen import ProgressBar, echo, escape_markup
from xsake.cli.subject import import_evaluation, load_eval_model
from xsake.errors import ArgumentError

DEFAULT_BUDGET = 0.3
EFFECT_DOCUMENTS = 6  # a gradient takes three times as long as a forward pass
COPIED_DOCUMENTS = 2  # at most EFFECT_DOCUMENTS
_POLICY = "effect, kl, mass, uniform, entropy_budget, static, ..."
_SELECTOR = "sampled, cumulant, antidiagonal or pooled."
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; repeatable."


def run_calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    context: Annotated[int, typer.Option(min=1, help="Tokens per document.")] = 4096,
    budget: Annotated[
        str | None,
        typer.Option(help="Density; default 30%, unless the policy sets it (entropy, top_p)."),
    ] = None,
    policy: Annotated[str, typer.Option(help=_POLICY)] = "effect",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Policy parameter, such as eps=0.05 or p=0.9."),
    ] = None,
    selector: Annotated[str, typer.Option(help=_SELECTOR)] = "sampled",
    block: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 64,
    max_documents: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of documents (shorter than --context: skipped)."),
    ] = 12,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of weights and activations.")
    ] = "float32",
    out: Annotated[Path, typer.Option("--out", "-o", help="Output plan.")] = Path("plan.json"),
    profile: Annotated[
        Path | None, typer.Option(help="Output profile; default PLAN.profile.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Ignore cached results of an earlier run.")
    ] = False,
) -> None:
    """Profile the attention heads of a model and allocate a block budget to each.

    Writes a plan for `xsake evaluate --plan` and its profile. An interrupted run resumes from the
    measurements cached next to the plan. Exit code 0 on success, 2 if the command cannot run, 130
    after Ctrl-C.
    """
    profile = profile or out.with_suffix(".profile.json")
    console = rich.console.Console(quiet=as_json)
    with exit_codes():
        import_evaluation()
        from xsake import hads

        rule = hads.make_policy(policy, **_parse_settings(setting or []))
        density = _target_budget(rule, budget)
        scorer = hads.make_selector(selector)
        with CalibrationProgressBar(console, "loading, tokenizing, compiling") as bar:
            task = CalibrationTask.load(model, text, context, max_documents, devices, dtype)
            settings = _calibration_settings(
                hads.CalibrationSettings(block, selectors=(scorer,), batch_size=devices), policy
            )
            _check_feasible(rule, density, task.model.heads, context, settings)
            shelf = hads.MassCache(out.with_suffix(".masses"), overwrite=no_resume)
            measured = hads.calibrate(
                task.observe, task.model, task.readings, settings, cache=shelf, on_progress=bar.show
            )
        measured.save(profile)
        plan = hads.make_plan(measured, rule, density, scorer)
        plan.save(out)
    if as_json:
        echo(plan.to_json())
        return
    console.print(str(plan), markup=False, highlight=False)
    console.print(f"written to {escape_markup(str(out))} and {escape_markup(str(profile))}")


def _parse_settings(texts: list[str]) -> dict[str, float]:
    """Parse policy parameters, each written as name=number."""
    settings = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            settings[name] = float(number)
        except ValueError as error:
            raise ArgumentError("invalid --set", got=text, expected="eps=0.05") from error
    return settings


def _calibration_settings(settings: Any, policy: str) -> Any:
    """Add the measurements that a policy needs."""
    if policy != "effect":
        return settings
    counts = {"effect_documents": EFFECT_DOCUMENTS, "copied_documents": COPIED_DOCUMENTS}
    return dataclasses.replace(settings, **counts)


def _target_budget(policy: Any, budget: str | None) -> float | None:
    """Return the density for a policy; None for policies that set it themselves."""
    from xsake.hads.policies import Entropy, TopP

    sets_budget = isinstance(policy, Entropy | TopP)
    if budget is None:
        return None if sets_budget else DEFAULT_BUDGET
    if sets_budget:
        raise ArgumentError(
            f"the policy {policy.name!r} sets its own budget",
            got=f"--budget {budget}",
            fix="omit --budget, or use a policy that takes one: kl, entropy_budget",
        )
    return parse_density(budget)


def _check_feasible(
    policy: Any, density: float | None, heads: int, context: int, settings: Any
) -> None:
    """Raise if the budget is infeasible, before calibration starts."""
    from xsake.hads.budget import total_blocks
    from xsake.layout.grid import count_blocks

    if density is not None:
        always = getattr(policy, "forced", settings.forced)
        total_blocks(density, heads=heads, n=count_blocks(context, settings.block), forced=always)


def parse_density(text: str) -> float:
    """Parse a density written as 30% or 0.3."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise ArgumentError("invalid density", got=text, expected="30% or 0.3") from error
    return round(number, 9)


class CalibrationTask:
    """Inputs of a calibration.

    Args:
        observe: runs the model with per-layer hooks.
        model: identity of the model.
        readings: documents.
    """

    def __init__(self, observe: Any, model: Any, readings: list):
        self.observe, self.model, self.readings = observe, model, readings

    @classmethod
    def load(
        cls, folder: Path, texts: list[Path], context: int, max_documents: int, devices: int,
        dtype: str,
    ) -> "CalibrationTask":  # fmt: skip
        """Load the model and tokenize the documents."""
        import jax

        from xsake import hads
        from xsake.evaluation import read_texts
        from xsake.evaluation.windows import TokenizedTexts, cut_windows
        from xsake.model.observer import Observer

        corpus = read_texts(texts)
        subject = load_eval_model(folder, dtype)
        config = subject.model.config
        library = TokenizedTexts(
            corpus.documents, subject.encode, config.vocab_size, subject.opening
        )
        cut = cut_windows(library, context, limit=max_documents)
        if not cut.trials:
            raise ArgumentError(
                "no document is long enough",
                got=f"{len(corpus.documents)} documents",
                expected=f"at least {context} tokens in one of them",
                fix="reduce --context, or provide longer texts",
            )
        if devices > len(jax.devices()):
            raise ArgumentError(
                "too few devices", got=devices, expected=f"at most {len(jax.devices())}"
            )
        shared = jax.devices()[:devices] if devices > 1 else None
        identity = hads.CalibratedModel(
            name=subject.identity.name,
            digest=subject.identity.digest,
            layers=config.layers,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        readings = [hads.CalibrationDocument(trial.document, trial.tokens) for trial in cut.trials]
        return cls(Observer(subject.model, devices=shared), identity, readings)


class CalibrationProgressBar(ProgressBar):
    """Progress bar on a terminal; otherwise one line per document."""

    def show(self, progress: Any) -> None:
        """Show the last measured document and the remaining time."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f"{left:.0f} s remaining"
        label = escape_markup(progress.label)
        self.update(progress.done, progress.total, f"{to_go} [dim]{label}[/]")
        if not self.console.is_terminal:
            times = f"{progress.elapsed_seconds:.0f} s, {to_go}" if progress.is_new else "cached"
            line = f"{progress.done} of {progress.total}: {label}"
            self.console.print(f"{line} [dim]{times}[/]", soft_wrap=True)
