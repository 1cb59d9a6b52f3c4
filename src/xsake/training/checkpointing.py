"""Checkpoints of a run: asynchronous saves by Orbax, restore of the newest valid step."""

import asyncio
import concurrent.futures
import contextlib
import datetime
import errno
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as orbax
from pydantic import TypeAdapter

from xsake._provenance import installed_versions
from xsake.errors import ArgumentError, CheckpointError
from xsake.training import verify
from xsake.training.fingerprints import (
    fingerprints,
    leaves_by_name,
    named_arrays,
    require_same_tree,
)
from xsake.training.multihost import (
    PeerError,
    ProcessExchange,
    broadcast,
    draw_number,
    summarize,
)
from xsake.training.processes import is_primary
from xsake.training.verify import CheckpointRecord, DamagedError, DamageReason, ManifestFile, Verify

PACKAGES = ("xsake", "jax", "jaxlib", "orbax-checkpoint")
STATE = "state"  # Orbax' checkpointable name of the tree
_RECORD = "xsake"  # key of the custom metadata
_FILES = TypeAdapter(tuple[ManifestFile, ...])
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointEvent:
    """Event about one step; `reason` is None for an undamaged step, `path` its current path.

    `quarantined`: renamed, nothing is deleted; `skipped`: invalid, not renamed; `repaired`: valid
    but without a manifest, because its run died; the manifest was added.
    """

    kind: Literal["quarantined", "skipped", "repaired"]
    step: int
    reason: DamageReason | None
    detail: str
    path: Path

    def __str__(self) -> str:
        return f"checkpoint {self.step} was {self.kind} ({self.detail}): {self.path}"


@dataclass(frozen=True)
class SaveFailure:
    """A save that failed; older steps are unchanged.

    `is_committed`: the arrays were committed; the manifest or the deletion of old steps failed.
    """

    step: int
    what: str
    error: Exception
    is_committed: bool

    def __str__(self) -> str:
        state = "was committed but not finalized" if self.is_committed else "was not saved"
        return f"checkpoint {self.step} {state}: {self.what}"


@dataclass(frozen=True)
class RestoredStep:
    """Restored step: its number, the arrays with the requested shardings, and its JSON."""

    step: int
    tree: Any
    extra: dict[str, Any]


def log_event(event: CheckpointEvent) -> None:
    """Log an event of a store."""
    _LOG.log(logging.INFO if event.reason is None else logging.ERROR, "%s", event)


def log_failure(failure: SaveFailure) -> None:
    """Log a failed save."""
    _LOG.error("%s", failure)


