"""Runs as training leaves them, without training; and a dashboard that really listens."""

import contextlib
import itertools
import threading

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.observability.serving import TOKEN, Served, served
from xsake.observability import MetricsFile

__all__ = ["TOKEN", "served"]


def values(step):
    """Metrics of a step of a made-up run."""
    return {
        "wall": 1e9 + step, "loss": 10 * 0.99 ** (step / 10) + np.sin(step) / 10,
        "gradient_norm": 1.0 + step % 7, "learning_rate": 1e-3, "is_skipped": step % 50 == 49,
        "budget": 0.5, "failed_saves": 0, "tokens": 512, "tokens_per_second": 1000.0 + step % 3,
        "step_seconds": 0.5, "windows": [step], "note": "",
    }  # fmt: skip


def probe(step):
    """Metrics of a probe of a made-up run."""
    grid = np.arange(8).reshape(2, 4)
    return {
        "entropy": (grid / 4 + step % 5).tolist(), "attn_mass_recall": (1 - grid / 100).tolist(),
        "drift": 1.25, "drifted_heads": 1,
    }  # fmt: skip


def write_run(folder, steps, *, begin=0, name="made-up", ending=None, probe_every=100):
    """Steps of a run; more of them if it is called again."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.start_attempt(begin, name=name, steps=10_000, layers=2, heads=4)
    for step in range(begin, steps):
        metrics.add(step, **values(step))
        if probe_every and step % probe_every == probe_every - 1:
            metrics.add(step, **probe(step))
    if ending:
        metrics.end_attempt(ending)
    return metrics


@contextlib.contextmanager
def keep_writing(metrics, step, *, is_poisoned=lambda: False):
    """Steps of a run, five a second and a probe now and then, until the event is set."""
    stopped = threading.Event()

    def write():
        for number in itertools.count(step):
            if stopped.wait(0.2):
                return
            metrics.add(number, **{**values(number), "is_skipped": is_poisoned()})
            if number % 10 == 0:
                metrics.add(number, **probe(number))

    thread = threading.Thread(target=write)
    thread.start()

    def stop():
        stopped.set()
        thread.join()

    try:
        yield stop
    finally:
        stop()


def samples(server, metric, /, **labels):
    """All values of a Prometheus metric with these labels."""
    families = text_string_to_metric_families(server.ask("/metrics")[2].decode())
    named = [x for family in families for x in family.samples if x.name == f"xsake_{metric}"]
    return [x.value for x in named if labels.items() <= x.labels.items()]


def sample(server, metric, /, **labels):
    """The only one of them."""
    [value] = samples(server, metric, **labels)
    return value


@contextlib.contextmanager
def inside(settings):
    """A dashboard in a thread of this process, where every type is checked."""
    import uvicorn

    from xsake.server.app import Dashboard
    from xsake.server.security import make_config

    dashboard = Dashboard(settings)
    config = make_config(dashboard, settings)
    config.log_level, config.timeout_graceful_shutdown = "error", 1
    config.configure_logging()
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
