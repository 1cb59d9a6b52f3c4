"""Verified checkpoints: arrays by Orbax, with file digests, array fingerprints and quarantine."""

from xsake.training.checkpoints.damage import DamagedError
from xsake.training.checkpoints.events import CheckpointEvent, SaveFailure
from xsake.training.checkpoints.folders import list_quarantined_steps
from xsake.training.checkpoints.lock import Lease, run_lock
from xsake.training.checkpoints.manifest import Manifest
from xsake.training.checkpoints.store import CheckpointStore, RestoredStep

__all__ = [
    "CheckpointStore",
    "DamagedError",
    "Lease",
    "Manifest",
    "CheckpointEvent",
    "RestoredStep",
    "SaveFailure",
    "list_quarantined_steps",
    "run_lock",
]