class CheckpointStore:
    """Checkpoints of one run, in a folder that only this run writes to (see `run_lock`).

    Each process writes its share of the arrays through Orbax and hashes its files. Then the primary
    process, in a thread, commits the step by renaming it, writes `MANIFEST.json` with the digest of
    every file, and deletes old steps. A step is valid if its files match the manifest and its
    arrays have the saved fingerprints.

    **A step without a manifest** is the newest one of a run that died after the commit. It is used
    if every loaded array matches the record of fingerprints that was committed with the arrays;
    then the missing manifest is written. Damage to files that no array uses is not detected.

    **A failed save**, for example on a full disk, does not raise: `on_failure` is called, `wait`
    raises later, and existing steps are kept. If one process fails, the save fails on all processes
    after the others have finished writing; the next save is not affected.

    **Going back**: saving a step quarantines all steps of its number or later, because they belong
    to an abandoned continuation of the run.

    With several processes, each one creates a store of the same shared folder and calls the same
    methods at the same points.

    Args:
        folder: of the steps; created by the first save.
        max_to_keep: number of valid steps to keep, counted from the newest; older ones are deleted.
            Steps without a manifest, or with files that do not match it, do not count.
        verify: what `restore` compares with the manifest: `full` every byte, `size` names and
            sizes, `off` nothing. Links always raise, and fingerprints are always compared.
        on_event: called in the primary process for quarantined, skipped and repaired steps.
        on_failure: called by the saving thread for failed saves.
        is_read_only: save, rename and write nothing: for reading the checkpoints of a running run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_to_keep: int = 3,
        verify: Verify = "full",
        on_event: Callable[[CheckpointEvent], None] = log_event,
        on_failure: Callable[[SaveFailure], None] = log_failure,
        is_read_only: bool = False,
    ):
        if max_to_keep < 1 or verify not in ("full", "size", "off"):
            raise ArgumentError(
                "store-settings", "invalid settings of a checkpoint store",
                got=f"{max_to_keep=}, {verify=}", expected="at least 1; full, size or off",
                fix="keep at least 3 steps: the newest may be damaged",
            )  # fmt: skip
        self._folder, self._max_to_keep = folder.absolute(), max_to_keep
        self._verify_mode: Verify = verify
        self._is_read_only = is_read_only
        self._on_event, self._on_failure = on_event, on_failure
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._job: concurrent.futures.Future[None] | None = None
        self._failures: list[SaveFailure] = []
        self._guard = threading.Lock()
        self._exchange: ProcessExchange | None = None
        self._is_closed = False

    def steps(self) -> list[int]:
        """Return the numbers of the committed steps, ascending; they are not validated."""
        return verify.list_committed_steps(self._folder)

    def save(self, step: int, tree: Any, extra: dict[str, Any]) -> None:
        """Save a tree; return when the arrays are copied, and write them in the background.

        The arrays may be donated when this returns. It waits for a save that is still running. An
        existing step with the same bits and the same `extra` is not written again.

        Args:
            step: its number.
            tree: a pytree of arrays, on any devices.
            extra: JSON, such as the state of the data and the digest of a plan.
        """
        if self._is_read_only or self._is_closed:
            raise ArgumentError(
                "store-closed",
                "the store does not accept saves",
                got="a closed store" if self._is_closed else "a read-only store",
                expected="an open store without is_read_only=True",
            )
        self._join()
        arrays = named_arrays(tree)
        record = _make_record(step, arrays, extra)
        text = verify.seal_record(record)
        try:
            number = self._prepare(record)
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(step, error, is_committed=False)
            return
        if number == 0:
            return
        exchange, reports = self._begin_exchange(number), list[str]()
        nonempty = {name: array for name, array in arrays.items() if array.size}
        wait_for_others = lambda: reports.extend(exchange.collect("written"))
        is_started = True
        try:
            write_part = start_save(self._folder / str(step), nonempty, text, wait_for_others)
        except (OSError, ValueError, RuntimeError) as error:
            # The other processes write their parts; they have to know.
            write_part, is_started = functools.partial(_raise, error), False
        self._job = self._thread.submit(self._finish, record, write_part, exchange, reports)
        if not is_started and jax.process_count() == 1:
            self._join()

    def wait(self) -> None:
        """Wait until everything is written; raise failures since the last call."""
        self._join()
        with self._guard:
            failures, self._failures = self._failures, []
        if failures:
            raise CheckpointError(
                "save", "saving failed", got="; ".join(map(str, failures)),
                expected="every step committed, with its manifest",
                fix="check whether the disk is full, broken or read-only; older steps are intact",
            ) from failures[0].error  # fmt: skip

    def restore(
        self, like: Any, step: int | None = None, *, part: str | None = None
    ) -> RestoredStep:
        """Restore the newest valid step, with the structure and shardings of `like`.

        Steps are validated from the newest back. A damaged one is renamed to
        `<step>.quarantined-<reason>`, `on_event` is called, and the next one is tried; nothing is
        deleted. A valid step whose tree differs from `like` raises: older ones would differ, too.

        Args:
            like: a tree of `jax.ShapeDtypeStruct` with any shardings.
            step: its number; None: the newest valid one.
            part: name of a part of the tree, such as "parameters", that `like` describes; the rest
                is not read.

        Raises:
            CheckpointError: no valid step, or another tree.
        """
        self._join()
        attempts: list[str] = []
        steps = verify.list_steps(self._folder)[::-1] if step is None else [step]
        # Other processes may see an older listing: the primary one decides, -1 ends.
        remaining = iter(steps)
        while (candidate := broadcast(next(remaining, -1))) >= 0:
            restored = self._try_restore(candidate, like, part)
            if isinstance(restored, RestoredStep):
                return restored
            attempts.append(f"{candidate}: {restored}")
        got = f"tried {'; '.join(attempts)}" if attempts else "no steps"
        if names := [path.name for path in verify.list_quarantined_steps(self._folder)]:
            got += f"; quarantined: {', '.join(names)}"
        raise CheckpointError(
            "nothing-restored",
            "no checkpoint can be restored" if step is None else f"step {step} cannot be restored",
            got=f"{self._folder}: {got}", expected="a committed, undamaged step",
            fix="nothing was deleted: copy a step back under its plain number, or start a new run "
            "in another folder",
        )  # fmt: skip

    def close(self) -> None:
        """Finish running saves and end the thread; raises like `wait`."""
        self._is_closed = True
        self._join()
        self._thread.shutdown()
        self.wait()

    def _join(self) -> None:
        if self._job is not None:
            job, self._job = self._job, None
            job.result()  # failures are recorded; only an error of `on_failure` is raised here

    def _prepare(self, record: CheckpointRecord) -> int:
        """Prepare the folder for a step; return the ID of its exchange, 0 if already saved."""
        is_saved, problem = False, None
        if is_primary():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                verify.remove_temporary(self._folder)
                is_saved = _is_same(self._folder, record)
                if not is_saved:
                    probe = self._folder / f".{record.step}.probe"  # is the folder writable?
                    probe.mkdir()
                    probe.rmdir()
                later = [] if is_saved else verify.list_steps(self._folder)
                for step in (step for step in later if step >= record.step):
                    self._quarantine(step, "superseded", f"step {record.step} was saved after it")
            except (OSError, CheckpointError) as error:
                problem = error
        # The others wait for this answer in any case.
        answer = broadcast(-1 if problem else 0 if is_saved else draw_number())
        if answer < 0:
            raise problem or OSError("the primary process cannot write to the folder")
        return answer

    def _begin_exchange(self, number: int) -> ProcessExchange:
        """Begin an exchange; all processes have just agreed on its number."""
        previous, self._exchange = self._exchange, ProcessExchange(number)
        if previous is not None:
            previous.delete()
        return self._exchange

    def _finish(
        self,
        record: CheckpointRecord,
        write_part: Callable[[], object],
        exchange: ProcessExchange,
        reports: list[str],
    ) -> None:
        """Run the background part of a save: commit, manifest, retention."""
        path, is_committed = self._folder / str(record.step), False
        try:
            if is_primary():
                with exchange.decide("committed"):
                    write_part()
                is_committed = True
                with exchange.decide("sealed"):
                    _write_manifest(path, record, lambda: reports)
                verify.delete_old_steps(self._folder, self._max_to_keep)
            else:
                _write_and_follow(path, write_part, exchange)
                is_committed = True
                exchange.follow("sealed")
        except Exception as error:  # noqa: BLE001 - a failed save must not stop training
            if is_primary() and not is_committed:
                with contextlib.suppress(OSError):  # frees space on a full disk
                    verify.remove_temporary(self._folder)
            self._fail(record.step, error, is_committed=is_committed)

    def _fail(self, step: int, error: Exception, *, is_committed: bool) -> None:
        failure = SaveFailure(step, summarize(error), error, is_committed)
        with self._guard:
            self._failures.append(failure)
        self._on_failure(failure)

    def _try_restore(self, step: int, like: Any, part: str | None) -> RestoredStep | str:
        """Return a step, or the reason why it is not usable; then it is quarantined."""
        path = self._folder / str(step)
        exchange = self._begin_exchange(broadcast(draw_number()))
        try:
            record = exchange.agree("validated", lambda: _validate(path, self._verify_mode))
            tree = exchange.agree("loaded", lambda: _load(path, record, like, part))
        except DamagedError as damage:
            if is_primary():
                self._quarantine(step, damage.reason, damage.summary)
            return damage.summary
        # Other processes may not see the manifest yet that the primary one has renamed.
        has_manifest = broadcast(int(isinstance(record, verify.Manifest)))
        if not has_manifest and not self._is_read_only:
            self._repair(path, record, exchange)
        return RestoredStep(step, tree, dict(record.extra))

    def _quarantine(self, step: int, reason: DamageReason, detail: str) -> None:
        kind: Literal["quarantined", "skipped"] = "skipped"
        path = self._folder / str(step)
        if not self._is_read_only and (path.exists() or path.is_symlink()):
            try:
                path, kind = verify.quarantine(self._folder, step, reason), "quarantined"
            except OSError as error:
                detail = f"{detail}; it could not be renamed: {error.strerror}"
        self._on_event(CheckpointEvent(kind, step, reason, detail, path))

    def _repair(self, path: Path, record: CheckpointRecord, exchange: ProcessExchange) -> None:
        """Write the missing manifest of a step; each process hashes a share of its files."""
        try:
            if is_primary():
                with exchange.decide("sealed"):
                    _write_manifest(path, record, lambda: exchange.collect("hashed"))
                event = CheckpointEvent("repaired", record.step, None, "manifest was missing", path)
                self._on_event(event)
            else:
                exchange.contribute("hashed", lambda: _hash_share(path))
                exchange.follow("sealed")
        except (OSError, DamagedError) as error:
            self._fail(record.step, error, is_committed=True)


# ---------- one save ----------


def _make_record(step: int, arrays: dict[str, Any], extra: dict[str, Any]) -> CheckpointRecord:
    if not 0 <= step <= verify.MAX_STEP:
        what, expected = "the number of a step is out of range", f"0 to {verify.MAX_STEP}"
        raise ArgumentError("step-range", what, got=step, expected=expected)
    verify.check_extra(extra)
    sums = fingerprints(arrays)
    shardings = [array.sharding for array in arrays.values() if isinstance(array, jax.Array)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return CheckpointRecord(
        step=step,
        utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        leaves=tuple(
            verify.LeafRecord(
                name=name, dtype=str(array.dtype), shape=array.shape, fingerprint=sums[name]
            )
            for name, array in arrays.items()
        ),
        placement=verify.DevicePlacement(
            platform=jax.default_backend(),
            devices=jax.device_count(),
            processes=jax.process_count(),
            axes={str(name): size for name, size in meshes[0].shape.items()} if meshes else {},
        ),
        versions=installed_versions(PACKAGES),
        extra=extra,
    )


def _is_same(folder: Path, record: CheckpointRecord) -> bool:
    if not verify.is_valid(folder, record.step):
        return False
    saved = verify.read_manifest(folder / str(record.step))
    return saved is not None and (saved.leaves, saved.extra) == (record.leaves, record.extra)


def start_save(
    path: Path, arrays: dict[str, Any], record: str, wait_for_others: Callable[[], object]
) -> Callable[[], object]:
    """Copy the arrays to the host and start to write them; return a function that waits for it.

    Afterwards the primary process has committed the step with the text of its record; the others
    have written their arrays. Processes do not wait for each other inside Orbax: its barriers do
    not propagate failures, and the others would wait 20 minutes for a process that cannot write.
    `wait_for_others` is called in a thread of the primary process before it merges all parts and
    commits; it raises if another process has failed.
    """
    state: Any = arrays
    metadata: Any = {_RECORD: record}
    context = orbax.Context()
    # Create the folder here: threads would wait minutes for a folder that cannot be created.
    context.asynchronous.create_directories_asynchronously = False
    if jax.process_count() > 1:
        context.multiprocessing.active_processes = {orbax.multihost.process_index()}
        if orbax.multihost.is_primary_host(0):
            registry = orbax.handlers.local_registry(include_global_registry=False)
            registry.add(_make_handler(wait_for_others), checkpointable_name=STATE)
            context.checkpointables.registry = registry
    with context:
        response = orbax.save_async(
            str(path), state, checkpointable_name=STATE, custom_metadata=metadata
        )
    return response.result


def _make_handler(wait_for_others: Callable[[], object]) -> type:
    """Build Orbax' pytree handler with a wait between writing and merging."""

    class Handler:
        def __init__(self):
            self._handler = orbax.handlers.PyTreeHandler()

        def is_handleable(self, tree: Any) -> bool:
            return self._handler.is_handleable(tree)

        def is_abstract_handleable(self, tree: Any) -> bool | None:
            return self._handler.is_abstract_handleable(tree)

        async def save(self, directory: Any, tree: Any) -> Awaitable[None]:
            written = await self._handler.save(directory, tree)
            return _finish_after(wait_for_others, written)

    # Orbax stores the class name: files must be the same with and without the wait.
    Handler.__module__ = orbax.handlers.PyTreeHandler.__module__
    Handler.__qualname__ = orbax.handlers.PyTreeHandler.__qualname__
    return Handler


