"""Training loop: restore or initialize, then step, log, save and evaluate until the end."""

import contextlib
import enum
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xsake import hads
from xsake._io import atomic_write
from xsake.errors import ArgumentError, CheckpointError
from xsake.model import AttentionFn
from xsake.observability.goodput import Category, GoodputRecorder
from xsake.observability.profiler import Profiler, StepRange
from xsake.training import processes
from xsake.training.attention import (
    TrainingAttention,
    calibrate_model,
    choose_placement,
    make_attention,
    quarantine_profile,
    restore_attention,
    to_kv_order,
)
from xsake.training.checkpointing import CheckpointStore, RestoredStep
from xsake.training.config import TrainingConfig
from xsake.training.data import Batch, TokenLoader
from xsake.training.fingerprints import find_mismatches
from xsake.training.lock import Lease, run_lock
from xsake.training.metrics_logger import MetricsLogger, ProgressCallback, SaveFailureCounter
from xsake.training.preemption import PreemptionHandler
from xsake.training.probe import Probes
from xsake.training.processes import is_primary
from xsake.training.reliability import (
    StragglerDetector,
    require_agreement,
    require_consistent,
    require_same_run,
)
from xsake.training.state import (
    DeviceSetup,
    KvOrder,
    TrainState,
    build_optimizer,
    define_model,
)
from xsake.training.step import Step, StepMetrics, make_loss, make_step
from xsake.training.verify import list_quarantined_steps

_LOG = logging.getLogger(__name__)

Pause = Callable[[Category], contextlib.AbstractContextManager[None]]
"""Suspends the step timeout, and records the time under a kind of goodput."""


class RunStatus(enum.StrEnum):
    """Outcome of a training run."""

    DONE = "done"  # all steps
    STOPPED = "stopped"  # by a signal; the state is saved, the same command resumes


class TooManySkippedUpdatesError(ArgumentError):
    """Too many consecutive updates were skipped."""


class RetryError(ArgumentError):
    """The final save failed, or replicas differ: the same command resumes the run."""

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
    run, save_interval = config.run, config.checkpoint.save_interval
    with contextlib.ExitStack() as stack:
        # ---------- processes and folder ----------
        lease, goodput, stop = _begin_attempt(config, stack, is_lock_forced=is_lock_forced)
        pause = functools.partial(_pause, stop, goodput)
        enter = lambda resource: stack.enter_context(contextlib.closing(resource))
        # ---------- mesh and data ----------
        devices = DeviceSetup.from_config(config)
        loader = enter(devices.loader(config))
        # ---------- model: newest valid checkpoint, or initial weights ----------
        failures = SaveFailureCounter()
        store = enter(_open_store(config, failures))
        with goodput.during("restore" if store.steps() else "init"):
            state, attention, kv_order = _restore_or_init(config, devices, store, loader)
        # ---------- metrics ----------
        logger = enter(MetricsLogger(config, on_progress, int(state.step), failures))
        profiler = enter(Profiler(config.checkpoint.folder, profile if is_primary() else None))
        finish = functools.partial(_finish_step, config, lease, logger, store, loader)
        evaluation, probes = _Evaluation(config, devices), Probes(config, devices)
        stragglers = StragglerDetector()
        # ---------- loop: metrics of a step are read while the next one runs ----------
        prepare = functools.partial(_prepare_step, {}, pause, config, devices)
        pending, is_over, ended = None, False, time.monotonic()
        for number in range(int(state.step), run.steps):
            with goodput.during("data"):
                batch = next(loader)
            attention, step = prepare(attention, state, batch, number)
            profiler.before(number)
            with goodput.step(number):
                state, metrics = step(state, devices.put(batch.tokens))
                waited = finish(pending) if pending else 0.0
                pending = number, batch, metrics, attention.budget(number)
            profiler.after(number, metrics)
            if _is_due(run.replica_check_interval, number):
                _require_equal_replicas(state)
            is_over = stop.should_stop(number)
            if is_over or number + 1 == run.steps or _is_due(save_interval, number):
                with goodput.rest_of_step():
                    finish(pending)
                pending = None
                with pause("save"):
                    _save(config, lease, store, loader, attention, kv_order, state)
            ended = _compare_times(stragglers, logger, ended, waited)
            if is_over:
                break
            if _is_due(run.eval_interval, number):
                with pause("evaluation"):
                    logger.log_evaluation(number, evaluation.run(number, attention, state))
            if attention.is_probe_due(number + 1):
                with pause("evaluation"):
                    logger.log_probe(number, probes.run(number, attention, state, batch.tokens))
        return _end(goodput, store, logger, int(state.step), is_stopped=is_over)


