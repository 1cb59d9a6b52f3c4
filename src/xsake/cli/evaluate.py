"""`xsake evaluate`: perplexity, far copies and divergence from dense attention."""

from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake.cli.errors import exit_codes
from xsake.cli.load import import_extra, load_candidate, load_eval_model, parse_ints
from xsake.cli.options import AsJson, ModelDtype, ModelFolder, NoResume, PlotFile, TextFiles
from xsake.cli.progress import ProgressBar, echo, escape_markup

_MASK = 'Candidate mask, such as "window(1023, 0) | sinks(4)", or a .json file.'
_DOCUMENTS = "Maximum number of documents (shorter than --context: skipped)."
_OUT = "Output report; default xsake-evaluation-MODEL.json."


def run_evaluate(
    model: ModelFolder,
    text: TextFiles,
    context: Annotated[str, typer.Option(help="Comma-separated tokens per window.")] = "2048",
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    layout: Annotated[Path | None, typer.Option(help="Candidate block layout (.json).")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Candidate plan written by `xsake calibrate`.")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(help=_DOCUMENTS)] = None,
    windows_per_document: Annotated[int, typer.Option(help="Consecutive, from the start.")] = 1,
    far_copy: Annotated[bool, typer.Option(help="Also score copies of passages.")] = True,
    gaps: Annotated[str, typer.Option(help="Tokens between the copies.")] = "512,2048,4096",
    far_copy_samples: Annotated[int, typer.Option(help="Number of copied passages.")] = 2,
    dtype: ModelDtype = "float32",
    seed: Annotated[int, typer.Option(help="Seed of passages and bootstrap intervals.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help=_OUT)] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
    no_resume: NoResume = False,
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
        evaluation = import_extra("xsake.evaluation")
        settings = evaluation.EvaluationSettings(
            contexts=parse_ints("--context", context),
            documents=max_documents,
            windows_per_document=windows_per_document,
            gaps=parse_ints("--gaps", gaps) if far_copy else (),
            far_copy_samples=far_copy_samples,
            seed=seed,
        )
        texts = evaluation.read_texts(text)
        candidate = load_candidate(mask, plan, layout)
        subject = load_eval_model(model, dtype)
        cache = evaluation.ResultCache(out.with_suffix(".windows.jsonl"), overwrite=no_resume)
        with ProgressBar(console, "tokenizing, compiling") as bar:
            report = evaluation.evaluate(
                subject, texts, settings, candidate=candidate, cache=cache, on_progress=bar.show
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