async def _finish_after(wait_for_others: Callable[[], object], written: Awaitable[None]) -> None:
    await asyncio.to_thread(wait_for_others)
    await written


def _write_and_follow(
    path: Path, write_part: Callable[[], object], exchange: ProcessExchange
) -> None:
    """Write, hash and report a part; return when the primary process has committed the step."""
    errors: list[Exception] = []
    # Hash under the temporary name: on a network file system this process may see the rename
    # seconds later than the primary process.
    temporary = path.with_name(f"{path.name}.orbax-checkpoint-tmp")

    def write() -> None:
        try:
            exchange.contribute("written", lambda: (write_part(), _hash_share(temporary))[1])
        except Exception as error:  # noqa: BLE001 - reported, and raised below
            errors.append(error)

    # If the primary process has failed, this part may never end, for example while it waits for a
    # folder that is never created; the decision still arrives.
    threading.Thread(target=write, name="checkpoint part", daemon=True).start()
    try:
        exchange.follow("committed")
    except PeerError:
        if errors:
            raise errors[0] from None  # the local error is more specific
        raise


def _hash_share(path: Path) -> str:
    files = verify.hash_share(path, jax.process_index(), jax.process_count())
    return _FILES.dump_json(files).decode()


def _write_manifest(path: Path, record: CheckpointRecord, collect: Callable[[], list[str]]) -> None:
    files = verify.hash_share(path, 0, jax.process_count())  # while the others hash theirs
    others = (file for report in collect() for file in _FILES.validate_json(report))
    verify.write_manifest(path, record, [*files, *others])


