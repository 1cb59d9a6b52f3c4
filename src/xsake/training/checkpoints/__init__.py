"""Checkpoints that can be trusted: Orbax' arrays, with digests, fingerprints and a way back."""

from xsake.training.checkpoints.damage import DamagedError
from xsake.training.checkpoints.events import Notice, SaveFailure
from xsake.training.checkpoints.folders import quarantined
from xsake.training.checkpoints.lock import Lease, run_lock
from xsake.training.checkpoints.manifest import Manifest
from xsake.training.checkpoints.store import CheckpointStore, Restored

__all__ = [
    "CheckpointStore",
    "DamagedError",
    "Lease",
    "Manifest",
    "Notice",
    "Restored",
    "SaveFailure",
    "quarantined",
    "run_lock",
]
