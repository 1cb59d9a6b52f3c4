"""Keeps a command to the cores that it was given."""

import os
from typing import Annotated

import typer

from xsake.errors import ArgumentError

Threads = Annotated[int | None, typer.Option(min=1, help="Cores to keep to; default: all.")]


def keep_to(threads: int | None) -> int:
    """Keep this process to so many cores, before a library starts its threads; tells how many."""
    if not hasattr(os, "sched_setaffinity"):
        return threads or os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if threads is not None:
        if threads > len(cores):
            raise ArgumentError("there are not so many cores", got=threads, expected=len(cores))
        os.sched_setaffinity(0, set(cores[:threads]))
    return threads or len(cores)
