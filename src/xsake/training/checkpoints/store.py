"""`CheckpointStore`: asynchronous saves, and restore of the newest valid step."""

import concurrent.futures
import contextlib
import datetime
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from xsake._provenance import installed_versions
from xsake.errors import ArgumentError, CheckpointError
from xsake.training.checkpoints import folders, leaves, orbax_io, reading, saving, together
from xsake.training.checkpoints import manifest as manifests
from xsake.training.checkpoints.damage import DamagedError, DamageReason
from xsake.training.checkpoints.events import (
    CheckpointEvent,
    EventCallback,
    FailureCallback,
    SaveFailure,
    log_event,
    log_failure,
)

PACKAGES = ("xsake", "jax", "jaxlib", "orbax-checkpoint")


@dataclass(frozen=True)
class RestoredStep:
    """Restored step.

    Attributes:
        step: its number.
        tree: the arrays, with the requested structure and shardings.
        extra: JSON that was saved with the arrays.
    """

    step: int
    tree: Any
    extra: dict[str, Any]


@dataclass(frozen=True)
class _FailedCommit:
    """This process's part of a save that failed before anything was written."""

    error: Exception

    def __call__(self) -> None:
        raise self.error


class CheckpointStore:
    """Checkpoints of one run, in a folder that only this run writes to (see `run_lock`).

    Each process writes its share of the arrays through Orbax and hashes its files. Then the primary
    process, in a thread, commits the step by renaming it, writes `MANIFEST.json` with the digest of
    every file, and deletes old steps. A step is valid if its files match the manifest and its
    arrays have the saved fingerprints.

    **A step without a manifest** is complete and the newest one: its run died after the commit. It
    is used if Orbax recognises it, it has no links, and every loaded array matches the record of
    fingerprints and `extra` that was committed with the arrays. Then the missing manifest is
    written. Damage to files that no array uses is not detected. Skipping such steps would lose a
    step whenever a run is killed at that moment.

    **A failed save**, for example on a full disk, does not raise: `on_failure` is called, `wait`
    raises later, training continues, and existing steps are kept. If one process fails, the save
    fails on all processes after the others have finished writing; the next save is not affected.
    Invalid arguments do raise.

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
        on_event: called in the primary process for quarantined, skipped and repaired steps; logs by
            default.
        on_failure: called by the saving thread for failed saves; logs by default.
        is_read_only: save, rename and write nothing: for reading the checkpoints of a running run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_to_keep: int = 3,
        verify: manifests.Verify = "full",
        on_event: EventCallback = log_event,
        on_failure: FailureCallback = log_failure,
        is_read_only: bool = False,
    ):
        if max_to_keep < 1 or verify not in ("full", "size", "off"):
            raise ArgumentError(
                "invalid settings of a checkpoint store",
                got=f"{max_to_keep=}, {verify=}",
                expected="max_to_keep >= 1 and verify one of full, size, off",
                fix="keep at least 3 steps: the newest may be damaged",
            )
        self._folder = folder.absolute()
        self._max_to_keep, self._is_read_only = max_to_keep, is_read_only
        self._verify: manifests.Verify = verify
        self._on_event, self._on_failure = on_event, on_failure
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._job: concurrent.futures.Future[None] | None = None
        self._failures: list[SaveFailure] = []
        self._guard = threading.Lock()
        self._exchange: together.ProcessExchange | None = None
        self._is_closed = False

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
                "the store does not accept saves",
                got="a closed store" if self._is_closed else "a read-only store",
                expected="an open store without is_read_only=True",
            )
        self._join()
        arrays = leaves.arrays(tree)
        record = _record(step, arrays, extra)
        text = manifests.seal_and_verify(record)
        try:
            number = self._prepare(record)
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(step, error, is_committed=False)
            return
        if number == 0:
            return
        path = self._folder / str(step)
        background = saving.BackgroundSave(path, self._begin_exchange(number))
        nonempty = {name: array for name, array in arrays.items() if array.size}
        try:
            commit = orbax_io.start_save(path, nonempty, text, background.wait_for_others)
        except (OSError, ValueError, RuntimeError) as error:
            commit = _FailedCommit(error)
        self._job = self._thread.submit(self._finish, record, commit, background)
        if isinstance(commit, _FailedCommit) and jax.process_count() == 1:
            self._join()

    def wait(self) -> None:
        """Wait until everything is written; raise failures since the last call."""
        self._join()
        with self._guard:
            failures, self._failures = self._failures, []
        if failures:
            raise CheckpointError(
                "saving failed",
                got="; ".join(map(str, failures)),
                expected="every step committed, with its manifest",
                fix="check whether the disk is full, broken or read-only; older steps are intact",
            ) from failures[0].error

    def steps(self) -> list[int]:
        """Return the numbers of committed steps that are not quarantined, ascending."""
        return folders.list_committed_steps(self._folder)

    def restore(
        self, like: Any, step: int | None = None, *, part: str | None = None
    ) -> RestoredStep:
        """Restore the newest valid step, or the given one.

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
        candidates = reversed(folders.list_steps(self._folder)) if step is None else [step]
        for candidate in self._agree_on_steps(list(candidates)):
            restored = self._try_restore(candidate, like, part)
            if isinstance(restored, RestoredStep):
                return restored
            attempts.append(f"{candidate}: {restored}")
        raise self._no_step_error(step, attempts)

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

    def _prepare(self, record: manifests.CheckpointRecord) -> int:
        """Prepare the folder for a step; return the ID of its exchange, 0 if already saved."""
        is_saved, problem = False, None
        if together.is_primary():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                folders.remove_temporary(self._folder)
                is_saved = _is_same(self._folder, record)
                if not is_saved:
                    folders.check_writable(self._folder, record.step)
                later = [] if is_saved else folders.list_steps(self._folder)
                for step in (step for step in later if step >= record.step):
                    self._quarantine(step, "superseded", f"step {record.step} was saved after it")
            except (OSError, CheckpointError) as error:
                problem = error
        # The others wait for this answer in any case.
        number = 0 if is_saved else together.draw_number()
        answer = together.broadcast_from_primary(-1 if problem else number)
        if answer < 0:
            raise problem or OSError("the primary process cannot write to the folder")
        return answer

    def _begin_exchange(self, number: int) -> together.ProcessExchange:
        """Begin an exchange; all processes have just agreed on its number."""
        previous, self._exchange = self._exchange, together.ProcessExchange(number)
        if previous is not None:
            previous.delete()
        return self._exchange

    def _finish(
        self,
        record: manifests.CheckpointRecord,
        write_part: orbax_io.Commit,
        background: saving.BackgroundSave,
    ) -> None:
        """Run the background part of a save: commit, manifest, retention."""
        is_committed = False
        try:
            background.commit(write_part)
            is_committed = True
            background.seal(record)
            if together.is_primary():
                folders.delete_old_steps(self._folder, self._max_to_keep)
        except Exception as error:  # noqa: BLE001 - a failed save must not stop training
            if together.is_primary() and not is_committed:
                with contextlib.suppress(OSError):  # frees space on a full disk
                    folders.remove_temporary(self._folder)
            self._fail(record.step, error, is_committed=is_committed)

    def _fail(self, step: int, error: Exception, *, is_committed: bool) -> None:
        failure = SaveFailure(step, together.summarize(error), error, is_committed)
        with self._guard:
            self._failures.append(failure)
        self._on_failure(failure)

    def _agree_on_steps(self, steps: list[int]):
        """Yield each step as the primary process lists it: others may see an older listing."""
        remaining = iter(steps)
        while (step := together.broadcast_from_primary(next(remaining, -1))) >= 0:
            yield step

    def _try_restore(self, step: int, like: Any, part: str | None) -> RestoredStep | str:
        """Return a step, or the reason why it is not usable; then it is quarantined."""
        path = self._folder / str(step)
        exchange = self._begin_exchange(together.broadcast_from_primary(together.draw_number()))
        damage: DamagedError | None = None
        validated: reading.ValidatedStep | None = None
        tree = None
        try:
            validated = reading.validate(path, self._verify)
        except DamagedError as error:
            damage = error
        damage = reading.agree_on_damage(exchange, "validated", damage)
        if damage is None and validated is not None:
            try:
                tree = reading.load(path, validated.record, like, part)
            except DamagedError as error:
                damage = error
            damage = reading.agree_on_damage(exchange, "loaded", damage)
        if damage is None and validated is not None:
            # Other processes may not see the manifest yet that the primary one has renamed.
            if not together.broadcast_from_primary(int(validated.has_manifest)):
                self._repair(step, validated.record, exchange)
            return RestoredStep(step, tree, dict(validated.record.extra))
        assert damage is not None
        if together.is_primary():
            self._quarantine(step, damage.reason, damage.summary)
        return damage.summary

    def _quarantine(self, step: int, reason: DamageReason, detail: str) -> None:
        path = self._folder / str(step)
        if self._is_read_only or not (path.exists() or path.is_symlink()):
            self._on_event(CheckpointEvent("skipped", step, reason, detail, path))
            return
        try:
            target = folders.quarantine(self._folder, step, reason)
        except OSError as error:
            detail = f"{detail}; it could not be renamed: {error.strerror}"
            self._on_event(CheckpointEvent("skipped", step, reason, detail, path))
            return
        self._on_event(CheckpointEvent("quarantined", step, reason, detail, target))

    def _repair(
        self, step: int, record: manifests.CheckpointRecord, exchange: together.ProcessExchange
    ) -> None:
        if self._is_read_only:
            return
        path = self._folder / str(step)
        try:
            saving.repair(path, record, exchange)
        except (OSError, DamagedError) as error:
            self._fail(step, error, is_committed=True)
            return
        if together.is_primary():
            self._on_event(CheckpointEvent("repaired", step, None, "manifest was missing", path))

    def _no_step_error(self, step: int | None, attempts: list[str]) -> CheckpointError:
        quarantined = [path.name for path in folders.list_quarantined_steps(self._folder)]
        parts = [f"tried {'; '.join(attempts)}" if attempts else "no steps"]
        if quarantined:
            parts.append(f"quarantined: {', '.join(quarantined)}")
        return CheckpointError(
            "no checkpoint can be restored" if step is None else f"step {step} cannot be restored",
            got=f"{self._folder}: {'; '.join(parts)}",
            expected="a committed, undamaged step",
            fix="nothing was deleted: copy a step back under its plain number, or start a new run "
            "in another folder",
        )


