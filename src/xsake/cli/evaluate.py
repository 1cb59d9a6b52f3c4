"""`xsake evaluate`: its arguments, its progress and its tables; the work is done elsewhere."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import rich.console
import typer
from rich.markup import escape

from xsake import masks
from xsake.cli.screen import MovingLine
from xsake.errors import ArgumentError, MissingExtraError, XsakeError

CANNOT_RUN, INTERRUPTED = 2, 130  # exit codes
MOST_BYTES = 2**28  # of a mask or a layout
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; may be given several times."
_MASK = 'Compare with this mask, such as "window(1023, 0) | sinks(4)", or with one in a .json file.'


def run_evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    context: Annotated[str, typer.Option(help="Tokens per window, several with commas.")] = "2048",
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    layout: Annotated[
        Path | None, typer.Option(help="Compare with the listed blocks of a layout's .json.")
    ] = None,
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
        typer.Option("--out", "-o", help="The report; default xsake-evaluation-<model>.json."),
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

    Perplexity with intervals over documents, NLL by position and far copies; with --mask or
    --layout also the divergence from dense attention. An interrupted run goes on where it stopped:
    results are kept beside the report. Exit code 0 if all is done, 2 if the command cannot run,
    130 after Ctrl-C.
    """
    out = out or Path(f"xsake-evaluation-{model.resolve().name}.json")
    console = rich.console.Console(quiet=as_json)
    with _exit_codes():
        evaluation = _evaluation()
        settings = evaluation.Settings(
            contexts=_numbers("--context", context),
            documents=documents,
            windows_per_document=windows_per_document,
            gaps=_numbers("--gaps", gaps) if far_copy else (),
            far_copy_samples=far_copy_samples,
            seed=seed,
        )
        candidate = _candidate(mask, layout)
        texts = evaluation.read_texts(text)
        subject = _subject(model, dtype)
        kept = evaluation.Journal(out.with_suffix(".windows.jsonl"), fresh=fresh)
        with _Screen(console, "cutting texts, compiling") as screen:
            report = evaluation.evaluate(
                subject, texts, settings, candidate=candidate, journal=kept, watch=screen.show
            )
        evaluation.write(report, out)
        if plot is not None:
            evaluation.draw(report, plot)
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
        return
    places = " and ".join(str(place) for place in (out, plot) if place is not None)
    console.print(evaluation.report_view(report))
    console.print(f"{report.seconds:.0f} s of scoring; written to {escape(places)}")


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """What went wrong, as a message on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo("Interrupted. The same command, without --fresh, goes on from here.", err=True)
        raise typer.Exit(code=INTERRUPTED) from stop
    except XsakeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(code=CANNOT_RUN) from error
    except OSError as error:
        typer.echo(f"A file cannot be written: {error}", err=True)
        raise typer.Exit(code=CANNOT_RUN) from error


def _evaluation() -> ModuleType:
    """The library behind the command, which needs more than the base install."""
    try:
        from xsake import evaluation
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models need more packages", got=error.name, fix="pip install 'xsake[model]'"
        ) from error
    return evaluation


def _subject(folder: Path, dtype: str) -> Any:
    """The model of a folder, ready to be evaluated."""
    from xsake.evaluation import Subject, identify
    from xsake.model.huggingface import load
    from xsake.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    loaded = load(folder, compute_dtype=dtype, param_dtype=dtype)
    opening = _opening(tokenizer.encode)
    return Subject(loaded.model, tokenizer.encode, identify(folder), dtype, opening)


def _opening(encode: Callable) -> tuple[int, ...]:
    """What the tokenizer puts before any text: whatever comes before the text's own tokens."""
    bare, whole = encode("a").tolist(), encode("a", adds_special=True).tolist()
    starts = range(len(whole) - len(bare) + 1)
    return tuple(next((whole[:i] for i in starts if whole[i : i + len(bare)] == bare), []))


def _candidate(mask: str | None, layout: Path | None) -> Any:
    from xsake.evaluation import Candidate
    from xsake.layout import BlockLayout

    if mask is not None and layout is not None:
        raise ArgumentError(
            "one attention can be compared with dense attention at a time",
            got="--mask and --layout",
            expected="one of them",
        )
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


class _Screen(MovingLine):
    """Progress: one moving line on a terminal, a line per answer elsewhere."""

    def show(self, progress: Any) -> None:
        """What has just been measured, and how long the rest will take."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f"about {left:.0f} s to go"
        words = f"{to_go} [dim]{escape(progress.label)}[/]"
        self.update(progress.done, progress.total, words)
        if not self.console.is_terminal:
            nll = f"NLL {progress.dense_nll:.3f}"
            if progress.candidate_nll is not None:
                nll += f" dense, {progress.candidate_nll:.3f} candidate"
            times = f"{progress.elapsed_seconds:.0f} s, {to_go}" if progress.is_new else "known"
            line = f"{progress.done} of {progress.total}: {escape(progress.label)}: {nll}"
            self.console.print(f"{line} [dim]{times}[/]", soft_wrap=True)
