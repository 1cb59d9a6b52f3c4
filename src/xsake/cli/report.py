"""`xsake report`: its arguments and where the page goes; the figures are made elsewhere."""

import json
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer

from xsake.cli.exits import exit_codes
from xsake.cli.screen import echo, escape_markup

PROFILE = ".profile.json"  # in the place of a plan's suffix


def run_report(
    plan: Annotated[Path, typer.Argument(help="A plan, as `xsake calibrate` makes it.")],
    profile: Annotated[
        Path | None, typer.Option(help="Its profile; default PLAN.profile.json, if it is there.")
    ] = None,
    ladder: Annotated[
        Path | None, typer.Option(help="Rows of a policy comparison, .jsonl, to be shown as well.")
    ] = None,
    bounds: Annotated[
        Path | None, typer.Option(help="A JSON file of figures about bounds, likewise.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; default PLAN.html.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw PNGs into this folder too.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the figures and nothing else; no page without -o."),
    ] = False,
) -> None:
    """Show a plan as one page: what was calibrated, what every head keeps, how rules compare.

    The page is one HTML file that needs no network and no script. Exit code 0 if it is written,
    2 if it cannot be.
    """
    with exit_codes():
        from xsake.hads import SparsityPlan, report

        figures = report.Figures(
            SparsityPlan.load(plan),
            profile_of(plan, profile),
            () if ladder is None else report.read_ladder(ladder),
            None if bounds is None else report.read_bounds(bounds),
        )
        places = () if png is None else report.draw(figures, png)
        page = out or (None if as_json else plan.with_suffix(".html"))
        size = 0 if page is None else report.write(figures, page)
    if as_json:
        echo(json.dumps(figures.to_dict(), indent=1, ensure_ascii=False))
        return
    written = " and ".join(escape_markup(str(place)) for place in (page, *places))
    rich.console.Console().print(f"{size / 1e3:,.0f} kB, written to {written}", soft_wrap=True)


def profile_of(plan: Path, profile: Path | None) -> Any:
    """The named profile, or the one beside the plan; None where there is none.

    Args:
        plan: its file.
        profile: its file, if it was named.
    """
    from xsake.hads import Profile

    beside = plan.with_suffix(PROFILE)
    if profile is None and not beside.exists():
        return None
    return Profile.load(profile or beside)
