"""Save of one step by all processes: each writes and hashes its part, the primary one commits."""

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path

import jax
from pydantic import TypeAdapter

from xsake.training.checkpoints import manifest as manifests
from xsake.training.checkpoints import orbax_io, together

_FILES = TypeAdapter(tuple[manifests.ManifestFile, ...])


class BackgroundSave:
    """Background part of a save; it succeeds or fails on all processes together.

    A process that cannot write or read back its part reports that; the primary process collects all
    reports before it commits. A failure reaches all processes within the time of the slowest write.

    Args:
        path: of the step.
        exchange: used for this save only.
    """

    def __init__(self, path: Path, exchange: together.ProcessExchange):
        self._path, self._exchange = path, exchange
        self._reports: list[str] = []

    def wait_for_others(self) -> None:
        """Wait in the primary process until the others have written their parts or failed."""
        self._reports = self._exchange.collect("written")

    def commit(self, write_part: orbax_io.Commit) -> None:
        """Return when the step is committed; raise on all processes if it fails."""
        if together.is_primary():
            with self._exchange.decide("committed"):
                write_part()
            return
        # If the primary process has failed, this part may never end, for example while it waits
        # for a folder that is never created; the decision still arrives.
        part = concurrent.futures.Future[None]()
        arguments = (part, write_part)
        threading.Thread(
            target=self._write, args=arguments, name="checkpoint part", daemon=True
        ).start()
        try:
            self._exchange.follow("committed")
        except together.PeerError:
            if part.done():
                part.result()  # the local error is more specific
            raise

    def _write(self, part: concurrent.futures.Future[None], write_part: orbax_io.Commit) -> None:
        """Write and hash this process's part and report it to the primary process."""
        try:
            write_part()
            # Hash under the temporary name: on a network file system this process may see the
            # rename seconds later than the primary process.
            report = _hash_share(orbax_io.temporary_path(self._path))
        except Exception as error:  # noqa: BLE001 - reported, and raised by `commit`
            part.set_exception(error)
            self._exchange.report("written", failure=together.summarize(error))
        else:
            part.set_result(None)
            self._exchange.report("written", report)

    def seal(self, record: manifests.CheckpointRecord) -> None:
        """Write the manifest of a committed step."""
        if together.is_primary():
            with self._exchange.decide("sealed"):
                _write_manifest(self._path, record, lambda: self._reports)
        else:
            self._exchange.follow("sealed")


def repair(
    path: Path, record: manifests.CheckpointRecord, exchange: together.ProcessExchange
) -> None:
    """Write the missing manifest of a step; each process hashes a share of its files.

    Args:
        path: of the step.
        record: of the step.
        exchange: of the processes.
    """
    if together.is_primary():
        with exchange.decide("sealed"):
            _write_manifest(path, record, lambda: exchange.collect("hashed"))
    else:
        exchange.contribute("hashed", lambda: _hash_share(path))
        exchange.follow("sealed")


def _hash_share(path: Path) -> str:
    files = manifests.hash_share(path, jax.process_index(), jax.process_count())
    return _FILES.dump_json(files).decode()


def _write_manifest(
    path: Path, record: manifests.CheckpointRecord, collect: Callable[[], list[str]]
) -> None:
    local_files = manifests.hash_share(path, 0, jax.process_count())  # while the others hash theirs
    others = (file for report in collect() for file in _FILES.validate_json(report))
    manifests.write(path, record, [*local_files, *others])
