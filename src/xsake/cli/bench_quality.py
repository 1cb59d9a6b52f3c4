"""`xsake bench quality`: quality of plans and windows as a function of cost."""

import json
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.table import Table

from xsake._io import atomic_write
from xsake.cli.calibrate import parse_density
from xsake.cli.evaluate import EvaluationProgressBar
from xsake.cli.exits import exit_codes
from xsake.cli.subject import import_evaluation, load_eval_model


def run_quality(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help="Texts, as for xsake evaluate.")],
    profile: Annotated[Path, typer.Option(help="Profile written by `xsake calibrate`.")],
    context: Annotated[int, typer.Option(min=16, help="Tokens per document.")] = 4096,
    densities: Annotated[
        str, typer.Option(help="Comma-separated costs, block selection included.")
    ] = "50%,30%,20%",
    policy: Annotated[str, typer.Option(help="Allocation policy.")] = "effect",
    selector: Annotated[str, typer.Option(help="Block selector.")] = "sampled",
    max_documents: Annotated[int, typer.Option(min=1, help="Maximum number of documents.")] = 4,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output: one JSON line per point.")
    ] = Path("quality.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG.")] = None,
) -> None:
    """Measure the loss of a model at several costs: plans compared with windows of equal cost.

    An interrupted run resumes from the results cached next to the output.
    """
    console = rich.console.Console()
    with exit_codes():
        evaluation = import_evaluation()
        from xsake import hads
        from xsake.evaluation.frontier import Planner, frontier
        from xsake.evaluation.plot import draw_frontier

        planner = Planner(
            hads.Profile.load(profile), hads.make_policy(policy), hads.make_selector(selector)
        )
        settings = evaluation.EvaluationSettings(
            contexts=(context,), documents=max_documents, gaps=()
        )
        journal = evaluation.ResultCache(out.with_suffix(".windows.jsonl"))
        with EvaluationProgressBar(console, "cutting texts, compiling") as bar:
            points = frontier(
                load_eval_model(model, "float32"), evaluation.read_texts(text), settings, planner,
                [parse_density(text) for text in densities.split(",")],
                cache=journal, on_progress=bar.show,
            )  # fmt: skip
        atomic_write(out, "".join(json.dumps(point.row()) + "\n" for point in points))
        if plot is not None:
            draw_frontier(points, plot)
    console.print(_table(points))
    console.print(f"written to {out}", highlight=False)


def _table(points: list[Any]) -> Table:
    table = Table("attention", "cost", "perplexity", "gap, 95%", "KL", "same token")
    for point in points:
        scores = point.report.contexts[0]
        compared, dense = scores.comparison, scores.perplexity.value
        gap = compared.perplexity_difference
        shares = [None if x is None else x / dense for x in (gap.value, gap.low, gap.high)]
        interval = " ".join("" if x is None else f"{x:+.2%}" for x in shares)
        table.add_row(
            point.name, f"{point.effective:.1%}", f"{compared.perplexity.value:.2f}", interval,
            f"{compared.kl.value:.4f}", f"{compared.agreement.value:.1%}",
        )  # fmt: skip
    return table
