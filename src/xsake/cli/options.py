"""Options shared by several commands, and old names of renamed options."""

import copy
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

# Old names are accepted but not shown by --help.
RENAMED_OPTIONS = {
    "--budgets": "--densities",
    "--check": "--print-config",
    "--clients": "--max-clients",
    "--documents": "--max-documents",
    "--fresh": "--no-resume",
    "--healthy-seconds": "--reset-failures-after",
    "--ladder": "--comparison",
    "--most-restarts": "--max-restarts",
    "--rounds": "--repeats",
    "--threads": "--num-threads",
}


class _Command(typer.core.TyperCommand):
    """Command that accepts the old names of its options."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for param in self.params:
            old = [old for old, new in RENAMED_OPTIONS.items() if new in param.opts]
            if old:
                alias = copy.copy(param)
                alias.opts = old
                alias.add_to_parser(parser, ctx)
        return parser


class App(typer.Typer):
    """Typer app whose commands accept the old names of their options."""

    command = functools.partialmethod(typer.Typer.command, cls=_Command)


ModelFolder = Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")]
PlanFile = Annotated[Path, typer.Argument(help="Plan written by `xsake calibrate`.")]
TextFiles = Annotated[
    list[Path],
    typer.Option(help="A .txt, .raw or .jsonl file, or a folder of .txt files; repeatable."),
]
MaxDocuments = Annotated[
    int, typer.Option(min=1, help="Maximum number of documents (shorter than --context: skipped).")
]
ModelDtype = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Dtype of weights and activations.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
NoResume = Annotated[
    bool, typer.Option("--no-resume", help="Ignore cached results of an earlier run.")
]
PlotFile = Annotated[Path | None, typer.Option(help="Write a plot to this PNG.")]
RowsFile = Annotated[Path | None, typer.Option("--out", "-o", help="Append rows to this file.")]
NumThreads = Annotated[int | None, typer.Option(min=1, help="Number of CPU cores; default: all.")]
