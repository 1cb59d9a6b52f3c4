"""`xsake audit`: attention mass that decoding by pages drops, certified and true."""

from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import typer

from xsake.cli.errors import FAILED, exit_codes
from xsake.cli.load import import_extra, load_eval_model, parse_density
from xsake.cli.options import AsJson, MaxDocuments, ModelDtype, ModelFolder, TextFiles
from xsake.cli.progress import ProgressBar, echo, escape_markup

_BUDGET = "Share of the KV pages that a decoding step reads, such as 20%."
_EPS = "Attention mass that a query may drop."
_OUT = "Output report; default xsake-audit-MODEL.json."
_PLAN = "Plan written by `xsake calibrate`; without it, all heads read the same share of pages."
_POSITIONS = "Audited tokens of each document, evenly spaced; 0: all."
_SELECTOR = "Page selector; default: that of decoding by the plan, int8 without one."


def run_audit(
    model: ModelFolder,
    text: TextFiles,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    page_budget: Annotated[str, typer.Option(help=_BUDGET)] = "20%",
    selector: Annotated[Literal["int8", "quest"] | None, typer.Option(help=_SELECTOR)] = None,
    eps: Annotated[float, typer.Option(help=_EPS)] = 0.1,
    context: Annotated[int, typer.Option(min=16, help="Tokens per document.")] = 4096,
    max_documents: MaxDocuments = 8,
    positions: Annotated[int, typer.Option(min=0, help=_POSITIONS)] = 64,
    dtype: ModelDtype = "float32",
    out: Annotated[Path | None, typer.Option("--out", "-o", help=_OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Audit decoding by pages: how much attention do the pages that are not read hold?

    Selects the pages of every head as decoding would, certifies the dropped attention mass of each
    query by int8 keys, and compares it with the true mass in float64. Exit code 0 if every
    certificate holds, 1 if one is violated, 2 if the command cannot run, 130 after Ctrl-C.
    """
    out = out or Path(f"xsake-audit-{model.resolve().name}.json")
    console = rich.console.Console(quiet=as_json)
    with exit_codes(interrupted="Interrupted. No result was saved."):
        evaluation = import_extra("xsake.evaluation")
        settings = evaluation.PageAuditSettings(context, max_documents, positions or None, eps)
        texts = evaluation.read_texts(text)
        selection = _load_selection(plan, parse_density(page_budget, "--page-budget"), selector)
        with ProgressBar(console, "loading, tokenizing, compiling") as bar:
            subject = load_eval_model(model, dtype)
            report = evaluation.audit_pages(
                subject, texts, selection, settings, on_progress=bar.show
            )
        evaluation.write_report(report, out)
    if as_json:
        echo(report.model_dump_json(indent=1))
    else:
        console.print(evaluation.audit_view(report))
        console.print(f"{report.seconds:.0f} s; written to {escape_markup(out)}", soft_wrap=True)
    if report.total.violations:
        raise typer.Exit(code=FAILED)


def _load_selection(plan: Path | None, budget: float, name: str | None) -> Any:
    """Return the selection of pages: by a plan, or one share for all heads."""
    from xsake.cache import Int8Keys, Quest
    from xsake.evaluation import UniformPages
    from xsake.hads import PlanDecoding, SparsityPlan

    selector = None if name is None else Int8Keys() if name == "int8" else Quest()
    if plan is not None:
        return PlanDecoding(SparsityPlan.load(plan), budget, selector)
    return UniformPages(budget, selector or Int8Keys())
