"""Tells what steps, probes and evaluations found: the metrics file, trackers, and who watches."""

import hashlib
import time
from typing import Any

from xsake.observability import Fan, MetricsFile
from xsake.observability.trackers import Subject, make_trackers
from xsake.training import processes
from xsake.training.config import TrainingConfig
from xsake.training.progress import Progress, Watch
from xsake.training.step import Metrics


def fan_of(config: TrainingConfig) -> Fan:
    """The trackers of a run; those of the first process only."""
    if not processes.is_first():
        return Fan({})
    subject = Subject(
        project=config.track.project, name=config.run.name, run_id=_run_id(config),
        folder=config.checkpoint.folder / "trackers", is_online=config.track.is_online,
        settings=config.to_json(),
    )  # fmt: skip
    trackers = make_trackers(config.track.trackers, subject)
    return Fan(trackers, seconds=config.track.seconds)


def _run_id(config: TrainingConfig) -> str:
    """The same for all lives of a run, which is where its folder is."""
    return hashlib.sha256(str(config.checkpoint.folder.resolve()).encode()).hexdigest()[:16]


class Teller:
    """Writes what steps say, and tells whoever watches.

    Args:
        config: of the run.
        metrics: its file.
        fan: its trackers.
        watch: told about every step that `run.log_every` names.
        begin: the first step of this life.
    """

    def __init__(
        self, config: TrainingConfig, metrics: MetricsFile, fan: Fan, watch: Watch, begin: int
    ):
        self._config, self._metrics, self._fan, self._watch = config, metrics, fan, watch
        self._since, self._tokens, self._note = time.monotonic(), 0, ""
        self._last_told = begin - 1
        self._last_end: float | None = None
        run, decoder = config.run, config.model.decoder
        metrics.began(
            begin, name=run.name, steps=run.steps, layers=decoder.layers, heads=decoder.q_heads,
            attention=config.attention.kind,
        )  # fmt: skip

    def note(self, words: str) -> None:
        """Something that the next line says too."""
        self._note = f"{self._note}; {words}" if self._note else words

    def evaluated(self, number: int, loss: float) -> None:
        """The loss on other text after a step, nats per token."""
        self._add(number, {"validation_loss": loss})
        self.note(f"validation loss {loss:.4f}")

    def probed(self, number: int, found: dict[str, Any]) -> None:
        """What a probe found after a step, by the names of metrics."""
        self._add(number, found)
        if found.get("kept_mass"):
            masses = [mass for layer in found["kept_mass"] for mass in layer]
            self.note(f"kept mass {sum(masses) / len(masses):.4f}")

    def ended(self, ending: str) -> None:
        """This life is over."""
        self._metrics.ended(ending)

    def step(
        self,
        number: int,
        found: Metrics,
        budget: float | None,
        failed_saves: int,
    ) -> None:
        """A step has been done."""
        run, now = self._config.run, time.monotonic()
        values = {
            "loss": float(found.loss),
            "gradient_norm": float(found.gradient_norm),
            "learning_rate": float(found.learning_rate),
            "is_skipped": bool(found.is_skipped),
        }
        tokens = int(found.tokens)
        line: dict[str, Any] = {
            **values, "skips": int(found.skips), "budget": budget, "failed_saves": failed_saves,
            "tokens": tokens,
        }  # fmt: skip
        if self._last_end is not None:  # the first one is compiled too
            spent = max(now - self._last_end, 1e-9)
            line["step_seconds"] = round(spent, 6)
            line["tokens_per_second"] = round(tokens / spent, 3)
        self._last_end = now
        self._add(number, {**line, "note": self._note})
        self._tokens += tokens
        is_last = number + 1 == run.steps
        if not is_last and (not run.log_every or (number + 1) % run.log_every):
            return
        if processes.is_first():
            spent = max(now - self._since, 1e-9)
            left = (run.steps - number - 1) * spent / (number - self._last_told)
            speed = self._tokens / spent
            self._watch(Progress(number, run.steps, **values, budget=budget,
                                 tokens_per_second=speed, remaining_seconds=left,
                                 note=self._note))  # fmt: skip
            self._since, self._tokens, self._last_told = now, 0, number
        self._note = ""

    def _add(self, number: int, values: dict[str, Any]) -> None:
        self._metrics.add(number, wall=round(time.time(), 3), **values)
        self._fan.log(number, values)