def _record(step: int, arrays: dict[str, Any], extra: dict[str, Any]) -> manifests.CheckpointRecord:
    if not 0 <= step <= manifests.MAX_STEP:
        raise ArgumentError(
            "the number of a step is out of range", got=step, expected=f"0 to {manifests.MAX_STEP}"
        )
    extra = manifests.check_extra(extra)
    fingerprints = leaves.fingerprints(arrays)
    return manifests.CheckpointRecord(
        step=step,
        utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        leaves=tuple(
            manifests.LeafRecord(
                name=name, dtype=str(array.dtype), shape=array.shape, fingerprint=fingerprints[name]
            )
            for name, array in arrays.items()
        ),
        placement=_placement(arrays),
        versions=installed_versions(PACKAGES),
        extra=extra,
    )


def _placement(arrays: dict[str, Any]) -> manifests.DevicePlacement:
    shardings = [array.sharding for array in arrays.values() if isinstance(array, jax.Array)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return manifests.DevicePlacement(
        platform=jax.default_backend(),
        devices=jax.device_count(),
        processes=jax.process_count(),
        axes={str(name): size for name, size in meshes[0].shape.items()} if meshes else {},
    )


def _is_same(folder: Path, record: manifests.CheckpointRecord) -> bool:
    if not folders.is_valid(folder, record.step):
        return False
    saved = manifests.read(folder / str(record.step))
    return saved is not None and (saved.leaves, saved.extra) == (record.leaves, record.extra)
