"""A training run from its first step, or its newest checkpoint, to its end: read it downwards."""

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
from xsake.observability import Fan, MetricsFile
from xsake.observability.goodput import Recorder
from xsake.observability.profiler import Profiler, StepRange
from xsake.training import agreement, processes
from xsake.training.attention import KvOrder, TrainingAttention
from xsake.training.beginning import begin, profiled
from xsake.training.checkpoints import CheckpointStore, Lease, run_lock
from xsake.training.config import TrainingConfig
from xsake.training.data import Batch, TokenLoader
from xsake.training.fingerprints import differences
from xsake.training.guard import is_hopeless
from xsake.training.placing import Devices
from xsake.training.probe import Probes
from xsake.training.progress import SaveAlarm, Watch
from xsake.training.same_run import require_same_run
from xsake.training.state import TrainState, define, optimizer_of
from xsake.training.step import Metrics, Step, make_loss, make_step
from xsake.training.stopping import StopRequest
from xsake.training.stragglers import StragglerWatch
from xsake.training.telling import Teller, fan_of

_LOG = logging.getLogger(__name__)


class Ending(enum.StrEnum):
    """How a run ended."""

    DONE = "done"  # all steps
    STOPPED = "stopped"  # a signal asked for it; all is saved, and the same command goes on


class HopelessError(ArgumentError):
    """Too many updates in a row were refused."""


class NotSavedError(ArgumentError):
    """The last state of a run could not be saved."""

    is_transient = True


class UnequalCopiesError(ArgumentError):
    """Copies of parameters differ; the newest checkpoint is from before."""

    is_transient = True


def train(
    config: TrainingConfig,
    *,
    watch: Watch = lambda _: None,
    profile: StepRange | None = None,
    is_lock_forced: bool = False,
) -> Ending:
    """Train until all steps are done or a signal asks to stop; goes on where a run was stopped.

    `xsake.training.processes.start` must come first where there are several processes.

    Args:
        config: the run.
        watch: told about every step that `run.log_every` names; in the first process only.
        profile: steps whose trace is kept, of the first process.
        is_lock_forced: take the folder from any run that holds it, see `run_lock`.
    """
    folder, is_first = config.checkpoint.folder, processes.is_first()
    lease: Lease | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.failing_at_once())
        agreement.require(config)
        if is_first:
            lock = run_lock(
                folder, is_forced=is_lock_forced, lease_seconds=config.checkpoint.lease_seconds
            )
            lease = stack.enter_context(lock)
            require_same_run(config, folder)
        processes.wait_for_all("the folder is ours")
        goodput = stack.enter_context(Recorder(folder / "goodput.jsonl" if is_first else None))
        stacks = folder / f"stacks-{jax.process_index()}.txt"
        stop = stack.enter_context(
            StopRequest(stacks=stacks, hang_seconds=config.run.hang_seconds or None)
        )
        devices = Devices.of(config)
        loader = devices.loader(config)
        stack.callback(loader.close)
        saved, alarm = config.checkpoint, SaveAlarm()
        store = CheckpointStore(
            folder / "steps", keep=saved.keep, verify=saved.verify, on_failure=alarm.ring
        )
        stack.callback(store.close)
        with goodput.during("restore" if store.steps() else "init"):
            first = begin(config, devices, store, loader)
        metrics = MetricsFile(folder / "metrics.jsonl" if is_first else None)
        fan = fan_of(config)
        stack.callback(fan.finish)
        profiler = Profiler(folder, profile if is_first else None)
        stack.callback(profiler.close)
        loop = _Loop(
            config, devices, store, loader, goodput, stop, metrics, fan, watch, first.attention,
            alarm, profiler, Probes(config, devices), lease, first.kv_order,
        )  # fmt: skip
        return loop.run(first.state)


