"""`xsake evaluate`: its arguments, its progress and its tables; the work is done elsewhere."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake import masks
from xsake.cli.exits import exit_codes
from xsake.cli.screen import MovingLine, echo, escape_markup
from xsake.cli.subject import evaluation_library, subject_of
from xsake.errors import ArgumentError

MOST_BYTES = 2**28  # of a mask or a layout
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; may be given several times."
_MASK = 'Compare with this mask, such as "window(1023, 0) | sinks(4)", or with one in a .json file.'
_LAYOUT = "Compare with the listed blocks of a layout's .json."
_PLAN = "Compare with a plan, as `xsake calibrate` makes it."


def run_evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    context: Annotated[str, typer.Option(help="Tokens per window, several with commas.")] = "2048",
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    layout: Annotated[Path | None, typer.Option(help=_LAYOUT)] = None,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    documents: Annotated[
        int | None, typer.Option(help="Only the first so many that are long enough.")
    ] = None,
    windows_per_document: Annotated[int, typer.Option(help="From its start, consecutive.")] = 1,
    far_copy: Annotated[bool, typer.Option(help="Repeat passages after a gap as well.")] = True,
    gaps: Annotated[str, typer.Option(help="Tokens between the copies.")] = "512,2048,4096",
    far_copy_samples: Annotated[int, typer.Option(help="Passages that are repeated.")] = 2,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights and activations.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Of passages and intervals.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The report; default xsake-evaluation-MODEL.json."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report into this PNG.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report and nothing else.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what an earlier run has measured.")
    ] = False,
) -> None:
    """Measure how good a model is, and what another attention changes.

    Perplexity with intervals over documents, NLL by position and far copies; with --mask,
    --layout or --plan also the divergence from dense attention. An interrupted run goes on where
    it stopped: results are kept beside the report. Exit code 0 if all is done, 2 if the command
    cannot run, 130 after Ctrl-C.
    """
    out = out or Path(f"xsake-evaluation-{model.resolve().name}.json")
    console = rich.console.Console(quiet=as_json)
    with exit_codes():
        evaluation = evaluation_library()
        settings = evaluation.Settings(
            contexts=_numbers("--context", context),
            documents=documents,
            windows_per_document=windows_per_document,
            gaps=_numbers("--gaps", gaps) if far_copy else (),
            far_copy_samples=far_copy_samples,
            seed=seed,
        )
        texts = evaluation.read_texts(text)
        candidate = _candidate(mask, layout, plan)
        subject = subject_of(model, dtype)
        kept = evaluation.Journal(out.with_suffix(".windows.jsonl"), fresh=fresh)
        with EvaluationScreen(console, "cutting texts, compiling") as screen:
            report = evaluation.evaluate(
                subject, texts, settings, candidate=candidate, journal=kept, watch=screen.show
            )
        evaluation.write(report, out)
        if plot is not None:
            evaluation.draw(report, plot)
    if as_json:
        echo(report.model_dump_json(indent=1))
        return
    places = " and ".join(str(place) for place in (out, plot) if place is not None)
    console.print(evaluation.report_view(report))
    console.print(f"{report.seconds:.0f} s of scoring; written to {escape_markup(places)}")


def _candidate(mask: str | None, layout: Path | None, plan: Path | None) -> Any:
    from xsake.evaluation import Candidate
    from xsake.hads import SparsityPlan
    from xsake.layout import BlockLayout

    asked = {"--mask": mask, "--layout": layout, "--plan": plan}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(
            "one attention can be compared with dense attention at a time",
            got=" and ".join(given),
            expected="one of them",
        )
    if plan is not None:
        return Candidate.of_plan(SparsityPlan.load(plan))
    if layout is not None:
        return Candidate.of_layout(BlockLayout.from_json(_content(layout)))
    return None if mask is None else Candidate.of_mask(_mask(mask))


def _mask(words: str) -> masks.AbstractMask:
    """A mask from an expression, or from the file that the words name."""
    if not words.endswith(".json"):
        return masks.parse(words)
    try:
        description = json.loads(_content(Path(words)))
    except (ValueError, RecursionError) as error:
        raise ArgumentError("the file is not JSON", got=f"{words}: {str(error)[:100]}") from error
    return masks.from_dict(description)


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("the file cannot be read", got=f"{path}: {error}") from error
    if len(text) > MOST_BYTES:
        raise ArgumentError("the file is too large", got=path, expected=f"{MOST_BYTES} characters")
    return text


def _numbers(option: str, words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError as error:
        raise ArgumentError(
            f"{option} takes numbers", got=words, expected="such as 2048,4096,8192"
        ) from error


class EvaluationScreen(MovingLine):
    """Progress: one moving line on a terminal, a line per answer elsewhere."""

    def show(self, progress: Any) -> None:
        """What has just been measured, and how long the rest will take."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f"about {left:.0f} s to go"
        words = f"{to_go} [dim]{escape_markup(progress.label)}[/]"
        self.update(progress.done, progress.total, words)
        if not self.console.is_terminal:
            nll = f"NLL {progress.dense_nll:.3f}"
            if progress.candidate_nll is not None:
                nll += f" dense, {progress.candidate_nll:.3f} candidate"
            times = f"{progress.elapsed_seconds:.0f} s, {to_go}" if progress.is_new else "known"
            line = f"{progress.done} of {progress.total}: {escape_markup(progress.label)}: {nll}"
            self.console.print(f"{line} [dim]{times}[/]", soft_wrap=True)
