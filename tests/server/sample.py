"""Runs as training leaves them, without training; and a dashboard that really listens."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from xsake.observability import MetricsFile

TOKEN = "0123456789abcdefghijklmnopqrstuvwxyzABCDEF_"
PROGRAM = [sys.executable, "-c", "from xsake.cli import app; app()"]


def values(step, layers=2, heads=4):
    """What a step of a made-up run tells."""
    return {
        "wall": 1e9 + step, "loss": 10 * 0.99 ** (step / 10) + np.sin(step) / 10,
        "gradient_norm": 1.0 + step % 7, "learning_rate": 1e-3, "is_skipped": step % 50 == 49,
        "budget": 0.5, "failed_saves": 0, "tokens": 512, "tokens_per_second": 1000.0 + step % 3,
        "step_seconds": 0.5, "windows": [step], "note": "",
    }  # fmt: skip


def probe(step, layers=2, heads=4):
    """What a probe of a made-up run tells."""
    grid = np.arange(layers * heads).reshape(layers, heads)
    return {
        "entropy": (grid / 4 + step % 5).tolist(), "kept_mass": (1 - grid / 100).tolist(),
        "drift": 1.25, "heads_lost": 1,
    }  # fmt: skip


def write_run(folder, steps, *, begin=0, name="made-up", ending=None, probe_every=100):
    """Steps of a run; more of them if it is called again."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.began(begin, name=name, steps=10_000, layers=2, heads=4)
    for step in range(begin, steps):
        metrics.add(step, **values(step))
        if probe_every and step % probe_every == probe_every - 1:
            metrics.add(step, **probe(step))
    if ending:
        metrics.ended(ending)
    return metrics


class Served:
    """A server that listens, and requests to it.

    Args:
        place: its address.
        process: itself.
        token: that requests know.
    """

    def __init__(self, place, process, token):
        self.place, self.process, self.token = place, process, token

    def ask(self, path, *, token=True, method="GET", headers=None, data=None):
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

    def json(self, path):
        """What the API answers."""
        status, _, body = self.ask(f"/api/v1{path}")
        assert status == 200, (path, status, body)
        return json.loads(body)

    def run(self):
        """The only run that there is."""
        [found] = self.json("/runs")
        return found

    def until(self, is_so, what, seconds=120.0):
        """Wait for something; what it was."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError, AssertionError, ValueError):
                if found := is_so():
                    return found
            time.sleep(0.05)
        raise AssertionError(f"never came: {what}")


@contextlib.contextmanager
def served(*folders, token=TOKEN, options=(), token_folder=None):
    """`xsake serve` as people start it, on a free port of the loopback."""
    given = ["--no-token"]
    if token:
        file = Path(token_folder or folders[0].parent) / "token"
        file.write_text(token)
        given = ["--token-file", str(file)]
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
        made.until(lambda: all(run["is_indexed"] for run in made.json("/runs")), "an index")
        yield made
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def inside(settings):
    """A dashboard in a thread of this process, where every type is checked."""
    import uvicorn

    from xsake.server.app import Dashboard

    dashboard = Dashboard(settings)
    config = uvicorn.Config(
        dashboard, host="127.0.0.1", port=0, log_level="error", ws="none", http="h11",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server, listening = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    made = Served(f"http://127.0.0.1:{listening.getsockname()[1]}", None, settings.token)
    made.dashboard = dashboard
    try:
        made.until(lambda: made.ask("/ready")[0] == 200, "ready")
        yield made
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
