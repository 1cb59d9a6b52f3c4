"""One save, all processes together: each writes and hashes its part, the first commits it."""

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path

import jax
from pydantic import TypeAdapter

from xsake.training.checkpoints import manifest as manifests
from xsake.training.checkpoints import orbax_io, together

_FILES = TypeAdapter(tuple[manifests.File, ...])


class Save:
    """The background part of a save, which ends in the same way on all processes.

    A process that cannot write its part, or cannot read it back, reports that; the first one
    collects all reports before it commits. A failure of one process is therefore a failure of all
    within the time that the slowest write takes.

    Args:
        path: of the step.
        exchange: used for nothing else.
    """

    def __init__(self, path: Path, exchange: together.Exchange):
        self._path, self._exchange = path, exchange
        self._reports: list[str] = []

    def wait_for_others(self) -> None:
        """Wait in the first process until the others have written their parts, or one failed."""
        self._reports = self._exchange.collect("written")

    def commit(self, own_part: orbax_io.Commit) -> None:
        """Return when the step is committed; raise on all processes if it will not be."""
        if together.is_first():
            with self._exchange.decide("committed"):
                own_part()
            return
        # If the first process has failed, the part of this one may never end, as when it waits
        # for a folder that is never made; the decision comes all the same.
        part = concurrent.futures.Future[None]()
        arguments = (part, own_part)
        threading.Thread(target=self._write, args=arguments, name="own part", daemon=True).start()
        try:
            self._exchange.follow("committed")
        except together.PeerError:
            if part.done():
                part.result()  # its own failure says more
            raise

    def _write(self, part: concurrent.futures.Future[None], own_part: orbax_io.Commit) -> None:
        """Write and hash this process's part and report it to the first one."""
        try:
            own_part()
            # Hashed under the name that this process knows: on a network file system it may
            # see the new one seconds later than the first process.
            report = _hash_share(orbax_io.locate_unfinished(self._path))
        except Exception as error:  # noqa: BLE001 - reported, and raised by `commit`
            part.set_exception(error)
            self._exchange.report("written", failure=together.summarize(error))
        else:
            part.set_result(None)
            self._exchange.report("written", report)

    def seal(self, record: manifests.Record) -> None:
        """Write the manifest of a step that `commit` has committed."""
        if together.is_first():
            with self._exchange.decide("sealed"):
                _write_manifest(self._path, record, lambda: self._reports)
        else:
            self._exchange.follow("sealed")


def adopt(path: Path, record: manifests.Record, exchange: together.Exchange) -> None:
    """Write the manifest of a step of an earlier run; each process hashes a share of its files.

    Args:
        path: of the step.
        record: what it holds.
        exchange: of the processes.
    """
    if together.is_first():
        with exchange.decide("sealed"):
            _write_manifest(path, record, lambda: exchange.collect("hashed"))
    else:
        exchange.contribute("hashed", lambda: _hash_share(path))
        exchange.follow("sealed")


def _hash_share(path: Path) -> str:
    files = manifests.hash_share(path, jax.process_index(), jax.process_count())
    return _FILES.dump_json(files).decode()


def _write_manifest(path: Path, record: manifests.Record, collect: Callable[[], list[str]]) -> None:
    own = manifests.hash_share(path, 0, jax.process_count())  # while the others hash theirs
    others = (file for report in collect() for file in _FILES.validate_json(report))
    manifests.write(path, record, [*own, *others])