# ---------- setup ----------


def _begin_attempt(
    config: TrainingConfig, stack: contextlib.ExitStack, *, is_lock_forced: bool
) -> tuple[Lease | None, GoodputRecorder, PreemptionHandler]:
    """Lock the folder, check that it is of the same run, and handle signals until `stack` ends."""
    folder, section, lease = config.checkpoint.folder, config.checkpoint, None
    stack.enter_context(processes.exit_on_error())
    require_agreement(config)
    if is_primary():
        lock = run_lock(folder, is_forced=is_lock_forced, lease_seconds=section.lease_seconds)
        lease = stack.enter_context(lock)
        require_same_run(config, folder)
    processes.barrier("folder locked")
    goodput = GoodputRecorder(folder / "goodput.jsonl" if is_primary() else None)
    stop = PreemptionHandler(
        stack_file=folder / f"stacks-{jax.process_index()}.txt",
        step_timeout_s=config.run.step_timeout_s or None,
    )
    return lease, stack.enter_context(goodput), stack.enter_context(stop)


@contextlib.contextmanager
def _pause(stop: PreemptionHandler, goodput: GoodputRecorder, kind: Category) -> Iterator[None]:
    """Suspend the step timeout, and record the time under another kind."""
    with stop.without_timeout(), goodput.during(kind):
        yield


def _open_store(config: TrainingConfig, failures: SaveFailureCounter) -> CheckpointStore:
    section = config.checkpoint
    return CheckpointStore(
        section.folder / "steps", max_to_keep=section.max_to_keep, verify=section.verify,
        on_failure=failures.record_failure,
    )  # fmt: skip


def _restore_or_init(
    config: TrainingConfig, devices: DeviceSetup, store: CheckpointStore, loader: TokenLoader
) -> tuple[TrainState, TrainingAttention, KvOrder | None]:
    """Return state, attention and order of heads of the newest valid checkpoint, or initial ones.

    Heads of a new run are ordered for equal work of the tensor shards.
    """
    # With quarantined steps only, `restore` raises: a new start would hide the loss.
    if store.steps() or list_quarantined_steps(config.checkpoint.folder / "steps"):
        restored = store.restore(devices.abstract_state(config))
        require_consistent(int(restored.tree.step), restored.extra, config)
        loader.restore(restored.extra["data"])
        attention = _restore_attention(config, devices, restored)
        return restored.tree, attention, restored.extra.get("kv_order")
    state, profile = devices.init_state(config), None
    if config.attention.needs_calibration:
        profile = recalibrate(config, devices, state)
    make = functools.partial(
        make_attention, config.attention, config.model.decoder, profile=profile,
        operator=devices.operator,
    )  # fmt: skip
    attention = make()
    placement = choose_placement(attention, shards=config.mesh.tensor)
    if placement is None:
        return state, attention, None
    _LOG.info("balanced heads: %s", placement)
    order = to_kv_order(placement)
    return devices.init_state(config, order), make(kv_order=order), order


