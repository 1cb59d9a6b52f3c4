"""`xsake report`: write the HTML report of a plan."""

import json
from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake.cli.errors import exit_codes
from xsake.cli.load import load_profile
from xsake.cli.options import PlanFile
from xsake.cli.progress import echo, escape_markup


def run_report(
    plan: PlanFile,
    profile: Annotated[
        Path | None, typer.Option(help="Profile; default PLAN.profile.json, if it exists.")
    ] = None,
    comparison: Annotated[
        Path | None, typer.Option(help="Rows of a policy comparison (.jsonl) to include.")
    ] = None,
    bounds: Annotated[
        Path | None, typer.Option(help="JSON file of bound measurements to include.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output page; default PLAN.html.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Also write PNG figures to this folder.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; writes no page without -o.")
    ] = False,
) -> None:
    """Write an HTML report of a plan: calibration, budget per head, comparison of policies.

    The page is a single HTML file without scripts or network access. Exit code 0 on success, 2 if
    the command cannot run.
    """
    with exit_codes():
        from xsake.hads import SparsityPlan
        from xsake.reports import plan_report as report

        figures = report.ReportData(
            SparsityPlan.load(plan),
            load_profile(plan, profile),
            () if comparison is None else report.read_comparisons(comparison),
            None if bounds is None else report.read_bounds(bounds),
        )
        images = () if png is None else report.draw(figures, png)
        page = out or (None if as_json else plan.with_suffix(".html"))
        size = 0 if page is None else report.write(figures, page)
    if as_json:
        echo(json.dumps(figures.to_dict(), indent=1, ensure_ascii=False))
        return
    written = " and ".join(escape_markup(path) for path in (page, *images))
    rich.console.Console().print(f"{size / 1e3:,.0f} kB, written to {written}", soft_wrap=True)
