"""Folder of saved steps: list, quarantine, retention and cleanup."""

import contextlib
import os
import re
import shutil
from pathlib import Path

from xsake.training.checkpoints import manifest as manifests
from xsake.training.checkpoints.damage import DamagedError, DamageReason

_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
_QUARANTINED = re.compile(r"(0|[1-9][0-9]{0,9})\.quarantined-[a-z0-9-]+")
# Temporary folders of Orbax and of this package.
_UNFINISHED = re.compile(
    r"(0|[1-9][0-9]{0,9})\.orbax-checkpoint-tmp.*|\.(0|[1-9][0-9]{0,9})\.(manifest|deleted|probe)"
)


def list_steps(folder: Path) -> list[int]:
    """Return the numbers of all entries named like a step, ascending; links count."""
    if not folder.is_dir():
        return []
    numbers = (int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name))
    return sorted(number for number in numbers if number <= manifests.MAX_STEP)


def list_committed_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps that Orbax has committed, ascending."""
    paths = ((step, folder / str(step)) for step in list_steps(folder))
    return [step for step, path in paths if path.is_dir() and not path.is_symlink()]


def list_quarantined_steps(folder: Path) -> list[Path]:
    """Return the paths of quarantined steps; a run never reads them.

    A folder without steps is a new start only if it has no quarantined steps either.
    """
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _QUARANTINED.fullmatch(path.name))


def quarantine(folder: Path, step: int, reason: DamageReason) -> Path:
    """Rename a step so that no run uses it; nothing is deleted.

    Args:
        folder: of the steps.
        step: its number.
        reason: becomes part of the name.
    """
    target = folder / f"{step}.quarantined-{reason}"
    count = 1
    while target.exists() or target.is_symlink():
        count += 1
        target = folder / f"{step}.quarantined-{reason}-{count}"
    (folder / str(step)).rename(target)
    return target


def is_valid(folder: Path, step: int) -> bool:
    """Return whether a step has a manifest and files of the names and sizes in it."""
    path = folder / str(step)
    try:
        manifest = manifests.read(path)
        if manifest is not None:
            manifests.verify(path, manifest, "size")
    except DamagedError:
        return False
    return manifest is not None


def delete_old_steps(folder: Path, max_to_keep: int) -> list[int]:
    """Delete the steps older than the `max_to_keep` newest valid ones; return their numbers.

    With fewer valid steps nothing is deleted.
    """
    steps = list_committed_steps(folder)
    num_valid = 0
    for step in reversed(steps):
        num_valid += is_valid(folder, step)
        if num_valid == max_to_keep:
            old = [other for other in steps if other < step]
            for other in old:
                _delete(folder, other)
            return old
    return []


def check_writable(folder: Path, step: int) -> None:
    """Raise `OSError` unless a folder for a step can be created.

    Args:
        folder: of the steps.
        step: to save.
    """
    probe = folder / f".{step}.probe"
    probe.mkdir()
    probe.rmdir()


def remove_temporary(folder: Path) -> None:
    """Delete the remains of interrupted saves and deletions; no save may be running."""
    for path in folder.iterdir():
        if not _UNFINISHED.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            # Threads of a failed save may still be writing; the rest is deleted next time.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _delete(folder: Path, step: int) -> None:
    """Delete a step; it is renamed first, so that a crash leaves no step with half of its files."""
    trash = folder / f".{step}.deleted"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(trash)
    os.rename(folder / str(step), trash)
    shutil.rmtree(trash)
