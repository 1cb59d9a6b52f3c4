"""`CheckpointStore`: saves beside training, and restores the newest step that is still sound."""

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
from xsake.training.checkpoints.damage import DamagedError, Reason
from xsake.training.checkpoints.events import (
    Notice,
    OnFailure,
    SaveFailure,
    Watch,
    log_failure,
    log_notice,
)

PACKAGES = ("xsake", "jax", "jaxlib", "orbax-checkpoint")


@dataclass(frozen=True)
class Restored:
    """A step that was read back.

    Attributes:
        step: its number.
        tree: the arrays, in the structure and on the devices that were asked for.
        extra: what was saved beside them.
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
    """The checkpoints of one run, in a folder that only this run writes to (see `run_lock`).

    Each process writes its share of the arrays through Orbax and hashes the files that it wrote.
    When all have done so the first one commits the step by renaming it, in a thread, writes
    `MANIFEST.json` into it, with the digest of every file, and deletes steps that are too old. A
    step is trusted when its files fit the manifest and its arrays, once loaded, have the
    fingerprints they had in memory.

    **A step without a manifest** belongs to a run that died between the two, so it is complete,
    and it is the newest. It is used: Orbax must recognise it, it may hold no links, and the
    record of what was saved (fingerprints and `extra` under a digest of their own), which is
    committed together with the arrays, must fit every array that is loaded. Then it is given its
    manifest. What cannot be noticed is damage to a file that no array comes from. To skip it
    would lose a step for every run that is killed at the wrong moment.

    **A save that fails**, as on a full disk, does not raise: `on_failure` is called, `wait` raises
    later, training continues, and the steps that are there stay. A failure of one process fails
    the save on all of them, as soon as the others have ended their writes; the next save is not
    affected. Wrong arguments do raise.

    **Going back**: saving a step sets aside all steps of its number or later, as they belong to a
    past that no longer leads here.

    In a run of several processes every one makes a store of the same shared folder and calls the
    same methods at the same points.

    Args:
        folder: of the steps; made when the first is saved.
        keep: good steps to keep, counted from the newest; older ones are deleted. Steps without
            a manifest, or whose files do not fit it, do not count.
        verify: what `restore` compares with the manifest: `full` every byte, `size` names and
            sizes, `off` nothing. Links are refused and fingerprints compared in any case.
        watch: told about steps that are set aside, skipped or adopted, on the first process;
            writes a log by default.
        on_failure: told about saves that failed, by the thread that saves; writes a log by
            default.
        is_read_only: save nothing, rename nothing, write no manifests: for reading the
            checkpoints of a run that goes on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        verify: manifests.Verify = "full",
        watch: Watch = log_notice,
        on_failure: OnFailure = log_failure,
        is_read_only: bool = False,
    ):
        if keep < 1 or verify not in ("full", "size", "off"):
            raise ArgumentError(
                "no checkpoints can be kept like this",
                got=f"{keep=}, {verify=}",
                expected="keep >= 1 and verify out of full, size, off",
                fix="keep at least 3: the newest may turn out to be damaged",
            )
        self._folder = folder.absolute()
        self._keep, self._is_read_only = keep, is_read_only
        self._verify: manifests.Verify = verify
        self._watch, self._on_failure = watch, on_failure
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._job: concurrent.futures.Future[None] | None = None
        self._failures: list[SaveFailure] = []
        self._guard = threading.Lock()
        self._exchange: together.Exchange | None = None
        self._is_closed = False

    def save(self, step: int, tree: Any, extra: dict[str, Any]) -> None:
        """Save a tree; returns when the arrays are copied, and writes them in the background.

        The arrays may be donated as soon as this returns. A save that is still under way is
        waited for. A step that is there already with the same bits and the same `extra` is not
        written again.

        Args:
            step: its number.
            tree: a pytree of arrays, on any devices.
            extra: JSON: the state of the data, the digest of a plan...
        """
        if self._is_read_only or self._is_closed:
            raise ArgumentError(
                "nothing can be saved here",
                got="a store that is closed" if self._is_closed else "a store for reading only",
                expected="an open store made without is_read_only=True",
            )
        self._settle()
        arrays = leaves.arrays(tree)
        record = _record(step, arrays, extra)
        text = manifests.sealed_and_checked(record)
        try:
            number = self._make_room(record)
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(step, error, is_committed=False)
            return
        if number == 0:
            return
        path = self._folder / str(step)
        background = saving.Save(path, self._begin_exchange(number))
        kept = {name: array for name, array in arrays.items() if array.size}
        try:
            commit = orbax_io.begin(path, kept, text, background.wait_for_others)
        except (OSError, ValueError, RuntimeError) as error:
            commit = _FailedCommit(error)
        self._job = self._thread.submit(self._finish, record, commit, background)
        if isinstance(commit, _FailedCommit) and jax.process_count() == 1:
            self._settle()

    def wait(self) -> None:
        """Wait until all is written; raise what went wrong since the last time."""
        self._settle()
        with self._guard:
            failures, self._failures = self._failures, []
        if failures:
            raise CheckpointError(
                "saving did not work",
                got="; ".join(map(str, failures)),
                expected="every step committed, with its manifest",
                fix="look at the disk: is it full, broken or not writable? Older steps are intact",
            ) from failures[0].error

    def steps(self) -> list[int]:
        """Numbers of the steps that are committed and not set aside, ascending."""
        return folders.committed(self._folder)

    def restore(self, like: Any, step: int | None = None, *, part: str | None = None) -> Restored:
        """The newest step that is sound, or the one that is named.

        Steps are judged from the newest back. One that is damaged is renamed to
        `<step>.quarantined-<reason>`, `watch` is told, and the next one is tried; nothing is ever
        deleted. A sound step whose tree differs from `like` raises at once, as all the older ones
        would differ too.

        Args:
            like: a tree of `jax.ShapeDtypeStruct` with shardings, which need not be those of the
                run that saved.
            step: this one or an error; None: the newest that is sound.
            part: name of a part of the tree, such as "parameters", that `like` stands for; the
                rest is not read.

        Raises:
            CheckpointError: no step is left, or the tree is another one.
        """
        self._settle()
        tried: list[str] = []
        wanted = reversed(folders.present(self._folder)) if step is None else [step]
        for candidate in self._agreed(list(wanted)):
            found = self._tried(candidate, like, part)
            if isinstance(found, Restored):
                return found
            tried.append(f"{candidate}: {found}")
        raise self._nothing_left(step, tried)

    def close(self) -> None:
        """Finish what is under way and end the thread; raises like `wait`."""
        self._is_closed = True
        self._settle()
        self._thread.shutdown()
        self.wait()

    def _settle(self) -> None:
        if self._job is not None:
            job, self._job = self._job, None
            job.result()  # failures are kept: what is raised here is an error of `on_failure`

    def _make_room(self, record: manifests.Record) -> int:
        """Make room for a step; returns the number of its exchange, 0 if it needs no saving."""
        is_there, problem = False, None
        if together.is_first():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                folders.clear_unfinished(self._folder)
                is_there = _is_same(self._folder, record)
                if not is_there:
                    folders.require_room(self._folder, record.step)
                later = [] if is_there else folders.present(self._folder)
                for step in (step for step in later if step >= record.step):
                    self._set_aside(step, "superseded", f"step {record.step} was saved after it")
            except (OSError, CheckpointError) as error:
                problem = error
        # The others wait for this answer, whatever happened.
        number = 0 if is_there else together.draw_number()
        answer = together.first_says(-1 if problem else number)
        if answer < 0:
            raise problem or OSError("the first process cannot write to the folder")
        return answer

    def _begin_exchange(self, number: int) -> together.Exchange:
        """Begin an exchange; all processes have just agreed on its number."""
        previous, self._exchange = self._exchange, together.Exchange(number)
        if previous is not None:
            previous.delete()
        return self._exchange

    def _finish(
        self, record: manifests.Record, own_part: orbax_io.Commit, background: saving.Save
    ) -> None:
        """What happens next to training: the commit, then the manifest, then retention."""
        is_committed = False
        try:
            background.commit(own_part)
            is_committed = True
            background.seal(record)
            if together.is_first():
                folders.retire(self._folder, self._keep)
        except Exception as error:  # noqa: BLE001 - whatever stops a save must not stop training
            if together.is_first() and not is_committed:
                with contextlib.suppress(OSError):  # a full disk needs the room
                    folders.clear_unfinished(self._folder)
            self._fail(record.step, error, is_committed=is_committed)

    def _fail(self, step: int, error: Exception, *, is_committed: bool) -> None:
        failure = SaveFailure(step, together.summarize(error), error, is_committed)
        with self._guard:
            self._failures.append(failure)
        self._on_failure(failure)

    def _agreed(self, steps: list[int]):
        """Each step as the first process has it: the others may see an older listing."""
        remaining = iter(steps)
        while (step := together.first_says(next(remaining, -1))) >= 0:
            yield step

    def _tried(self, step: int, like: Any, part: str | None) -> Restored | str:
        """A step, or why it cannot be used; then it is set aside."""
        path = self._folder / str(step)
        exchange = self._begin_exchange(together.first_says(together.draw_number()))
        damage: DamagedError | None = None
        judged: reading.Judged | None = None
        tree = None
        try:
            judged = reading.judge(path, self._verify)
        except DamagedError as error:
            damage = error
        damage = reading.agree_on_damage(exchange, "judged", damage)
        if damage is None and judged is not None:
            try:
                tree = reading.fill(path, judged.record, like, part)
            except DamagedError as error:
                damage = error
            damage = reading.agree_on_damage(exchange, "filled", damage)
        if damage is None and judged is not None:
            # Another process may not see yet what the first has renamed into the step.
            if not together.first_says(int(judged.has_manifest)):
                self._adopt(step, judged.record, exchange)
            return Restored(step, tree, dict(judged.record.extra))
        assert damage is not None
        if together.is_first():
            self._set_aside(step, damage.reason, damage.told)
        return damage.told

    def _set_aside(self, step: int, reason: Reason, detail: str) -> None:
        path = self._folder / str(step)
        if self._is_read_only or not (path.exists() or path.is_symlink()):
            self._watch(Notice("skipped", step, reason, detail, path))
            return
        try:
            target = folders.set_aside(self._folder, step, reason)
        except OSError as error:
            told = f"{detail}; it could not be renamed: {error.strerror}"
            self._watch(Notice("skipped", step, reason, told, path))
            return
        self._watch(Notice("quarantined", step, reason, detail, target))

    def _adopt(self, step: int, record: manifests.Record, exchange: together.Exchange) -> None:
        if self._is_read_only:
            return
        path = self._folder / str(step)
        try:
            saving.adopt(path, record, exchange)
        except (OSError, DamagedError) as error:
            self._fail(step, error, is_committed=True)
            return
        if together.is_first():
            self._watch(Notice("adopted", step, None, "it had no manifest and has one now", path))

    def _nothing_left(self, step: int | None, tried: list[str]) -> CheckpointError:
        aside = [path.name for path in folders.quarantined(self._folder)]
        parts = [f"tried {'; '.join(tried)}" if tried else "no step is there"]
        if aside:
            parts.append(f"set aside: {', '.join(aside)}")
        return CheckpointError(
            "no checkpoint can be restored" if step is None else f"step {step} cannot be restored",
            got=f"{self._folder}: {'; '.join(parts)}",
            expected="a step that is committed and undamaged",
            fix="nothing was deleted: copy a step back from elsewhere under its plain number, or "
            "start anew in another folder",
        )


