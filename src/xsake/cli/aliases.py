"""Old names of renamed options, still accepted but not shown by --help."""

import copy
import functools
from typing import Any

import typer
import typer.core

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