def _raise(error: Exception) -> None:
    raise error


# ---------- one restore ----------


def _validate(path: Path, mode: Verify) -> CheckpointRecord:
    """Return the manifest of a step, or the record that was committed with its arrays."""
    manifest = None
    if not path.is_symlink():
        if not path.is_dir():
            raise DamagedError("absent", path.name, got="no folder", expected="a folder")
        manifest = verify.read_manifest(path)
    if manifest is not None:
        verify.verify_files(path, manifest, mode, jax.process_index(), jax.process_count())
        return manifest
    verify.list_files(path)
    try:
        metadata: Any = orbax.checkpointables_metadata(str(path)).custom_metadata
        record = verify.unseal(CheckpointRecord, metadata[_RECORD].encode())
    except OSError as error:
        raise verify.from_os_error(error, path, path) from error
    except CheckpointError:
        raise  # a format of another version
    except Exception as error:  # Orbax raises any type for broken metadata
        raise DamagedError("record", path.name, got=_first_line(error)) from error
    if str(record.step) != path.name:
        raise DamagedError("record", path.name, got=f"a record of step {record.step}")
    return record


def _load(path: Path, record: CheckpointRecord, like: Any, part: str | None) -> Any:
    """Load the tree of a validated step and compare fingerprints with the saved ones."""
    prefix = "" if part is None else f"{part}/"
    requested = {
        prefix + name: _with_sharding(name, leaf) for name, leaf in leaves_by_name(like).items()
    }
    saved = {leaf.name: leaf for leaf in record.leaves if leaf.name.startswith(prefix)}
    where = f"step {record.step}" if part is None else f"{part!r} of step {record.step}"
    require_same_tree(saved, requested, where=where)
    try:
        loaded = load_arrays(path, {name: leaf for name, leaf in requested.items() if leaf.size})
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # a problem of this host, not of the step
    except Exception as error:  # Orbax raises any type for broken files
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise verify.from_os_error(error, path / STATE, path) from error
        raise DamagedError("load", STATE, got=_first_line(error)) from error
    for name, fingerprint in fingerprints(loaded).items():
        if fingerprint != (expected := saved[name].fingerprint):
            raise DamagedError("fingerprint", name, got=fingerprint, expected=expected)
    # Orbax does not save empty arrays.
    all_leaves = [
        loaded[name] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in requested.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), all_leaves)


def load_arrays(path: Path, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Load the arrays named in `like` with its shardings; others are not read."""
    if not like:
        return {}
    context = orbax.Context()
    context.pytree.loading.partial_load = True
    abstract: Any = like
    with context:
        loaded: Any = orbax.load(str(path), abstract, checkpointable_name=STATE)
    return loaded


def _with_sharding(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return a leaf with a sharding: Orbax would default to that of the run that saved."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ArgumentError(
            "leaf-shape", f"the leaf {name!r} has no shape and dtype", got=type(leaf).__name__,
            expected="a jax.ShapeDtypeStruct with a sharding, or an array",
            fix="build `like` with jax.eval_shape and add shardings",
        )  # fmt: skip
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and jax.process_count() > 1:
        raise CheckpointError(
            "leaf-sharding", f"the leaf {name!r} has no sharding", got="a run of several processes",
            expected="a jax.sharding.NamedSharding", fix="give every leaf of `like` a sharding",
        )  # fmt: skip
    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0]}"[:300]
