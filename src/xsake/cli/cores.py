"""CPU affinity of a command."""

import os
from typing import Annotated

import typer

from xsake.errors import ArgumentError

NumThreads = Annotated[int | None, typer.Option(min=1, help="Number of CPU cores; default: all.")]


def set_cpu_affinity(num_threads: int | None) -> int:
    """Pin this process to `num_threads` cores and return their number; call before JAX starts."""
    if not hasattr(os, "sched_setaffinity"):
        return num_threads or os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if num_threads is not None:
        if num_threads > len(cores):
            raise ArgumentError(
                "too few CPU cores", got=num_threads, expected=f"at most {len(cores)}"
            )
        os.sched_setaffinity(0, set(cores[:num_threads]))
    return num_threads or len(cores)
