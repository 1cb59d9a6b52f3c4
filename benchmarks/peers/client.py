"""The parent's side of the line protocol: one long-lived worker process per environment."""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
REPLY_SECONDS = 900


class WorkerError(RuntimeError):
    """A worker that failed or fell silent; the message carries its own traceback."""


class Worker:
    """A peer in its own process, asked one thing at a time; a context manager that ends it.

    Args:
        python: interpreter of the peer's environment.
        adapter: module name under `benchmarks.peers`.
        threads: cores it may use.
        is_isolated: keep our own PYTHONPATH out of a foreign environment.
        source: folder whose packages come first; None: as in this process.
        variables: of its environment, in addition.
    """

    def __init__(
        self,
        python: Path,
        adapter: str,
        *,
        threads: int,
        is_isolated: bool,
        source: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ):
        environment = dict(os.environ) | dict(variables or {})
        if is_isolated:
            environment.pop("PYTHONPATH", None)
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        self.adapter = adapter
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peers.protocol", adapter, "--threads", str(threads)],
            cwd=ROOT, env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self.versions: dict[str, str] = {}

    def __enter__(self) -> "Worker":
        try:
            self.versions = self._reply()["versions"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._send({"op": "close"})
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def load(self, folder: Path) -> None:
        """Give it every .npy of `folder` as an input named by its stem."""
        self.ask(op="load", folder=str(folder))

    def compile(self, name: str, case: dict[str, Any]) -> dict[str, Any]:
        """Prepare a case and run it once; returns `compile_seconds` and what the adapter knows."""
        return self.ask(op="compile", name=name, case=case)

    def run(self, name: str) -> float:
        """Seconds of one call, measured inside the worker until the result is there."""
        return float(self.ask(op="run", name=name)["seconds"])

    def check(self, name: str) -> dict[str, np.ndarray]:
        """The arrays `[B, T, H, D]` that a case found when it was compiled; they are given once."""
        with tempfile.TemporaryDirectory() as folder:
            file = self.ask(op="check", name=name, file=str(Path(folder, "out.npz")))["file"]
            with np.load(file) as outputs:
                return dict(outputs)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its reply; an error in the worker is raised here."""
        self._send(request)
        reply = self._reply()
        if "error" in reply:
            raise WorkerError(f"{self.adapter}, {request['op']}:\n{reply['error']}")
        return reply

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError as error:
            raise WorkerError(f"{self.adapter} ended:\n{self._last_words()}") from error

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A reply is one line and nothing follows it unasked, so readiness means a line is coming.
        ready, _, _ = select.select([self._process.stdout], [], [], REPLY_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            silent = "ended" if ready else f"said nothing for {REPLY_SECONDS} s"
            raise WorkerError(f"{self.adapter} {silent}:\n{self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]
