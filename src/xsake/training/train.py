"""Training loop: restore or initialize, then step, log, save and evaluate until the end."""

import contextlib
import dataclasses
import enum
import json
import logging
import math
import time
from typing import Any

import jax

from xsake._io import atomic_write
from xsake.errors import ArgumentError, CheckpointError
from xsake.observability import AsyncTrackers, MetricsFile
from xsake.observability.goodput import GoodputRecorder
from xsake.observability.profiler import Profiler, StepRange
from xsake.training import agreement, processes
from xsake.training.attention import KvOrder, TrainingAttention
from xsake.training.beginning import recalibrate, restore_or_init
from xsake.training.checkpoints import CheckpointStore, Lease, run_lock
from xsake.training.config import TrainingConfig
from xsake.training.data import Batch, TokenLoader
from xsake.training.fingerprints import find_mismatches
from xsake.training.guard import should_abort
from xsake.training.placing import DeviceSetup
from xsake.training.probe import Probes
from xsake.training.progress import ProgressCallback, SaveFailureCounter
from xsake.training.same_run import require_same_run
from xsake.training.state import TrainState, build_optimizer, define_model
from xsake.training.step import Step, StepMetrics, make_loss, make_step
from xsake.training.stopping import PreemptionHandler
from xsake.training.stragglers import StragglerDetector
from xsake.training.telling import MetricsLogger, make_fan

_LOG = logging.getLogger(__name__)


class RunStatus(enum.StrEnum):
    """Outcome of a training run."""

    DONE = "done"  # all steps
    STOPPED = "stopped"  # by a signal; the state is saved, the same command resumes


class TooManySkippedUpdatesError(ArgumentError):
    """Too many consecutive updates were skipped."""


class FinalSaveError(ArgumentError):
    """The final state could not be saved."""

    is_transient = True


class ReplicaMismatchError(ArgumentError):
    """Replicas of parameters differ; the newest checkpoint is older than the fault."""

    is_transient = True


def train(
    config: TrainingConfig,
    *,
    on_progress: ProgressCallback = lambda _: None,
    profile: StepRange | None = None,
    is_lock_forced: bool = False,
) -> RunStatus:
    """Train until all steps are done or a signal requests a stop; resume an interrupted run.

    With several processes, call `xsake.training.processes.start` first.

    Args:
        config: of the run.
        on_progress: called every `run.log_interval` steps, in the primary process only.
        profile: steps to trace, in the primary process.
        is_lock_forced: take the folder from any run that holds it, see `run_lock`.
    """
    folder, is_primary = config.checkpoint.folder, processes.is_primary()
    lease: Lease | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.exit_on_error())
        agreement.require(config)
        if is_primary:
            lock = run_lock(
                folder, is_forced=is_lock_forced, lease_seconds=config.checkpoint.lease_seconds
            )
            lease = stack.enter_context(lock)
            require_same_run(config, folder)
        processes.barrier("folder locked")
        goodput = stack.enter_context(
            GoodputRecorder(folder / "goodput.jsonl" if is_primary else None)
        )
        stacks = folder / f"stacks-{jax.process_index()}.txt"
        stop = stack.enter_context(
            PreemptionHandler(stack_file=stacks, step_timeout_s=config.run.step_timeout_s or None)
        )
        devices = DeviceSetup.from_config(config)
        loader = devices.loader(config)
        stack.callback(loader.close)
        section, save_failures = config.checkpoint, SaveFailureCounter()
        store = CheckpointStore(
            folder / "steps", max_to_keep=section.max_to_keep, verify=section.verify,
            on_failure=save_failures.record_failure,
        )  # fmt: skip
        stack.callback(store.close)
        with goodput.during("restore" if store.steps() else "init"):
            initial = restore_or_init(config, devices, store, loader)
        metrics = MetricsFile(folder / "metrics.jsonl" if is_primary else None)
        fan = make_fan(config)
        stack.callback(fan.finish)
        profiler = Profiler(folder, profile if is_primary else None)
        stack.callback(profiler.close)
        loop = _Loop(
            config, devices, store, loader, goodput, stop, metrics, fan, on_progress,
            initial.attention, save_failures, profiler, Probes(config, devices), lease,
            initial.kv_order,
        )  # fmt: skip
        return loop.run(initial.state)


