"""Holder of a run's lock: identity of its process, and whether that process is dead."""

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


class LockHolder(Frozen, strict=True):
    """Process that holds the lock of a folder.

    Attributes:
        pid: in its own PID namespace.
        host: name of the host or container.
        started: boot ID and start in ticks since boot, if available; distinguishes reused PIDs.
        utc: when it took the lock, by its own clock; for display only.
        namespace: PID namespace.
        token: random and unique to this lock.
        lease_seconds: validity without a heartbeat; None: a lock of 0.1.0, which has no heartbeat.
        beat: number of renewals in 12 digits, so that the size of the file is constant.
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
    def current(cls, lease_seconds: float) -> "LockHolder":
        """Return a holder for this process.

        Args:
            lease_seconds: validity without a heartbeat.
        """
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            started=process_start(os.getpid()),
            utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            namespace=_namespace(),
            token=secrets.token_hex(16),
            lease_seconds=lease_seconds,
        )

    def next_beat(self) -> "LockHolder":
        """Return the holder after one more renewal."""
        return self.model_copy(update={"beat": f"{(int(self.beat) + 1) % 10**12:012d}"})

    def is_same(self, other: "LockHolder | None") -> bool:
        """Return whether another record is of the same lock, at any beat."""
        return other is not None and self.model_copy(update={"beat": other.beat}) == other

    @property
    def is_comparable(self) -> bool:
        """Whether the holder's PID means the same process here.

        This requires the same boot of the same host and the same PID namespace. A lock of 0.1.0
        has no namespace; the host name decides, as in 0.1.0.
        """
        if self.lease_seconds is None:
            return self.host == socket.gethostname()
        if self.started is None or self.namespace is None:  # a system without /proc
            return self.host == socket.gethostname() and _namespace() is None
        boot = self.started.partition(" ")[0]
        return boot == boot_id() and self.namespace == _namespace()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; only valid if `is_comparable`."""
        if not _is_running(self.pid):
            return False
        return self.started is None or process_start(self.pid) in (None, self.started)

    def encode(self) -> bytes:
        """Return the content of the lock file, of the same size at every beat."""
        return self.model_dump_json().encode() + b"\n"


def decode(content: bytes) -> LockHolder | None:
    """Return the holder that a lock file names; None for anything else."""
    try:
        return LockHolder.model_validate_json(content)
    except ValidationError:
        return None


def boot_id() -> str | None:
    """Return the ID of this boot of the host, if available."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return None


def process_start(pid: int) -> str | None:
    """Return boot ID and start time in ticks, which differ for every process with this PID."""
    state, boot = read_proc_stat(pid), boot_id()
    return None if state is None or boot is None else f"{boot} {state[19]}"


def read_proc_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _namespace() -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(_NAMESPACE)
    return None


def _is_running(pid: int) -> bool:
    state = read_proc_stat(pid)
    if state is not None:
        return state[0] not in ("Z", "X")  # a zombie is dead
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
