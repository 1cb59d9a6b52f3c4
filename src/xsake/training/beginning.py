"""Initial state of an attempt: newest valid checkpoint, or initial weights and their attention."""

import contextlib
import dataclasses
import logging

import numpy as np

from xsake import hads
from xsake.errors import ArgumentError
from xsake.training import processes
from xsake.training.attention import (
    KvOrder,
    TrainingAttention,
    calibrate_model,
    make_attention,
    quarantine_profile,
    restore_attention,
)
from xsake.training.balanced import choose_placement, to_kv_order
from xsake.training.checkpoints import CheckpointStore, RestoredStep
from xsake.training.checkpoints.folders import list_quarantined_steps
from xsake.training.config import TrainingConfig
from xsake.training.data import TokenLoader
from xsake.training.placing import DeviceSetup
from xsake.training.same_run import require_consistent
from xsake.training.state import TrainState, define_model

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class InitialState:
    """State, attention and head order at the first step of an attempt.

    Args:
        state: training state.
        attention: of the run.
        kv_order: order of the kv heads in the weights; None: unchanged.
    """

    state: TrainState
    attention: TrainingAttention
    kv_order: KvOrder | None


def restore_or_init(
    config: TrainingConfig, devices: DeviceSetup, store: CheckpointStore, loader: TokenLoader
) -> InitialState:
    """Restore the newest valid checkpoint, or initialize a run that has none."""
    # With quarantined steps only, `restore` raises: a new start would hide the loss.
    if store.steps() or list_quarantined_steps(config.checkpoint.folder / "steps"):
        restored = store.restore(devices.abstract_state(config))
        require_consistent(int(restored.tree.step), restored.extra, config)
        loader.restore(restored.extra["data"])
        return InitialState(
            restored.tree,
            _restore_attention(config, devices, restored),
            restored.extra.get("kv_order"),
        )
    return _init_run(config, devices)


def _init_run(config: TrainingConfig, devices: DeviceSetup) -> InitialState:
    """Initialize weights and attention; heads are ordered for equal work of the tensor shards."""
    section, decoder = config.attention, config.model.decoder
    state, profile = devices.init_state(config), None
    if section.needs_calibration:
        profile = recalibrate(config, devices, state)
    attention = make_attention(section, decoder, profile=profile, operator=devices.operator)
    placement = choose_placement(attention, shards=config.mesh.tensor)
    if placement is None:
        return InitialState(state, attention, None)
    _LOG.info("balanced heads: %s", placement)
    order = to_kv_order(placement)
    attention = make_attention(
        section, decoder, profile=profile, operator=devices.operator, kv_order=order
    )
    return InitialState(devices.init_state(config, order), attention, order)


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
    if processes.is_primary():
        quarantine_profile(profiles, record["profile"])
    return attention


def recalibrate(config: TrainingConfig, devices: DeviceSetup, state: TrainState) -> hads.Profile:
    """Recalibrate with the current weights on this step's batch."""
    step, section = int(state.step), config.attention
    with contextlib.closing(devices.loader(config, prefetch=0, verify="size")) as reader:
        # All processes read the same windows, those of the next batch.
        windows = _read_windows(reader, step, section.calibration_windows)
    model = define_model(config).merge(state.parameters)
    name = f"{config.digest[:16]} at step {step}"
    return calibrate_model(section, model, windows, name=config.run.name, digest=name)


def _read_windows(reader: TokenLoader, step: int, count: int) -> np.ndarray:
    return reader.windows.read(reader.window_ids(step)[:count])[:, :-1]
