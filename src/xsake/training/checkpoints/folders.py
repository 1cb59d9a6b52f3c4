"""The folder that steps are kept in: which are there, set aside, retired, and left unfinished."""

import contextlib
import os
import re
import shutil
from pathlib import Path

from xsake.training.checkpoints import manifest as manifests
from xsake.training.checkpoints.damage import DamagedError, Reason

_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
_QUARANTINED = re.compile(r"(0|[1-9][0-9]{0,9})\.quarantined-[a-z0-9-]+")
# What Orbax writes into before it commits, and what this package was about to write or delete.
_UNFINISHED = re.compile(
    r"(0|[1-9][0-9]{0,9})\.orbax-checkpoint-tmp.*|\.(0|[1-9][0-9]{0,9})\.(manifest|deleted|probe)"
)


def present(folder: Path) -> list[int]:
    """Numbers of everything that is named like a step, ascending; a link counts."""
    if not folder.is_dir():
        return []
    numbers = (int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name))
    return sorted(number for number in numbers if number <= manifests.MOST_STEP)


def committed(folder: Path) -> list[int]:
    """Numbers of the steps that Orbax has renamed to their final place, ascending."""
    paths = ((step, folder / str(step)) for step in present(folder))
    return [step for step, path in paths if path.is_dir() and not path.is_symlink()]


def quarantined(folder: Path) -> list[Path]:
    """What was set aside and waits for someone to look at it; a run never reads it again.

    A folder without steps is a fresh start only if nothing was set aside either.
    """
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _QUARANTINED.fullmatch(path.name))


def set_aside(folder: Path, step: int, reason: Reason) -> Path:
    """Rename a step so that no run uses it; nothing is deleted.

    Args:
        folder: of the steps.
        step: the one.
        reason: becomes part of its name.
    """
    target = folder / f"{step}.quarantined-{reason}"
    count = 1
    while target.exists() or target.is_symlink():
        count += 1
        target = folder / f"{step}.quarantined-{reason}-{count}"
    (folder / str(step)).rename(target)
    return target


def is_good(folder: Path, step: int) -> bool:
    """Whether a step has a manifest, and files of the names and sizes in it."""
    path = folder / str(step)
    try:
        manifest = manifests.read(path)
        if manifest is not None:
            manifests.verify(path, manifest, "size")
    except DamagedError:
        return False
    return manifest is not None


def retire(folder: Path, keep: int) -> list[int]:
    """Delete the steps that are older than the `keep` newest good ones; returns their numbers.

    As long as there are fewer good ones nothing is deleted, whatever else is there.
    """
    steps = committed(folder)
    good = 0
    for step in reversed(steps):
        good += is_good(folder, step)
        if good == keep:
            old = [other for other in steps if other < step]
            for other in old:
                _delete(folder, other)
            return old
    return []


def require_room(folder: Path, step: int) -> None:
    """Raise `OSError` unless a folder can be made for a step.

    Args:
        folder: of the steps.
        step: that shall be saved.
    """
    probe = folder / f".{step}.probe"
    probe.mkdir()
    probe.rmdir()


def clear_unfinished(folder: Path) -> None:
    """Delete what a save or a deletion that did not finish has left; no save may be under way."""
    for path in folder.iterdir():
        if not _UNFINISHED.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            # Threads of a failed save may still be writing: what is left goes the next time.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _delete(folder: Path, step: int) -> None:
    """Rename first: a process that dies while deleting leaves no step with half of its files."""
    doomed = folder / f".{step}.deleted"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(doomed)
    os.rename(folder / str(step), doomed)
    shutil.rmtree(doomed)