def _restore_attention(
    config: TrainingConfig, devices: DeviceSetup, restored: RestoredStep
) -> TrainingAttention:
    """Restore the attention of a checkpoint; recalibrate if its profile is damaged."""
    section, record = config.attention, restored.extra["attention"]
    profiles = config.checkpoint.folder / "profiles"
    restore = lambda profile: restore_attention(
        section, config.model.decoder, record, profiles,
        step=restored.step, operator=devices.operator, profile=profile,
    )  # fmt: skip
    try:
        return restore(None)
    except ArgumentError as error:
        # A later recalibration used weights that are no longer available.
        if not section.needs_calibration or section.recalibration_interval:
            raise
        _LOG.warning("recalibrating, the saved profile is not usable: %s", error.got)
    attention = restore(recalibrate(config, devices, devices.init_state(config)))
    if is_primary():
        quarantine_profile(profiles, record["profile"])
    return attention


def recalibrate(config: TrainingConfig, devices: DeviceSetup, state: TrainState) -> hads.Profile:
    """Recalibrate with the current weights on this step's batch."""
    step, section = int(state.step), config.attention
    with contextlib.closing(devices.loader(config, prefetch=0, verify="size")) as reader:
        # All processes read the same windows, those of the next batch.
        window_ids = reader.window_ids(step)[: section.calibration_windows]
        windows = reader.windows.read(window_ids)[:, :-1]
    model = define_model(config).merge(state.parameters)
    name = f"{config.digest[:16]} at step {step}"
    return calibrate_model(section, model, windows, name=config.run.name, digest=name)


# ---------- parts of the loop ----------


def _is_due(interval: int, number: int) -> bool:
    return bool(interval) and (number + 1) % interval == 0


def _prepare_step(
    compiled: dict[int, Step],
    pause: Pause,
    config: TrainingConfig,
    devices: DeviceSetup,
    attention: TrainingAttention,
    state: TrainState,
    batch: Batch,
    number: int,
) -> tuple[TrainingAttention, Step]:
    """Return attention and compiled step of a step; recalibrate and compile if that is due."""
    if attention.is_calibration_due(number):
        with pause("init"):
            profile = recalibrate(config, devices, state)
        attention = attention.replan(profile, config.model.decoder)
        compiled.clear()
    level = attention.level(number)
    if level not in compiled:
        with pause("init"):
            attend, tokens = attention.attends[level], devices.put(batch.tokens)
            compiled[level] = compile_step(config, devices, attend, state, tokens)
    return attention, compiled[level]


def compile_step(
    config: TrainingConfig, devices: DeviceSetup, attend: AttentionFn, state: TrainState, tokens
) -> Step:
    """Compile the step of one attention function for the shapes of a state and a batch."""
    definition = define_model(config)
    optimizer = build_optimizer(config, definition)
    step = make_step(config, definition, optimizer, attend, devices.shardings)
    return step.lower(state, tokens).compile()


def _finish_step(
    config: TrainingConfig,
    lease: Lease | None,
    logger: MetricsLogger,
    store: CheckpointStore,
    loader: TokenLoader,
    pending: tuple[int, Batch, StepMetrics, float | None],
) -> float:
    """Log the metrics of a step; return the seconds spent waiting for them."""
    number, batch, step_metrics, budget = pending
    began = time.monotonic()
    values = jax.device_get(step_metrics)
    waited = time.monotonic() - began
    if lease is not None:
        lease.require()
    logger.log_step(number, values, budget, store)
    if (skips := int(values.consecutive_skips)) >= config.guard.max_consecutive_skips:
        skipped = range(number - skips + 1, number + 1)
        if is_primary():
            _write_skipped_steps(config, store, loader, list(skipped), values)
        logger.log_end("failed")
        raise TooManySkippedUpdatesError(
            "too-many-skips",
            f"{skips} consecutive updates were skipped, the last at step {number}",
            got=f"loss {float(values.loss)}, gradient norm {float(values.gradient_norm)}",
            expected="finite numbers",
            fix=f"check windows {batch.windows[:8].tolist()}, or lower the learning rate; the "
            "newest checkpoint is older than these steps, refused.json lists them for a replay",
        )
    return waited