@dataclasses.dataclass(eq=False)
class _Loop:
    """State of the training loop and its compiled steps."""

    config: TrainingConfig
    devices: DeviceSetup
    store: CheckpointStore
    loader: TokenLoader
    goodput: GoodputRecorder
    stop: PreemptionHandler
    metrics: MetricsFile
    fan: AsyncTrackers
    on_progress: ProgressCallback
    attention: TrainingAttention
    save_failures: SaveFailureCounter
    profiler: Profiler
    probes: Probes
    lease: Lease | None
    kv_order: KvOrder | None = None
    _steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    _skipped: list[int] = dataclasses.field(default_factory=list)
    _is_validation_verified: bool = False

    def run(self, state: TrainState) -> RunStatus:
        """Run all steps; metrics of a step are read while the next one runs."""
        start, end = int(state.step), self.config.run.steps
        logger = MetricsLogger(self.config, self.metrics, self.fan, self.on_progress, start)
        stragglers, pending, done = StragglerDetector(), None, time.monotonic()
        for number in range(start, end):
            with self.goodput.during("data"):
                batch = next(self.loader)
            step = self._step(number, state, batch)
            waited = 0.0
            self.profiler.before(number)
            with self.goodput.step(number):
                state, step_metrics = step(state, self.devices.put(batch.tokens))
                if pending is not None:
                    waited = self._check_step(*pending, logger)
                pending = number, batch, step_metrics
            self.profiler.after(number, step_metrics)
            if self._is_due(self.config.run.replica_check_interval, number):
                self._require_equal_replicas(state)
            is_over = self.stop.should_stop(number)
            is_save_due = self._is_due(self.config.checkpoint.save_interval, number)
            if is_over or number + 1 == end or is_save_due:
                with self.goodput.rest_of_step():
                    self._check_step(*pending, logger)
                pending = None
                self._save(state)
            done, before = time.monotonic(), done
            compared = stragglers.add(done - before - waited, waited)
            if compared is not None and compared.flagged:
                logger.add_note(str(compared))
            if is_over:
                return self._end(RunStatus.STOPPED, number + 1, logger)
            if self._is_due(self.config.run.eval_interval, number):
                with self.stop.without_timeout(), self.goodput.during("evaluation"):
                    logger.log_evaluation(number, self._evaluate(state, number))
            self._probe(number, state, batch, logger)
        return self._end(RunStatus.DONE, end, logger)

    def _step(self, number: int, state: TrainState, batch: Batch) -> Step:
        """Return the compiled step; recalibrate first if that is due."""
        if self.attention.is_calibration_due(number):
            with self.stop.without_timeout(), self.goodput.during("init"):
                profile = recalibrate(self.config, self.devices, state)
            self.attention = self.attention.replan(profile, self.config.model.decoder)
            self._steps.clear()
        level = self.attention.level(number)
        if level not in self._steps:
            definition = define_model(self.config)
            with self.stop.without_timeout(), self.goodput.during("init"):
                step = make_step(
                    self.config, definition, build_optimizer(self.config, definition),
                    self.attention.attends[level], self.devices.shardings,
                )  # fmt: skip
                tokens = self.devices.put(batch.tokens)
                self._steps[level] = step.lower(state, tokens).compile()
        return self._steps[level]

    def _check_step(
        self, number: int, batch: Batch, step_metrics: StepMetrics, logger: MetricsLogger
    ) -> float:
        """Log the metrics of a step; return the seconds spent waiting for them."""
        begin = time.monotonic()
        values = jax.device_get(step_metrics)
        waited = time.monotonic() - begin
        if self.lease is not None:
            self.lease.require()
        failed = self.save_failures.count(self.store) if processes.is_primary() else 0
        logger.log_step(number, values, self.attention.budget(number), failed)
        self._skipped = [*self._skipped, number] if values.is_skipped else []
        if should_abort(self.config.guard, skips := int(values.consecutive_skips)):
            self._write_skipped_steps(values)
            logger.log_end("failed")
            raise TooManySkippedUpdatesError(
                f"{skips} consecutive updates were skipped, the last at step {number}",
                got=f"loss {float(values.loss)}, gradient norm {float(values.gradient_norm)}",
                expected="finite numbers",
                fix=f"check windows {batch.windows[:8].tolist()}, or lower the learning rate; the "
                "newest checkpoint is older than these steps, refused.json lists them for a replay",
            )
        return waited

    def _write_skipped_steps(self, values: StepMetrics) -> None:
        """Write refused.json, which is enough to replay the skipped steps from the checkpoint."""
        if not processes.is_primary():
            return
        numbers = {"loss": float(values.loss), "gradient_norm": float(values.gradient_norm)}
        document = {
            "step": self._skipped[-1],
            "steps": self._skipped,
            "windows": [self.loader.window_ids(step).tolist() for step in self._skipped],
            "data_seed": self.config.data.seed,
            "checkpoint": max(self.store.steps(), default=None),
            "config": self.config.digest,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }
        atomic_write(self.config.checkpoint.folder / "refused.json", json.dumps(document) + "\n")

    def _save(self, state: TrainState) -> None:
        step = int(state.step)
        if self.lease is not None:
            self.lease.require(reread=True)
        with self.stop.without_timeout(), self.goodput.during("save"):
            if processes.is_primary():
                self.attention.save(self.config.checkpoint.folder / "profiles")
            extra: dict[str, Any] = {
                "data": self.loader.state(),
                "attention": self.attention.record(step),
                "config": json.loads(self.config.to_json()),
            }
            if self.kv_order is not None:
                extra["kv_order"] = [list(layer) for layer in self.kv_order]
            self.store.save(step, state, extra)

    def _end(self, status: RunStatus, step: int, logger: MetricsLogger) -> RunStatus:
        with self.goodput.during("save"):
            try:
                self.store.wait()
            except CheckpointError as error:
                if step not in self.store.steps():  # otherwise an earlier save failed
                    logger.log_end("failed")
                    raise FinalSaveError(
                        "the final state could not be saved", got=str(error).splitlines()[0],
                        fix="free disk space, then start the same command again",
                    ) from error  # fmt: skip
        logger.log_end(status)
        return status

    def _require_equal_replicas(self, state: TrainState) -> None:
        mismatches = find_mismatches(state.parameters)
        if mismatches:
            raise ReplicaMismatchError(
                "replicas of the parameters differ",
                got="; ".join(map(str, mismatches[:4])),
                expected="the same bits on every device",
                fix="resume from the newest checkpoint without the host that is named",
            )

    def _evaluate(self, state: TrainState, number: int) -> float:
        """Return the mean loss over the first validation batches, nats per token."""
        definition = define_model(self.config)
        loss_of = jax.jit(make_loss(self.config, definition, self.attention.attend(number)))
        verify = "size" if self._is_validation_verified else self.config.data.verify
        reader = self.devices.loader(self.config, split="validation", prefetch=0, verify=verify)
        total = count = 0.0
        with contextlib.closing(reader):
            for _ in range(self.config.run.eval_batches):
                tokens = self.devices.put(next(reader).tokens)
                loss, tokens_seen = jax.device_get(loss_of(state.parameters, tokens))
                total, count = total + float(loss), count + float(tokens_seen)
        self._is_validation_verified = True
        return total / count

    def _probe(self, number: int, state: TrainState, batch: Batch, logger: MetricsLogger) -> None:
        if self.attention.is_probe_due(number + 1):
            with self.stop.without_timeout(), self.goodput.during("evaluation"):
                metrics = self.probes.run(number, self.attention, state, batch.tokens)
                logger.log_probe(number, metrics)

    @staticmethod
    def _is_due(interval: int, number: int) -> bool:
        return bool(interval) and (number + 1) % interval == 0
