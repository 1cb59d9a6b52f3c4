"""`xsake evaluate`: perplexity, far copies and divergence from dense attention."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake import masks
from xsake.cli.exits import exit_codes
from xsake.cli.screen import ProgressBar, echo, escape_markup
from xsake.cli.subject import import_evaluation, load_eval_model
from xsake.errors import ArgumentError

MAX_BYTES = 2**28  # limit of a mask or layout file
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; repeatable."
_MASK = 'Candidate mask, such as "window(1023, 0) | sinks(4)", or a .json file.'
_LAYOUT = "Candidate block layout (.json)."
_PLAN = "Candidate plan written by `xsake calibrate`."


def run_evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    context: Annotated[str, typer.Option(help="Comma-separated tokens per window.")] = "2048",
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    layout: Annotated[Path | None, typer.Option(help=_LAYOUT)] = None,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    max_documents: Annotated[
        int | None,
        typer.Option(help="Maximum number of documents (shorter than --context: skipped)."),
    ] = None,
    windows_per_document: Annotated[int, typer.Option(help="Consecutive, from the start.")] = 1,
    far_copy: Annotated[bool, typer.Option(help="Also score copies of passages.")] = True,
    gaps: Annotated[str, typer.Option(help="Tokens between the copies.")] = "512,2048,4096",
    far_copy_samples: Annotated[int, typer.Option(help="Number of copied passages.")] = 2,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of weights and activations.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of passages and bootstrap intervals.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output report; default xsake-evaluation-MODEL.json."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Ignore cached results of an earlier run.")
    ] = False,
) -> None:
    """Evaluate a model, and compare a candidate attention with dense attention.

    Perplexity with intervals over documents, NLL by position and far copies; with --mask, --layout
    or --plan also the divergence from dense attention. An interrupted run resumes from the results
    cached next to the report. Exit code 0 on success, 2 if the command cannot run, 130 after
    Ctrl-C.
    """
    out = out or Path(f"xsake-evaluation-{model.resolve().name}.json")
    console = rich.console.Console(quiet=as_json)
    with exit_codes():
        evaluation = import_evaluation()
        settings = evaluation.EvaluationSettings(
            contexts=_parse_ints("--context", context),
            documents=max_documents,
            windows_per_document=windows_per_document,
            gaps=_parse_ints("--gaps", gaps) if far_copy else (),
            far_copy_samples=far_copy_samples,
            seed=seed,
        )
        texts = evaluation.read_texts(text)
        candidate = _build_candidate(mask, layout, plan)
        subject = load_eval_model(model, dtype)
        journal = evaluation.ResultCache(out.with_suffix(".windows.jsonl"), overwrite=no_resume)
        with EvaluationProgressBar(console, "tokenizing, compiling") as bar:
            report = evaluation.evaluate(
                subject, texts, settings, candidate=candidate, cache=journal, on_progress=bar.show
            )
        evaluation.write_report(report, out)
        if plot is not None:
            evaluation.draw(report, plot)
    if as_json:
        echo(report.model_dump_json(indent=1))
        return
    paths = " and ".join(str(path) for path in (out, plot) if path is not None)
    console.print(evaluation.report_view(report))
    console.print(f"{report.seconds:.0f} s of scoring; written to {escape_markup(paths)}")


def _build_candidate(mask: str | None, layout: Path | None, plan: Path | None) -> Any:
    from xsake.evaluation import Candidate
    from xsake.hads import SparsityPlan
    from xsake.layout import BlockLayout

    options = {"--mask": mask, "--layout": layout, "--plan": plan}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(
            "only one candidate attention can be evaluated",
            got=" and ".join(given),
            expected="one of --mask, --layout, --plan",
        )
    if plan is not None:
        return Candidate.of_plan(SparsityPlan.load(plan))
    if layout is not None:
        return Candidate.of_layout(BlockLayout.from_json(_read_text(layout)))
    return None if mask is None else Candidate.of_mask(_parse_mask(mask))


def _parse_mask(text: str) -> masks.AbstractMask:
    """Parse a mask expression, or load a mask from a .json file."""
    if not text.endswith(".json"):
        return masks.parse(text)
    try:
        description = json.loads(_read_text(Path(text)))
    except (ValueError, RecursionError) as error:
        raise ArgumentError("the file is not JSON", got=f"{text}: {str(error)[:100]}") from error
    return masks.from_dict(description)


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("the file cannot be read", got=f"{path}: {error}") from error
    if len(text) > MAX_BYTES:
        raise ArgumentError("the file is too large", got=path, expected=f"{MAX_BYTES} characters")
    return text


def _parse_ints(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ArgumentError(
            f"{option} takes integers", got=text, expected="such as 2048,4096,8192"
        ) from error


class EvaluationProgressBar(ProgressBar):
    """Progress bar on a terminal; otherwise one line per result."""

    def show(self, progress: Any) -> None:
        """Show the last result and the remaining time."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f"{left:.0f} s remaining"
        label = f"{to_go} [dim]{escape_markup(progress.label)}[/]"
        self.update(progress.done, progress.total, label)
        if not self.console.is_terminal:
            nll = f"NLL {progress.dense_nll:.3f}"
            if progress.candidate_nll is not None:
                nll += f" dense, {progress.candidate_nll:.3f} candidate"
            times = f"{progress.elapsed_seconds:.0f} s, {to_go}" if progress.is_new else "cached"
            line = f"{progress.done} of {progress.total}: {escape_markup(progress.label)}: {nll}"
            self.console.print(f"{line} [dim]{times}[/]", soft_wrap=True)
