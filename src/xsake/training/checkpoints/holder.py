"""The holder of a run's folder: which process it is, and whether it is dead beyond doubt."""

import contextlib
import datetime
import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from xsake._schema import Frozen

MAX_BYTES = 2**12
MAX_LEASE_SECONDS = 3600.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")

_Name = Annotated[str, Field(max_length=100)]


class Holder(Frozen, strict=True):
    """The process that a folder belongs to.

    Attributes:
        pid: its number, in its own PID namespace.
        host: name of its machine or container.
        started: when it started, as far as the system says: boot of the machine and ticks since
            then. With it a number that was given to another process later is not taken for this.
        utc: when it took the lock, by its own clock; shown, never compared.
        namespace: its PID namespace; the same number in another one is another process.
        token: drawn by chance, the same for no two locks.
        lease_seconds: how long the lock is valid without a new beat; None: a lock of 0.1.0, which
            has no beat.
        beat: how often the lock was renewed, in 12 digits so that the file keeps its size.
    """

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    host: Annotated[str, Field(max_length=255)]
    started: _Name | None
    utc: Annotated[str, Field(max_length=40)]
    namespace: _Name | None = None
    token: _Name | None = None
    lease_seconds: Annotated[float, Field(gt=0, le=MAX_LEASE_SECONDS)] | None = None
    beat: Annotated[str, Field(pattern=r"^[0-9]{12}$")] = "0" * 12

    @classmethod
    def own(cls, lease_seconds: float) -> "Holder":
        """Return this process as a holder.

        Args:
            lease_seconds: how long the lock is valid without a new beat.
        """
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            started=started(os.getpid()),
            utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            namespace=_namespace(),
            token=secrets.token_hex(16),
            lease_seconds=lease_seconds,
        )

    def next_beat(self) -> "Holder":
        """Return the same holder one renewal later."""
        return self.model_copy(update={"beat": f"{(int(self.beat) + 1) % 10**12:012d}"})

    def is_same(self, other: "Holder | None") -> bool:
        """Whether another record is of the same lock, at any beat."""
        return other is not None and self.model_copy(update={"beat": other.beat}) == other

    @property
    def is_comparable(self) -> bool:
        """Whether this process sees the holder's process number as the holder does.

        That takes the same boot of the same machine and the same PID namespace. A lock of 0.1.0
        says nothing about namespaces: there the host name decides, as it did in 0.1.0.
        """
        if self.lease_seconds is None:
            return self.host == socket.gethostname()
        if self.started is None or self.namespace is None:  # a system without /proc
            return self.host == socket.gethostname() and _namespace() is None
        boot = self.started.partition(" ")[0]
        return boot == boot_id() and self.namespace == _namespace()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; to be asked of a holder that `is_comparable`."""
        if not _runs(self.pid):
            return False
        return self.started is None or started(self.pid) in (None, self.started)

    def encode(self) -> bytes:
        """Return the content of the lock file; of the same size at every beat."""
        return self.model_dump_json().encode() + b"\n"


def decode(content: bytes) -> Holder | None:
    """Return the holder that a lock file names; None for anything else."""
    try:
        return Holder.model_validate_json(content)
    except ValidationError:
        return None


def boot_id() -> str | None:
    """Return a name of this boot of this machine, if the system has one."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return None


def started(pid: int) -> str | None:
    """Return boot of the machine and ticks since then: equal for no two processes of a number."""
    state, boot = stat(pid), boot_id()
    return None if state is None or boot is None else f"{boot} {state[19]}"


def stat(pid: int) -> list[str] | None:
    """Return fields of a process from its state on; its name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _namespace() -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(_NAMESPACE)
    return None


def _runs(pid: int) -> bool:
    state = stat(pid)
    if state is not None:
        return state[0] not in ("Z", "X")  # dead, and not yet reaped by its parent
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
