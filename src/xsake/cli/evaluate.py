"""`xsake evaluate`: perplexity, far copies, tasks and divergence from dense attention."""

from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import rich.console
import typer

from xsake.cli.errors import exit_codes
from xsake.cli.load import (
    import_extra,
    load_candidate,
    load_eval_model,
    parse_density,
    parse_ints,
)
from xsake.cli.options import AsJson, ModelDtype, ModelFolder, NoResume, PlotFile, TextFiles
from xsake.cli.progress import ProgressBar, echo, escape_markup
from xsake.errors import ArgumentError

_CHAT = "Prompts are messages of a user: apply the checkpoint's chat template."
_CODE = "Source code of find_definition: .py files and folders; default: the standard library."
_CONTEXT = "Comma-separated tokens per window, or of prompt and answer."
_DOCUMENTS = "Maximum number of documents (shorter than --context: skipped)."
_GREEDY = "Prompts per task and context whose answer is also generated."
_MASK = 'Candidate mask, such as "window(1023, 0) | sinks(4)", or a .json file.'
_OUT = "Output report; default xsake-evaluation-MODEL.json, with --tasks xsake-tasks-MODEL.json."
_PAGES = "Share of the KV pages that decoding of --greedy reads by the plan; else all."
_TASKS = "Evaluate tasks instead of perplexity: comma-separated names, 'ruler' or 'all'."

_WITH_TASKS = "samples", "greedy", "chat", "code", "page_budget"
_WITHOUT_TASKS = "max_documents", "windows_per_document", "far_copy", "gaps", "far_copy_samples"


def run_evaluate(
    ctx: typer.Context,
    model: ModelFolder,
    text: TextFiles,
    context: Annotated[str, typer.Option(help=_CONTEXT)] = "2048",
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
    tasks: Annotated[str | None, typer.Option(help=_TASKS)] = None,
    samples: Annotated[int, typer.Option(help="Prompts per task and context.")] = 10,
    greedy: Annotated[int, typer.Option(help=_GREEDY)] = 2,
    chat: Annotated[bool, typer.Option("--chat", help=_CHAT)] = False,
    code: Annotated[list[Path] | None, typer.Option(help=_CODE)] = None,
    page_budget: Annotated[str | None, typer.Option(help=_PAGES)] = None,
    dtype: ModelDtype = "float32",
    seed: Annotated[int, typer.Option(help="Seed of passages, prompts and intervals.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help=_OUT)] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
    no_resume: NoResume = False,
) -> None:
    """Evaluate a model, and compare a candidate attention with dense attention.

    Perplexity with intervals over documents, NLL by position and far copies; with --mask, --layout
    or --plan also the divergence from dense attention. With --tasks, tasks with long prompts
    instead: answers by teacher forcing and by greedy decoding. An interrupted run resumes from the
    results cached next to the report. Exit code 0 on success, 2 if the command cannot run, 130
    after Ctrl-C.
    """
    kind = "evaluation" if tasks is None else "tasks"
    out = out or Path(f"xsake-{kind}-{model.resolve().name}.json")
    console = rich.console.Console(quiet=as_json)
    with exit_codes():
        _check_options(ctx, tasks)
        evaluation = import_extra("xsake.evaluation")
        common = {"contexts": parse_ints("--context", context), "seed": seed}
        inputs = {"texts": evaluation.read_texts(text)}
        if tasks is None:
            inputs["settings"] = evaluation.EvaluationSettings(
                documents=max_documents, windows_per_document=windows_per_document,
                gaps=parse_ints("--gaps", gaps) if far_copy else (),
                far_copy_samples=far_copy_samples, **common,
            )  # fmt: skip
        else:
            inputs["settings"] = evaluation.TaskSettings(
                tasks=evaluation.parse_tasks(tasks), samples=samples, greedy=greedy,
                page_budget=page_budget and parse_density(page_budget, "--page-budget"), **common,
            )  # fmt: skip
            inputs |= _load_prompt_parts(evaluation, model, code, chat=chat)
        inputs["candidate"] = load_candidate(mask, plan, layout)
        inputs["eval_model"] = load_eval_model(model, dtype)
        report = _run(evaluation, kind, inputs, out, console, overwrite=no_resume)
        if plot is not None:
            (evaluation.draw if tasks is None else evaluation.draw_tasks)(report, plot)
    if as_json:
        echo(report.model_dump_json(indent=1))
        return
    paths = " and ".join(str(path) for path in (out, plot) if path is not None)
    console.print((evaluation.report_view if tasks is None else evaluation.task_view)(report))
    console.print(f"{report.seconds:.0f} s of scoring; written to {escape_markup(paths)}")


def _run(
    evaluation: ModuleType, kind: str, inputs: dict[str, Any], out: Path,
    console: rich.console.Console, *, overwrite: bool,
) -> Any:  # fmt: skip
    """Evaluate with results cached next to the report, and write the report."""
    run = evaluation.evaluate if kind == "evaluation" else evaluation.evaluate_tasks
    suffix = ".windows.jsonl" if kind == "evaluation" else ".prompts.jsonl"
    cache = evaluation.ResultCache(out.with_suffix(suffix), overwrite=overwrite)
    with ProgressBar(console, "tokenizing, compiling") as bar:
        report = run(**inputs, cache=cache, on_progress=bar.show)
    evaluation.write_report(report, out)
    return report


def _check_options(ctx: typer.Context, tasks: str | None) -> None:
    """Raise for options of the other kind of evaluation."""
    refused = _WITH_TASKS if tasks is None else _WITHOUT_TASKS
    sources = {name: ctx.get_parameter_source(name) for name in refused}
    given = [name for name, x in sources.items() if x is not None and x.name == "COMMANDLINE"]
    if given:
        needed = "only with --tasks" if tasks is None else "not with --tasks"
        raise ArgumentError(
            "evaluate-options", "options of the other kind of evaluation",
            got=", ".join(f"--{name.replace('_', '-')}" for name in given), expected=needed,
        )  # fmt: skip


def _load_prompt_parts(
    evaluation: ModuleType, model: Path, code: list[Path] | None, *, chat: bool
) -> dict[str, Any]:
    """Return what prompts are made of in addition to texts."""
    from xsake.model.chat import ChatTemplate

    return {
        "code": evaluation.read_code(code) if code else None,
        "template": ChatTemplate.load(model) if chat else None,
    }
