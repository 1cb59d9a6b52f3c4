"""Where a run begins: at its newest sound checkpoint, or with first weights and their attention."""

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
    calibrated,
    make_attention,
    resumed,
    set_profile_aside,
)
from xsake.training.balanced import order_of, placement_of
from xsake.training.checkpoints import CheckpointStore, Restored
from xsake.training.checkpoints.folders import quarantined
from xsake.training.config import TrainingConfig
from xsake.training.data import TokenLoader
from xsake.training.placing import Devices
from xsake.training.same_run import require_whole
from xsake.training.state import TrainState, define

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Beginning:
    """What the first step of this life of a run is given.

    Args:
        state: all that the step depends on.
        attention: what its layers look at.
        kv_order: in which the weights have their heads; None: as they were drawn.
    """

    state: TrainState
    attention: TrainingAttention
    kv_order: KvOrder | None


def begin(
    config: TrainingConfig, devices: Devices, store: CheckpointStore, loader: TokenLoader
) -> Beginning:
    """The newest sound checkpoint, or the first state where none was ever saved."""
    # Where all steps were set aside, restoring says so: a fresh start would hide what was lost.
    if store.steps() or quarantined(config.checkpoint.folder / "steps"):
        found = store.restore(devices.like(config))
        require_whole(int(found.tree.step), found.extra, config)
        loader.restore(found.extra["data"])
        return Beginning(
            found.tree, _attention_again(config, devices, found), found.extra.get("kv_order")
        )
    return _first(config, devices)


def _first(config: TrainingConfig, devices: Devices) -> Beginning:
    """First weights, their plan if there is one, and both with heads that shards share equally."""
    section, decoder = config.attention, config.model.decoder
    state, profile = devices.first_state(config), None
    if section.needs_calibration:
        profile = profiled(config, devices, state)
    attention = make_attention(section, decoder, profile=profile, operator=devices.operator)
    placement = placement_of(attention, shards=config.mesh.tensor)
    if placement is None:
        return Beginning(state, attention, None)
    _LOG.info("balanced heads: %s", placement)
    order = order_of(placement)
    attention = make_attention(
        section, decoder, profile=profile, operator=devices.operator, kv_order=order
    )
    return Beginning(devices.first_state(config, order), attention, order)


def _attention_again(
    config: TrainingConfig, devices: Devices, found: Restored
) -> TrainingAttention:
    """The attention of a checkpoint; a profile that is damaged is made again, if it can be."""
    section, record = config.attention, found.extra["attention"]
    profiles = config.checkpoint.folder / "profiles"
    again = lambda profile: resumed(
        section, config.model.decoder, record, profiles,
        step=found.step, operator=devices.operator, profile=profile,
    )  # fmt: skip
    try:
        return again(None)
    except ArgumentError as error:
        # Weights of later steps, that a recalibration would have looked at, are gone.
        if not section.needs_calibration or section.recalibrate_every:
            raise
        _LOG.warning("the profile of the run is made again, it cannot be used: %s", error.got)
    attention = again(profiled(config, devices, devices.first_state(config)))
    if processes.is_first():
        set_profile_aside(profiles, record["profile"])
    return attention


def profiled(config: TrainingConfig, devices: Devices, state: TrainState) -> hads.Profile:
    """What heads look at with the weights of now, on windows that belong to this step alone."""
    step, section = int(state.step), config.attention
    with contextlib.closing(devices.loader(config, prefetch=0, verify="size")) as reader:
        # Every process reads the same windows: those of the batch that comes next.
        windows = _rows(reader, step, section.calibration_windows)
    model = define(config).merge(state.parameters)
    name = f"{config.digest[:16]} at step {step}"
    return calibrated(section, model, windows, name=config.run.name, digest=name)


def _rows(reader: TokenLoader, step: int, count: int) -> np.ndarray:
    numbers = reader.numbers(step)[:count]
    return reader.windows.read(numbers)[:, :-1]
