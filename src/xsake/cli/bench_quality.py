"""`xsake bench quality`: its arguments and its table; the evaluations are made elsewhere."""

import json
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.table import Table

from xsake._io import atomic_write
from xsake.cli.calibrate import share_of
from xsake.cli.evaluate import EvaluationScreen
from xsake.cli.exits import exit_codes
from xsake.cli.subject import evaluation_library, subject_of


def run_quality(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    text: Annotated[list[Path], typer.Option(help="Texts, as for xsake evaluate.")],
    profile: Annotated[Path, typer.Option(help="As xsake calibrate writes it.")],
    context: Annotated[int, typer.Option(min=16, help="Tokens of every document.")] = 4096,
    budgets: Annotated[
        str, typer.Option(help="Costs, choosing included, with commas.")
    ] = "50%,30%,20%",
    policy: Annotated[str, typer.Option(help="How plans spend blocks.")] = "effect",
    selector: Annotated[str, typer.Option(help="What chooses them.")] = "sampled",
    documents: Annotated[int, typer.Option(min=1, help="The first so many.")] = 4,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A line of JSON for every point.")
    ] = Path("quality.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Draw it into this PNG.")] = None,
) -> None:
    """What a model loses at several costs: plans, beside windows that cost as much.

    An interrupted run goes on where it stopped: answers are kept beside the rows.
    """
    console = rich.console.Console()
    with exit_codes():
        evaluation = evaluation_library()
        from xsake import hads
        from xsake.evaluation.frontier import Planner, frontier
        from xsake.evaluation.plot import draw_frontier

        planner = Planner(
            hads.Profile.load(profile), hads.policy_named(policy), hads.selector_named(selector)
        )
        settings = evaluation.Settings(contexts=(context,), documents=documents, gaps=())
        journal = evaluation.Journal(out.with_suffix(".windows.jsonl"))
        with EvaluationScreen(console, "cutting texts, compiling") as screen:
            points = frontier(
                subject_of(model, "float32"), evaluation.read_texts(text), settings, planner,
                [share_of(word) for word in budgets.split(",")], journal=journal, watch=screen.show,
            )  # fmt: skip
        atomic_write(out, "".join(json.dumps(point.row()) + "\n" for point in points))
        if plot is not None:
            draw_frontier(points, plot)
    console.print(_table(points))
    console.print(f"written to {out}", highlight=False)


def _table(points: list[Any]) -> Table:
    table = Table("attention", "cost", "perplexity", "gap, 95%", "KL", "same token")
    for point in points:
        found = point.report.contexts[0]
        compared, dense = found.comparison, found.perplexity.value
        gap = compared.perplexity_difference
        shares = [None if x is None else x / dense for x in (gap.value, gap.low, gap.high)]
        told = " ".join("" if x is None else f"{x:+.2%}" for x in shares)
        table.add_row(
            point.name, f"{point.effective:.1%}", f"{compared.perplexity.value:.2f}", told,
            f"{compared.kl.value:.4f}", f"{compared.agreement.value:.1%}",
        )  # fmt: skip
    return table
