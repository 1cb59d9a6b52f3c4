"""What can be wrong with a step on the disk, and the error that says so."""

import errno
from pathlib import Path
from typing import Literal

from xsake.errors import CheckpointError

Reason = Literal[
    "symlink",  # it is a link, or has one inside
    "special",  # it holds something that is neither a file nor a folder
    "absent",  # there is no folder
    "manifest",  # its manifest is not what was written
    "record",  # no manifest, nor what Orbax commits: it is unfinished, damaged or someone else's
    "missing",  # a file of the manifest is not there
    "extra",  # a file is there that the manifest does not know
    "size",  # a file is longer or shorter than it was
    "digest",  # a file has other bytes than it had
    "unreadable",  # the disk does not give a file back
    "load",  # Orbax cannot read it
    "fingerprint",  # an array has other bits than were saved
    "superseded",  # nothing is wrong: training went back and saved an earlier step
]

# These say something about this process or its user, and nothing about the file.
_NOT_THE_FILE = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
)  # fmt: skip


class DamagedError(CheckpointError):
    """A step that must not be used.

    Args:
        reason: one word.
        file: what is damaged, relative to the step's folder.
        got: what was found.
        expected: what should have been there.
    """

    def __init__(self, reason: Reason, file: str, *, got: object = None, expected: object = None):
        self.reason, self.file = reason, file
        super().__init__(
            f"a checkpoint is damaged ({reason}): {file}",
            got=got,
            expected=expected,
            fix="restore an earlier step; `CheckpointStore.restore` does so by itself",
        )

    @property
    def told(self) -> str:
        """The damage in one line."""
        found = "" if self.got is None else f": {self.got}"
        return f"{self.reason}, {self.file}{found}"


def of_system(error: OSError, file: Path, folder: Path) -> CheckpointError:
    """The error for a file that cannot be read: damage, unless the cause is elsewhere.

    Args:
        error: as raised.
        file: that could not be read.
        folder: of the step.
    """
    name = file.relative_to(folder).as_posix() if file != folder else folder.name
    if error.errno in _NOT_THE_FILE:
        return CheckpointError(
            "a checkpoint cannot be judged, because this process may not or cannot read it",
            got=f"{file}: {error.strerror}",
            expected="files that this process can open",
            fix="give the process the rights or the resources; the step was left as it is",
        )
    if error.errno == errno.ELOOP:
        return DamagedError("symlink", name, got="a symbolic link", expected="a regular file")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DamagedError("missing", name, got=error.strerror)
    return DamagedError("unreadable", name, got=error.strerror)
