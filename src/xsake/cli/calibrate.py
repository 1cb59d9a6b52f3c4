"""`xsake calibrate`: its arguments, its progress and its summary; the work is done elsewhere."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake.cli.exits import exit_codes
from xsake.cli.screen import MovingLine, echo, escape_markup
from xsake.cli.subject import evaluation_library, subject_of
from xsake.errors import ArgumentError

DEFAULT_BUDGET = 0.3
EFFECT_DOCUMENTS = 6  # gradients take three times as long as reading
COPIED_DOCUMENTS = 2  # of those
_POLICY = "effect, kl, mass, uniform, entropy_budget, static, ..."
_SELECTOR = "sampled, cumulant, antidiagonal or pooled."
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; may be given several times."


def run_calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    context: Annotated[int, typer.Option(min=1, help="Tokens read of every document.")] = 4096,
    budget: Annotated[
        str | None,
        typer.Option(help="Computed blocks; default 30%, or what the policy finds by itself."),
    ] = None,
    policy: Annotated[str, typer.Option(help=_POLICY)] = "effect",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the policy, such as eps=0.05 or p=0.9."),
    ] = None,
    selector: Annotated[str, typer.Option(help=_SELECTOR)] = "sampled",
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 64,
    documents: Annotated[
        int, typer.Option(min=1, help="Only the first so many that are long enough.")
    ] = 12,
    devices: Annotated[int, typer.Option(min=1, help="Devices that share the documents.")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights and activations.")
    ] = "float32",
    out: Annotated[Path, typer.Option("--out", "-o", help="The plan.")] = Path("plan.json"),
    profile: Annotated[
        Path | None, typer.Option(help="The profile; default PLAN.profile.json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan and nothing else.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what an earlier run has measured.")
    ] = False,
) -> None:
    """Measure what every attention head looks at, and plan which blocks it may skip.

    Writes a plan for `xsake evaluate --plan` and the profile it was made from. An interrupted run
    goes on where it stopped: what was measured is kept beside the plan. Exit code 0 if all is done,
    2 if the command cannot run, 130 after Ctrl-C.
    """
    profile = profile or out.with_suffix(".profile.json")
    console = rich.console.Console(quiet=as_json)
    with exit_codes():
        evaluation_library()
        from xsake import hads

        chosen = hads.policy_named(policy, **_settings(setting or []))
        share = _asked(chosen, budget)
        scorer = hads.selector_named(selector)
        with DocumentScreen(console, "loading, cutting texts, compiling") as screen:
            task = CalibrationTask.of(model, text, context, documents, devices, dtype)
            settings = _measured(hads.Settings(block, selectors=(scorer,), at_once=devices), policy)
            _require_possible(chosen, share, task.model.heads, context, settings)
            shelf = hads.Shelf(out.with_suffix(".masses"), fresh=fresh)
            found = hads.calibrate(
                task.observe, task.model, task.readings, settings, shelf=shelf, watch=screen.show
            )
        found.save(profile)
        plan = hads.make_plan(found, chosen, share, scorer)
        plan.save(out)
    if as_json:
        echo(plan.to_json())
        return
    console.print(str(plan), markup=False, highlight=False)
    console.print(f"written to {escape_markup(str(out))} and {escape_markup(str(profile))}")


def _settings(words: list[str]) -> dict[str, float]:
    """Settings of a policy, each written as name=number."""
    found = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            found[name] = float(number)
        except ValueError as error:
            raise ArgumentError("--set takes a setting", got=word, expected="eps=0.05") from error
    return found


def _measured(settings: Any, policy: str) -> Any:
    """What calibration measures for a policy."""
    if policy != "effect":
        return settings
    counts = {"effect_documents": EFFECT_DOCUMENTS, "copied_documents": COPIED_DOCUMENTS}
    return dataclasses.replace(settings, **counts)


def _asked(policy: Any, budget: str | None) -> float | None:
    """The share that a policy is asked for; None for those that find their own."""
    from xsake.hads.policy import Entropy, TopP

    finds_own = isinstance(policy, Entropy | TopP)
    if budget is None:
        return None if finds_own else DEFAULT_BUDGET
    if finds_own:
        raise ArgumentError(
            f"the policy {policy.name!r} finds its own budget",
            got=f"--budget {budget}",
            fix="leave --budget out, or use a policy that meets one: kl, entropy_budget",
        )
    return share_of(budget)


def _require_possible(
    policy: Any, share: float | None, heads: int, context: int, settings: Any
) -> None:
    """Raise now what would be raised after hours of measuring."""
    from xsake.hads.budget import total_blocks
    from xsake.layout.grid import blocks_of

    if share is not None:
        always = getattr(policy, "always", settings.always)
        total_blocks(share, heads=heads, n=blocks_of(context, settings.block), always=always)


def share_of(words: str) -> float:
    """A share, written as 30% or 0.3."""
    try:
        number = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError as error:
        raise ArgumentError("--budget takes a share", got=words, expected="30% or 0.3") from error
    return round(number, 9)


class CalibrationTask:
    """What is read, and by which model.

    Args:
        observe: lets the model read.
        model: which it is.
        readings: the documents.
    """

    def __init__(self, observe: Any, model: Any, readings: list):
        self.observe, self.model, self.readings = observe, model, readings

    @classmethod
    def of(
        cls, folder: Path, texts: list[Path], context: int, documents: int, devices: int, dtype: str
    ) -> "CalibrationTask":
        """Loads the model and cuts the documents."""
        import jax

        from xsake import hads
        from xsake.evaluation import read_texts
        from xsake.evaluation.windows import Library, cut_windows
        from xsake.model.observer import Observer

        found = read_texts(texts)
        subject = subject_of(folder, dtype)
        config = subject.model.config
        library = Library(found.documents, subject.encode, config.vocab_size, subject.opening)
        cut = cut_windows(library, context, limit=documents)
        if not cut.trials:
            raise ArgumentError(
                "no document is long enough",
                got=f"{len(found.documents)} documents",
                expected=f"at least {context} tokens in one of them",
                fix="ask for a smaller --context, or give longer texts",
            )
        if devices > len(jax.devices()):
            raise ArgumentError(
                "there are not so many devices", got=devices, expected=f"{len(jax.devices())}"
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
        readings = [hads.Reading(trial.document, trial.tokens) for trial in cut.trials]
        return cls(Observer(subject.model, devices=shared), identity, readings)


class DocumentScreen(MovingLine):
    """Progress: one moving line on a terminal, a line per document elsewhere."""

    def show(self, progress: Any) -> None:
        """Which document has just been measured, and how long the rest will take."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f"about {left:.0f} s to go"
        label = escape_markup(progress.label)
        self.update(progress.done, progress.total, f"{to_go} [dim]{label}[/]")
        if not self.console.is_terminal:
            times = f"{progress.elapsed_seconds:.0f} s, {to_go}" if progress.is_new else "known"
            line = f"{progress.done} of {progress.total}: {label}"
            self.console.print(f"{line} [dim]{times}[/]", soft_wrap=True)