@dataclasses.dataclass(eq=False)
class _Loop:
    """What the loop needs, and the programs that it has compiled."""

    config: TrainingConfig
    devices: Devices
    store: CheckpointStore
    loader: TokenLoader
    goodput: Recorder
    stop: StopRequest
    metrics: MetricsFile
    fan: Fan
    watch: Watch
    attention: TrainingAttention
    alarm: SaveAlarm
    profiler: Profiler
    probes: Probes
    lease: Lease | None
    kv_order: KvOrder | None = None
    _steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    _refused: list[int] = dataclasses.field(default_factory=list)
    _is_validation_verified: bool = False

    def run(self, state: TrainState) -> Ending:
        """One step after the other; what a step says is looked at while the next one runs."""
        begin, end = int(state.step), self.config.run.steps
        told = Teller(self.config, self.metrics, self.fan, self.watch, begin)
        stragglers, waiting, done = StragglerWatch(), None, time.monotonic()
        for number in range(begin, end):
            with self.goodput.during("data"):
                batch = next(self.loader)
            step = self._step(number, state, batch)
            waited = 0.0
            self.profiler.before(number)
            with self.goodput.step(number):
                state, found = step(state, self.devices.put(batch.tokens))
                if waiting is not None:
                    waited = self._look_at(*waiting, told)
                waiting = number, batch, found
            self.profiler.after(number, found)
            if self._is_due(self.config.run.check_replicas_every, number):
                self._require_equal_copies(state)
            is_over = self.stop.reached(number)
            if is_over or number + 1 == end or self._is_due(self.config.checkpoint.every, number):
                with self.goodput.rest_of_step():
                    self._look_at(*waiting, told)
                waiting = None
                self._save(state)
            done, before = time.monotonic(), done
            compared = stragglers.add(done - before - waited, waited)
            if compared is not None and compared.flagged:
                told.note(str(compared))
            if is_over:
                return self._ended(Ending.STOPPED, number + 1, told)
            if self._is_due(self.config.run.evaluate_every, number):
                with self.stop.patiently(), self.goodput.during("evaluation"):
                    told.evaluated(number, self._validation_loss(state, number))
            self._probe(number, state, batch, told)
        return self._ended(Ending.DONE, end, told)

    def _step(self, number: int, state: TrainState, batch: Batch) -> Step:
        """The program of a step; new plans are made first where they are due."""
        if self.attention.is_calibration_due(number):
            with self.stop.patiently(), self.goodput.during("init"):
                profile = profiled(self.config, self.devices, state)
            self.attention = self.attention.replanned(profile, self.config.model.decoder)
            self._steps.clear()
        level = self.attention.level(number)
        if level not in self._steps:
            definition = define(self.config)
            with self.stop.patiently(), self.goodput.during("init"):
                step = make_step(
                    self.config, definition, optimizer_of(self.config, definition),
                    self.attention.attends[level], self.devices.shardings,
                )  # fmt: skip
                tokens = self.devices.put(batch.tokens)
                self._steps[level] = step.lower(state, tokens).compile()
        return self._steps[level]

    def _look_at(self, number: int, batch: Batch, found: Metrics, told: Teller) -> float:
        """Tell what a step found; how long it had to be waited for, in seconds."""
        begin = time.monotonic()
        values = jax.device_get(found)
        waited = time.monotonic() - begin
        if self.lease is not None:
            self.lease.require()
        failed = self.alarm.count(self.store) if processes.is_first() else 0
        told.step(number, values, self.attention.budget(number), failed)
        self._refused = [*self._refused, number] if values.is_skipped else []
        if is_hopeless(self.config.guard, int(values.skips)):
            self._tell_refused(values)
            told.ended("failed")
            raise HopelessError(
                f"{int(values.skips)} updates in a row were refused, the last at step {number}",
                got=f"loss {float(values.loss)}, gradient norm {float(values.gradient_norm)}",
                expected="finite numbers",
                fix=f"look at windows {batch.windows[:8].tolist()}, or lower the learning rate; "
                "the newest checkpoint is from before, and refused.json has what to replay",
            )
        return waited

    def _tell_refused(self, values: Metrics) -> None:
        """What is needed to see it again: the same command goes on from the checkpoint."""
        if not processes.is_first():
            return
        numbers = {"loss": float(values.loss), "gradient_norm": float(values.gradient_norm)}
        told = {
            "step": self._refused[-1],
            "steps": self._refused,
            "windows": [self.loader.numbers(step).tolist() for step in self._refused],
            "data_seed": self.config.data.seed,
            "checkpoint": max(self.store.steps(), default=None),
            "config": self.config.digest,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }
        atomic_write(self.config.checkpoint.folder / "refused.json", json.dumps(told) + "\n")

    def _save(self, state: TrainState) -> None:
        step = int(state.step)
        if self.lease is not None:
            self.lease.require(is_fresh=True)
        with self.stop.patiently(), self.goodput.during("save"):
            if processes.is_first():
                self.attention.save(self.config.checkpoint.folder / "profiles")
            extra: dict[str, Any] = {
                "data": self.loader.state(),
                "attention": self.attention.record(step),
                "config": json.loads(self.config.to_json()),
            }
            if self.kv_order is not None:
                extra["kv_order"] = [list(layer) for layer in self.kv_order]
            self.store.save(step, state, extra)

    def _ended(self, ending: Ending, step: int, told: Teller) -> Ending:
        with self.goodput.during("save"):
            try:
                self.store.wait()
            except CheckpointError as error:
                if step not in self.store.steps():  # else it is about earlier saves, as the log was
                    told.ended("failed")
                    raise NotSavedError(
                        "the last state could not be saved", got=str(error).splitlines()[0],
                        fix="make room, then start the same command again",
                    ) from error  # fmt: skip
        told.ended(ending)
        return ending

    def _require_equal_copies(self, state: TrainState) -> None:
        found = differences(state.parameters)
        if found:
            raise UnequalCopiesError(
                "copies of the parameters that should be equal are not",
                got="; ".join(map(str, found[:4])),
                expected="the same bits on every device",
                fix="start again from the newest checkpoint, without the machine that is named",
            )

    def _validation_loss(self, state: TrainState, number: int) -> float:
        """Mean over the first batches of the validation split, nats per token."""
        definition = define(self.config)
        loss_of = jax.jit(make_loss(self.config, definition, self.attention.attend(number)))
        verify = "size" if self._is_validation_verified else self.config.data.verify
        reader = self.devices.loader(self.config, split="validation", prefetch=0, verify=verify)
        total = count = 0.0
        with contextlib.closing(reader):
            for _ in range(self.config.run.evaluation_batches):
                tokens = self.devices.put(next(reader).tokens)
                loss, tokens_seen = jax.device_get(loss_of(state.parameters, tokens))
                total, count = total + float(loss), count + float(tokens_seen)
        self._is_validation_verified = True
        return total / count

    def _probe(self, number: int, state: TrainState, batch: Batch, told: Teller) -> None:
        if self.attention.is_probe_due(number + 1):
            with self.stop.patiently(), self.goodput.during("evaluation"):
                told.probed(number, self.probes.look(number, self.attention, state, batch.tokens))

    @staticmethod
    def _is_due(every: int, number: int) -> bool:
        return bool(every) and (number + 1) % every == 0
