"""A dashboard as people start it, requests to it, and how much memory it has."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TOKEN = "0123456789abcdefghijklmnopqrstuvwxyzABCDEF_"
PROGRAM = [sys.executable, "-c", "from xsake.cli import app; app()"]


class Served:
    """A server that listens, and requests to it.

    Args:
        place: its address.
        process: itself.
        token: that requests know.
    """

    def __init__(self, place: str, process: Any, token: str | None):
        self.place, self.process, self.token = place, process, token

    def ask(
        self,
        path: str,
        *,
        token: bool = True,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
    ) -> tuple[int, Any, bytes]:
        """(status, headers, body) of a request."""
        sent = dict(headers or {})
        if token and self.token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        asked = urllib.request.Request(self.place + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def json(self, path: str) -> Any:
        """What the API answers."""
        status, _, body = self.ask(f"/api/v1{path}")
        assert status == 200, (path, status, body)
        return json.loads(body)

    def run(self) -> dict[str, Any]:
        """The only run that there is."""
        [found] = self.json("/runs")
        return found

    def memory(self) -> dict[str, float]:
        """Megabytes that the server's process has now, and had at most."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        kilobytes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.MULTILINE))
        return {name: round(int(size) / 1024, 1) for name, size in kilobytes.items()}

    def until(self, is_so: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
        """Wait for something; what it was."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError, AssertionError, ValueError):
                if found := is_so():
                    return found
            time.sleep(0.05)
        raise AssertionError(f"never came: {what}")


@contextlib.contextmanager
def served(
    *folders: Path,
    token: str | None = TOKEN,
    options: Sequence[str] = (),
    token_folder: Path | None = None,
    patience: float = 120.0,
) -> Iterator[Served]:
    """`xsake serve` as people start it, on a free port of the loopback.

    Args:
        folders: to look in.
        token: that requests need; None: none.
        options: of the command.
        token_folder: where the token is written; by default next to the first folder.
        patience: seconds until the index of every run must be there; 0 waits for none.
    """
    given = ["--no-token"]
    if token:
        file = Path(token_folder or folders[0].parent) / "token"
        file.write_text(token)
        given = ["--token-file", str(file)]
    if "--showcase" not in options:
        given.append("--no-showcase")
    indexes = tempfile.TemporaryDirectory()
    if "--cache" not in options:
        given += ["--cache", indexes.name]
    command = [*PROGRAM, "serve", *map(str, folders), "--port", "0", *given, *options]
    kept = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=kept
    )
    try:
        words = process.stdout.readline()
        found = re.match(r"(http://[^/]+)/", words)
        assert found, words + process.stdout.read()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        made = Served(found[1], process, token)
        made.until(lambda: made.ask("/ready")[0] == 200, "ready")
        if patience:
            is_done = lambda: all(run["is_indexed"] for run in made.json("/runs"))
            made.until(is_done, "an index", patience)
        yield made
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        indexes.cleanup()