def _record(step: int, arrays: dict[str, Any], extra: dict[str, Any]) -> manifests.Record:
    if not 0 <= step <= manifests.MOST_STEP:
        raise ArgumentError(
            "a step has no such number", got=step, expected=f"0 to {manifests.MOST_STEP}"
        )
    extra = manifests.checked_extra(extra)
    found = leaves.fingerprints(arrays)
    return manifests.Record(
        step=step,
        utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        leaves=tuple(
            manifests.Leaf(
                name=name, dtype=str(array.dtype), shape=array.shape, fingerprint=found[name]
            )
            for name, array in arrays.items()
        ),
        placement=_placement(arrays),
        versions=installed_versions(PACKAGES),
        extra=extra,
    )


def _placement(arrays: dict[str, Any]) -> manifests.Placement:
    shardings = [array.sharding for array in arrays.values() if isinstance(array, jax.Array)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return manifests.Placement(
        platform=jax.default_backend(),
        devices=jax.device_count(),
        processes=jax.process_count(),
        axes={str(name): size for name, size in meshes[0].shape.items()} if meshes else {},
    )


def _is_same(folder: Path, record: manifests.Record) -> bool:
    if not folders.is_good(folder, record.step):
        return False
    found = manifests.read(folder / str(record.step))
    return found is not None and (found.leaves, found.extra) == (record.leaves, record.extra)
