"""Kinds of damage of a saved step, and the error that reports it."""

import errno
from pathlib import Path
from typing import Literal

from xsake.errors import CheckpointError

DamageReason = Literal[
    "symlink",  # the step is a symbolic link or contains one
    "special",  # contains an entry that is neither a file nor a folder
    "absent",  # the folder is missing
    "manifest",  # the manifest was changed
    "record",  # neither a manifest nor Orbax metadata: unfinished, damaged or of another program
    "missing",  # a file of the manifest is missing
    "extra",  # a file is not in the manifest
    "size",  # a file has another size
    "digest",  # a file has other bytes
    "unreadable",  # I/O error
    "load",  # Orbax cannot load it
    "fingerprint",  # an array has other bits than were saved
    "superseded",  # not damaged: training went back and saved an earlier step
]

# Errors of this process or its user, not of the file.
_PROCESS_ERRORS = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
)  # fmt: skip


class DamagedError(CheckpointError):
    """A step that must not be used.

    Args:
        reason: kind of damage.
        file: damaged file, relative to the step's folder.
        got: actual content.
        expected: expected content.
    """

    def __init__(
        self, reason: DamageReason, file: str, *, got: object = None, expected: object = None
    ):
        self.reason, self.file = reason, file
        super().__init__(
            f"a checkpoint is damaged ({reason}): {file}",
            got=got,
            expected=expected,
            fix="restore an earlier step; `CheckpointStore.restore` does this automatically",
        )

    @property
    def summary(self) -> str:
        """The damage in one line."""
        detail = "" if self.got is None else f": {self.got}"
        return f"{self.reason}, {self.file}{detail}"


def from_os_error(error: OSError, file: Path, folder: Path) -> CheckpointError:
    """Return the error for an unreadable file: damage, unless this process is the cause.

    Args:
        error: as raised.
        file: that could not be read.
        folder: of the step.
    """
    name = file.relative_to(folder).as_posix() if file != folder else folder.name
    if error.errno in _PROCESS_ERRORS:
        return CheckpointError(
            "a checkpoint cannot be validated: this process cannot read it",
            got=f"{file}: {error.strerror}",
            expected="readable files",
            fix="give the process the permissions or resources; the step was not changed",
        )
    if error.errno == errno.ELOOP:
        return DamagedError("symlink", name, got="a symbolic link", expected="a regular file")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DamagedError("missing", name, got=error.strerror)
    return DamagedError("unreadable", name, got=error.strerror)