def _write_skipped_steps(
    config: TrainingConfig,
    store: CheckpointStore,
    loader: TokenLoader,
    skipped: list[int],
    values: StepMetrics,
) -> None:
    """Write refused.json, which is enough to replay the skipped steps from the checkpoint."""
    numbers = {"loss": float(values.loss), "gradient_norm": float(values.gradient_norm)}
    document = {
        "step": skipped[-1],
        "steps": skipped,
        "windows": [loader.window_ids(step).tolist() for step in skipped],
        "data_seed": config.data.seed,
        "checkpoint": max(store.steps(), default=None),
        "config": config.digest,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }
    atomic_write(config.checkpoint.folder / "refused.json", json.dumps(document) + "\n")


def _require_equal_replicas(state: TrainState) -> None:
    mismatches = find_mismatches(state.parameters)
    if mismatches:
        raise RetryError(
            "replicas", "replicas of the parameters differ",
            got="; ".join(map(str, mismatches[:4])),
            expected="the same bits on every device",
            fix="resume from the newest checkpoint without the host that is named",
        )  # fmt: skip


def _compare_times(
    stragglers: StragglerDetector, logger: MetricsLogger, ended: float, waited: float
) -> float:
    """Log processes that are slower than the others; return the end of this step."""
    now = time.monotonic()
    report = stragglers.add(now - ended - waited, waited)
    if report is not None and report.flagged:
        logger.add_note(str(report))
    return now


def _save(
    config: TrainingConfig,
    lease: Lease | None,
    store: CheckpointStore,
    loader: TokenLoader,
    attention: TrainingAttention,
    kv_order: KvOrder | None,
    state: TrainState,
) -> None:
    step = int(state.step)
    if lease is not None:
        lease.require(reread=True)
    if is_primary():
        attention.save(config.checkpoint.folder / "profiles")
    extra: dict[str, Any] = {
        "data": loader.state(),
        "attention": attention.record(step),
        "config": json.loads(config.to_json()),
    }
    if kv_order is not None:
        extra["kv_order"] = [list(layer) for layer in kv_order]
    store.save(step, state, extra)


def _end(
    goodput: GoodputRecorder,
    store: CheckpointStore,
    logger: MetricsLogger,
    step: int,
    *,
    is_stopped: bool,
) -> RunStatus:
    status = RunStatus.STOPPED if is_stopped else RunStatus.DONE
    with goodput.during("save"):
        try:
            store.wait()
        except CheckpointError as error:
            if step not in store.steps():  # otherwise an earlier save failed
                logger.log_end("failed")
                raise RetryError(
                    "final-save", "the final state could not be saved",
                    got=str(error).splitlines()[0],
                    fix="free disk space, then start the same command again",
                ) from error  # fmt: skip
    logger.log_end(status)
    return status


class _Evaluation:
    """Validation loss; digests of the data are verified once."""

    def __init__(self, config: TrainingConfig, devices: DeviceSetup):
        self._config, self._devices, self._verify = config, devices, config.data.verify

    def run(self, number: int, attention: TrainingAttention, state: TrainState) -> float:
        """Return the mean loss over the first validation batches, nats per token."""
        config, devices = self._config, self._devices
        loss_of = jax.jit(make_loss(config, define_model(config), attention.attend(number)))
        reader = devices.loader(config, split="validation", prefetch=0, verify=self._verify)
        total = count = 0.0
        with contextlib.closing(reader):
            for _ in range(config.run.eval_batches):
                tokens = devices.put(next(reader).tokens)
                loss, num_tokens = jax.device_get(loss_of(state.parameters, tokens))
                total, count = total + float(loss), count + float(num_tokens)
        self._verify = "size"
        return total / count
