"""Metrics of steps, probes and evaluations: metrics file, trackers and progress callback."""

import hashlib
import time
from typing import Any

from xsake.observability import AsyncTrackers, MetricsFile
from xsake.observability.trackers import RunInfo, make_trackers
from xsake.training import processes
from xsake.training.config import TrainingConfig
from xsake.training.progress import ProgressCallback, TrainingProgress
from xsake.training.step import StepMetrics


def make_fan(config: TrainingConfig) -> AsyncTrackers:
    """Return the trackers of a run; other processes than the primary have none."""
    if not processes.is_primary():
        return AsyncTrackers({})
    subject = RunInfo(
        project=config.track.project, name=config.run.name, run_id=_run_id(config),
        folder=config.checkpoint.folder / "trackers", is_online=config.track.is_online,
        settings=config.to_json(),
    )  # fmt: skip
    trackers = make_trackers(config.track.trackers, subject)
    return AsyncTrackers(trackers, seconds=config.track.min_interval_s)


def _run_id(config: TrainingConfig) -> str:
    """Return an ID from the path of the run's folder; all attempts of a run share it."""
    return hashlib.sha256(str(config.checkpoint.folder.resolve()).encode()).hexdigest()[:16]


class MetricsLogger:
    """Writer of metrics and sender of progress events.

    Args:
        config: of the run.
        metrics_file: of the run.
        fan: trackers.
        on_progress: called every `run.log_interval` steps.
        first_step: of this attempt.
    """

    def __init__(
        self,
        config: TrainingConfig,
        metrics_file: MetricsFile,
        fan: AsyncTrackers,
        on_progress: ProgressCallback,
        first_step: int,
    ):
        self._config, self._metrics, self._fan = config, metrics_file, fan
        self._on_progress = on_progress
        self._since, self._tokens, self._note = time.monotonic(), 0, ""
        self._last_logged = first_step - 1
        self._last_end: float | None = None
        run, decoder = config.run, config.model.decoder
        metrics_file.start_attempt(
            first_step, name=run.name, steps=run.steps, layers=decoder.layers,
            heads=decoder.q_heads, attention=config.attention.kind,
        )  # fmt: skip

    def add_note(self, text: str) -> None:
        """Add text to the next line of metrics."""
        self._note = f"{self._note}; {text}" if self._note else text

    def log_evaluation(self, number: int, loss: float) -> None:
        """Log the validation loss after a step, nats per token."""
        self._add(number, {"validation_loss": loss})
        self.add_note(f"validation loss {loss:.4f}")

    def log_probe(self, number: int, metrics: dict[str, Any]) -> None:
        """Log the metrics of a probe after a step, by name."""
        self._add(number, metrics)
        if metrics.get("attn_mass_recall"):
            masses = [mass for layer in metrics["attn_mass_recall"] for mass in layer]
            self.add_note(f"attention mass recall {sum(masses) / len(masses):.4f}")

    def log_end(self, status: str) -> None:
        """Log the end of this attempt."""
        self._metrics.end_attempt(status)

    def log_step(
        self, number: int, metrics: StepMetrics, budget: float | None, failed_saves: int
    ) -> None:
        """Log a finished step, and send a progress event if one is due."""
        run, now = self._config.run, time.monotonic()
        values = {
            "loss": float(metrics.loss),
            "gradient_norm": float(metrics.gradient_norm),
            "learning_rate": float(metrics.learning_rate),
            "is_skipped": bool(metrics.is_skipped),
        }
        tokens = int(metrics.tokens)
        line: dict[str, Any] = {
            **values, "consecutive_skips": int(metrics.consecutive_skips), "budget": budget,
            "failed_saves": failed_saves, "tokens": tokens,
        }  # fmt: skip
        if self._last_end is not None:  # the first step includes compilation
            spent = max(now - self._last_end, 1e-9)
            line["step_seconds"] = round(spent, 6)
            line["tokens_per_second"] = round(tokens / spent, 3)
        self._last_end = now
        self._add(number, {**line, "note": self._note})
        self._tokens += tokens
        is_last = number + 1 == run.steps
        if not is_last and (not run.log_interval or (number + 1) % run.log_interval):
            return
        if processes.is_primary():
            spent = max(now - self._since, 1e-9)
            left = (run.steps - number - 1) * spent / (number - self._last_logged)
            speed = self._tokens / spent
            self._on_progress(TrainingProgress(number, run.steps, **values, budget=budget,
                                 tokens_per_second=speed, remaining_seconds=left,
                                 note=self._note))  # fmt: skip
            self._since, self._tokens, self._last_logged = now, 0, number
        self._note = ""

    def _add(self, number: int, values: dict[str, Any]) -> None:
        self._metrics.add(number, wall=round(time.time(), 3), **values)
        self._fan.log(number, values)
