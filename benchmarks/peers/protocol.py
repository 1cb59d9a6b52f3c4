"""The worker's side of the line protocol: one JSON request in, one JSON reply out, one at a time.

    python -m benchmarks.peers.protocol torch_worker --threads 2

An adapter is a module with `versions() -> dict`, `start(threads)` and `prepare(arrays, case)`,
which returns a `Prepared`. Requests: `load` (folder of .npy inputs), `compile` (a case, under a
name), `run` (seconds of one call), `check` (outputs into one .npz), `close`. Runs on Python 3.11
and NumPy alone.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prepared:
    """A case ready to run: `run` waits for its result, `fetch` names its `[B, T, H, D]` arrays."""

    run: Callable[[], Any]
    fetch: Callable[[Any], dict[str, np.ndarray]]
    facts: dict[str, Any] = field(default_factory=dict)


GEMM_SIZE = 2048
READ_SIZE = 2**26
"""Rows and columns of the bare matrix product, floats of the array that is read once."""
QUICK_SECONDS = 1.0
"""A call that takes less is made twice and the second one counts: a process that waited for others
comes back to cold memory, which would be most of a quick call, and nothing of a slow one."""


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Session:
    """What one worker holds: its inputs and its prepared cases."""

    def __init__(self, adapter: Any):
        self.adapter = adapter
        self.arrays: dict[str, np.ndarray] = {}
        self.prepared: dict[str, Prepared] = {}
        self.first: dict[str, Any] = {}  # what cases found when compiled, until they are checked

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request."""
        match request["op"]:
            case "load":
                self.arrays = {
                    file.stem: np.load(file) for file in Path(request["folder"]).glob("*.npy")
                }
                return {"arrays": sorted(self.arrays)}
            case "compile":
                start = time.perf_counter()
                prepared = self.adapter.prepare(self.arrays, request["case"])
                self.first[request["name"]] = prepared.run()
                self.prepared[request["name"]] = prepared
                return {"compile_seconds": time.perf_counter() - start, **prepared.facts}
            case "run":
                run = self.prepared[request["name"]].run
                seconds = _timed(run)
                return {"seconds": _timed(run) if seconds < QUICK_SECONDS else seconds}
            case "check":
                name = request["name"]
                np.savez(request["file"], **self.prepared[name].fetch(self.first.pop(name)))
                return {"file": request["file"]}
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")


def use_cores(count: int) -> None:
    """Keep this process on `count` cores: runtimes that size their pools by the cores follow."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < count:
            raise SystemExit(f"{count} threads asked for, {len(cores)} cores there")
        os.sched_setaffinity(0, set(cores[:count]))


def main() -> None:
    """Serve requests from standard input until `close` or its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # Libraries may print: their words go to stderr, and only replies to the real stdout.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    use_cores(arguments.threads)  # before the library starts its threads
    adapter = importlib.import_module(f"benchmarks.peers.{arguments.adapter}")
    adapter.start(arguments.threads)
    versions = {"python": platform.python_version(), "numpy": np.__version__, **adapter.versions()}
    replies.write(json.dumps({"versions": versions}) + "\n")
    session = Session(adapter)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "close":
            break
        try:
            reply = session.answer(request)
        except Exception:  # noqa: BLE001 - the parent decides: the reply carries the whole story
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
