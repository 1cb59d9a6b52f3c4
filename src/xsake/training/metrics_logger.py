"""Metrics of steps, probes and evaluations: metrics file, trackers and progress callback."""

import hashlib
import time
from typing import Any

from xsake._progress import Progress, ProgressFn
from xsake.observability import AsyncTrackers, MetricsFile
from xsake.observability.trackers import RunInfo, make_trackers
from xsake.training.checkpointing import CheckpointStore
from xsake.training.config import TrainingConfig
from xsake.training.processes import is_primary
from xsake.training.step import StepMetrics


class MetricsLogger:
    """Writer of metrics and sender of progress events; only the primary process writes."""

    def __init__(self, config: TrainingConfig, on_progress: ProgressFn, first_step: int):
        run, decoder, folder = config.run, config.model.decoder, config.checkpoint.folder
        self._run, self._on_progress = run, on_progress
        self._metrics = MetricsFile(folder / "metrics.jsonl" if is_primary() else None)
        self._trackers = _start_trackers(config)
        self._since, self._tokens, self._note = time.monotonic(), 0, ""
        self._last_logged = first_step - 1
        self._last_end: float | None = None
        self._metrics.start_attempt(
            first_step, name=run.name, steps=run.steps, layers=decoder.layers,
            heads=decoder.q_heads, attention=config.attention.kind,
        )  # fmt: skip

    def close(self) -> None:
        """Finish the trackers."""
        self._trackers.finish()

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
        self, number: int, metrics: StepMetrics, budget: float | None, store: CheckpointStore
    ) -> None:
        """Log a finished step, and send a progress event if one is due."""
        run, now, tokens = self._run, time.monotonic(), int(metrics.tokens)
        line: dict[str, Any] = {
            "loss": float(metrics.loss),
            "gradient_norm": float(metrics.gradient_norm),
            "learning_rate": float(metrics.learning_rate),
            "is_skipped": bool(metrics.is_skipped),
            "consecutive_skips": int(metrics.consecutive_skips),
            "budget": budget,
            "failed_saves": store.count_failures() if is_primary() else 0,
            "tokens": tokens,
        }
        if metrics.indexer_loss is not None:
            line["indexer_loss"] = float(metrics.indexer_loss)
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
        if is_primary():
            spent = max(now - self._since, 1e-9)
            left = (run.steps - number - 1) * spent / (number - self._last_logged)
            parts = (
                f"loss {line['loss']:.4f}",
                f"{self._tokens / spent:,.0f} tokens/s",
                "skipped" if line["is_skipped"] else "",
                "" if budget in (None, 1.0) else f"{budget:.0%} of blocks",
                self._note,
            )
            label = ", ".join(part for part in parts if part)
            self._on_progress(Progress(number + 1, run.steps, label, remaining_seconds=left))
            self._since, self._tokens, self._last_logged = now, 0, number
        self._note = ""

    def _add(self, number: int, values: dict[str, Any]) -> None:
        self._metrics.add(number, wall=round(time.time(), 3), **values)
        self._trackers.log(number, values)


def _start_trackers(config: TrainingConfig) -> AsyncTrackers:
    if not is_primary():
        return AsyncTrackers({})
    folder = config.checkpoint.folder
    info = RunInfo(
        project=config.track.project, name=config.run.name, is_online=config.track.is_online,
        # All attempts of a run share the ID, which depends on the path of its folder.
        run_id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
        folder=folder / "trackers", settings=config.to_json(),
    )  # fmt: skip
    trackers = make_trackers(config.track.trackers, info)
    return AsyncTrackers(trackers, seconds=config.track.min_interval_s)
