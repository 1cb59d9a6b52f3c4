"""Faults of saves: kills, bits, files and disks that fail, folders and formats of others."""

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.hosts import filled, small_disk
from benchmarks.faults.results import Fault, Trial
from benchmarks.faults.runs import STEPS, Ground, Run
from benchmarks.faults.watching import is_gone, kill
from xsake.training import verify
from xsake.training.checkpointing import CheckpointStore

REAL_RUNS = 2  # damaged checkpoints that a real run resumes from, besides those read directly


def killed_while_saving(ground: Ground, is_quick: bool) -> Fault:
    """F1: runs that save after every step, killed again and again at moments drawn at random."""
    fault = Fault(
        "F1", "killed while it saves",
        "every restore gives the newest committed step, exactly", timed="restore",
    )  # fmt: skip
    draw, unfinished = random.Random(1), 0
    run = ground.run(
        "f1", f"run.steps={STEPS}", "checkpoint.save_interval=1", "checkpoint.max_to_keep=3"
    )
    for number in range(3 if is_quick else 20):
        delay, before = draw.uniform(0.0, 0.15), max(run.steps, default=0)
        if before > STEPS - 8:  # it must be killed before its end
            shutil.rmtree(run.folder)
            before = 0
        with fault.trial(f"kill {number}, {delay:.3f} s after a save") as trial:
            with run.started() as started:
                started.until(lambda past=before: max(run.steps, default=0) > past, "a save")
                time.sleep(delay)
                kill(started.process.pid)
                started.process.wait()
                left = {path.name for path in run.saves.iterdir()}
            unfinished += any("tmp" in name for name in left)
            newest, notices, begin = max(run.steps), [], time.monotonic()
            found = run.saved(notices=notices)
            trial.seconds = time.monotonic() - begin
            trial.require(found.step == newest, f"step {found.step}, newest {newest}")
            is_exact = found.digest == ground.straight.saved(found.step).digest
            trial.require(is_exact, f"step {found.step} has other bits")
            bad = [str(notice) for notice in notices if notice.kind != "repaired"]
            trial.require(not bad, bad)
    fault.figures["saves cut in two"] = unfinished
    return fault


def flipped_bits(ground: Ground, is_quick: bool) -> Fault:
    """F2: one bit of one file of the newest checkpoint, over all files."""
    fault = Fault(
        "F2", "a bit flips on the disk",
        "every flip is noticed by a digest, and the step before is used, exactly", timed="restore",
    )  # fmt: skip
    source, draw = _source(ground, "f2"), random.Random(2)
    expected = {step: source.saved(step).digest for step in (19, 20)}
    files = [path for path in _files(source) if path.stat().st_size]
    found_out = silent = 0
    for number in range(10 if is_quick else 30):
        file = files[number % len(files)]
        place, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
        name = file.relative_to(source.saves).as_posix()
        with fault.trial(f"{name}, byte {place}, bit {bit}") as trial:
            run = source.copy("f2-damaged")
            target = run.saves / name
            data = bytearray(target.read_bytes())
            data[place] ^= 1 << bit
            target.write_bytes(data)
            begin, notices = time.monotonic(), []
            found = run.saved(notices=notices)
            trial.seconds = time.monotonic() - begin
            is_right = found.digest == expected.get(found.step)
            trial.require(is_right, "silently other numbers")
            # Arrays have fingerprints and TensorStore has checksums: neither covers every byte.
            by = notices[0].reason if notices else None
            is_noticed = found.step == 19 and by in ("digest", "manifest")
            trial.require(is_noticed, f"restored {found.step}, noticed by {by}")
            silent += not is_right
            found_out += is_noticed
            if number < (0 if is_quick else REAL_RUNS):
                _finishes(run, trial, ground)
    fault.figures |= {"files": len(files), "found": found_out, "silent": silent}
    return fault


def damaged_files(ground: Ground, is_quick: bool) -> Fault:
    """F3: every file of the newest checkpoint cut, emptied and deleted."""
    fault = Fault(
        "F3", "a file is cut, empty or gone",
        "falls back to the step before, exactly, and names the file; exit code 0", timed="restore",
    )  # fmt: skip
    source = _source(ground, "f3")
    expected = {step: source.saved(step).digest for step in (19, 20)}
    files = _files(source)
    harms = {"cut": _cut, "emptied": lambda path: path.write_bytes(b""), "deleted": Path.unlink}
    # A file that is empty anyway can only be deleted.
    kinds = [(x, harm) for harm in harms for x in files if x.stat().st_size or harm == "deleted"]
    data = max(files, key=lambda path: path.stat().st_size)
    real = [(data, harm) for harm in harms]
    for file, harm in kinds[:: 4 if is_quick else 1]:
        name = file.relative_to(source.saves / "20").as_posix()
        with fault.trial(f"{name} {harm}") as trial:
            run, notices = source.copy("f3-damaged"), []
            harms[harm](run.saves / "20" / name)
            begin = time.monotonic()
            found = run.saved(notices=notices)
            trial.seconds = time.monotonic() - begin
            # Without its manifest a step is judged by the fingerprints of its arrays.
            is_sound = name == verify.MANIFEST and harm == "deleted"
            trial.require(found.step == (20 if is_sound else 19), f"restored {found.step}")
            trial.require(found.digest == expected.get(found.step), "other numbers")
            events = " ".join(str(notice) for notice in notices)
            trial.require(is_sound or name in events, f"{name} is not named: {events}")
    for file, harm in real[: 1 if is_quick else None]:
        name = file.relative_to(source.saves / "20").as_posix()
        with fault.trial(f"a run: {name} {harm}") as trial:
            run = source.copy("f3-damaged")
            harms[harm](run.saves / "20" / name)
            _finishes(run, trial, ground, names=name)
    fault.figures["files"] = len(files)
    return fault


def all_checkpoints_bad(ground: Ground, is_quick: bool) -> Fault:
    """F4: nothing that could be restored is left; twice, as a launcher would start it again."""
    fault = Fault(
        "F4", "all checkpoints are bad",
        "exit code 2 with an error code, every time; nothing is deleted", timed="until it ends",
    )  # fmt: skip
    run = _source(ground, "f4")
    for file in _files(run, 19) + _files(run, 20):
        if file.parent.name == "d":
            _cut(file)
    before = _contents(run)
    for number in range(1, 3):
        with fault.trial(f"start {number}") as trial:
            begin = time.monotonic()
            ended = run.train(code=2)
            trial.seconds = time.monotonic() - begin
            trial.require("XSK-601" in ended.text, ended.text[-500:])
            trial.require(_contents(run) == before, "files were deleted or changed")
    return fault


def full_disk(ground: Ground, is_quick: bool) -> Fault:
    """F5: a file system without room or without inodes, and files that cannot grow, for a while."""
    fault = Fault(
        "F5", "the disk is full for a while",
        "training continues and reports it; old checkpoints stay; same end, bit by bit",
        timed="until the run reports it",
    )  # fmt: skip
    for label, options in (("no room", "size=256m"), ("no inodes", "size=256m,nr_inodes=800")):
        run = ground.run(f"f5-{label.replace(' ', '-')}", f"run.steps={STEPS}")
        full = functools.partial(filled, run.folder, with_files="inodes" in label)
        with fault.trial(label) as trial, small_disk(run.folder, options):
            _is_full_for_a_while(run, trial, ground, lambda process, full=full: full())
    for label, room in (("checkpoints cannot grow", 2**15), ("metrics cannot grow either", None)):
        run = ground.run(f"f5-{len(fault.trials)}", f"run.steps={STEPS}")
        limited = functools.partial(_limited_files, run, room)
        with fault.trial(label) as trial:
            _is_full_for_a_while(run, trial, ground, limited)
    return fault


def _is_full_for_a_while(
    run: Run,
    trial: Trial,
    ground: Ground,
    make_full: Callable[[int], contextlib.AbstractContextManager[None]],
) -> None:
    """A disk that is full for two saves, then has room again.

    Args:
        run: not started.
        trial: of this disk.
        ground: of the run that was never disturbed.
        make_full: for a process, until its context ends.
    """
    with run.started(inject={"pace": 0.1}, is_piped=True) as started:
        started.until(lambda: 20 in run.steps, "step 20 saved")
        old, begin = _contents(run, only=[10, 20]), time.monotonic()
        with make_full(started.process.pid):
            started.until(lambda: started.text.count("was not saved") > 0, "a save that fails")
            trial.seconds = time.monotonic() - begin
            started.until(lambda: started.text.count("was not saved") > 1, "more steps")
            trial.require(_contents(run, only=[10, 20]).items() >= old.items(), "old ones changed")
        started.ended(0)
    failed = max(line.get("failed_saves", 0) for line in run.metrics)
    trial.require(failed >= 1, "the metrics do not report the saves that failed")
    trial.require(run.metrics[-1].get("failed_saves") == 0, "the alarm does not end")
    steps = [line["step"] for line in run.metrics]
    trial.require(steps == list(range(STEPS)), f"steps without a line: {STEPS - len(steps)}")
    end = run.saved()
    is_exact = end.digest == ground.straight.saved(STEPS).digest
    trial.require(is_exact and end.step == STEPS, f"another end, at step {end.step}")


@contextlib.contextmanager
def _limited_files(run: Run, room: int | None, process: int) -> Iterator[None]:
    """No file of a process may grow beyond `room`; None: beyond the metrics as they are."""
    limit = room or (run.folder / "metrics.jsonl").stat().st_size
    hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, hard))
    yield
    resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))


def one_folder_twice(ground: Ground, is_quick: bool) -> Fault:
    """F16: a second run in the folder of a running one, and then of one that was killed."""
    fault = Fault(
        "F16", "two runs, one folder",
        "the second refuses and names the first; the lock of a dead one is taken over",
        timed="until it refuses",
    )  # fmt: skip
    run = ground.run("f16")
    with run.started(inject={"pace": 0.05}) as first:
        with fault.trial("the first is running") as trial:
            first.until(lambda: run.last_step >= 2, "steps")
            # It stands still, so that it cannot end before the second is there.
            kill(first.process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            second = run.train(code=2)
            trial.seconds = time.monotonic() - begin
            trial.require(str(first.process.pid) in second.text, second.text[-500:])
        with fault.trial("the first was killed") as trial:
            kill(first.process.pid)
            first.process.wait()
            trial.require(is_gone(first.process.pid), "it is still running")
            trial.require((run.folder / "run.lock").exists(), "no lock was left")
            run.train()
            is_exact = run.saved().digest == ground.straight.saved(40).digest
            trial.require(is_exact, "another end")
            trial.require(not (run.folder / "run.lock").exists(), "the lock is still there")
    return fault


def other_versions(ground: Ground, is_quick: bool) -> Fault:
    """F17: checkpoints of an older release, of another format, and with a leaf that was renamed."""
    fault = Fault(
        "F17", "checkpoints of other versions",
        "loads, or a clear error that names what differs, with every step left where it is",
    )  # fmt: skip
    with fault.trial("written by an older release") as trial:
        run = _source(ground, "f17-older")
        for step in (19, 20):
            _rewritten(run, step, versions={"xsake": "0.0.1", "jax": "0.4.0"})
        _finishes(run, trial, ground)
    with fault.trial("a later format") as trial:
        run = _source(ground, "f17-format")
        for step in (19, 20):
            path = run.saves / str(step) / verify.MANIFEST
            text = path.read_text()
            path.write_text(_resealed(text, format=2))
        ended = run.train(code=2)
        trial.require("format" in ended.text, ended.text[-800:])
        trial.require(run.steps == [19, 20], f"set aside: {sorted(os.listdir(run.saves))}")
    with fault.trial("a leaf was renamed") as trial:
        run = _source(ground, "f17-leaf")
        state = run.saved(20).state
        parameters = dict(state.parameters)
        parameters["tokens_to_width"] = parameters.pop("embedding")
        tree = {**vars(state), "parameters": parameters}
        extra = verify.read_manifest(run.saves / "20").extra
        shutil.rmtree(run.saves)
        store = CheckpointStore(run.saves)
        store.save(20, tree, extra)
        store.close()
        ended = run.train(code=2)
        trial.require("tokens_to_width" in ended.text, ended.text[-800:])
        trial.require(run.steps == [20], f"set aside: {sorted(os.listdir(run.saves))}")
    return fault


def _source(ground: Ground, name: str) -> Run:
    """A run that was stopped after step 20, with the two newest checkpoints."""
    straight = ground.straight
    made = straight.kept_to(name, 20)
    return Run(ground, made.name)


def _files(run: Run, step: int = 20) -> list[Path]:
    return sorted(path for path in (run.saves / str(step)).rglob("*") if path.is_file())


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _contents(run: Run, only: list[int] | None = None) -> dict[tuple[str, str], bytes]:
    """Every file of the checkpoints, whatever their folders are called by now."""
    found = {}
    for folder in run.saves.iterdir():
        step = folder.name.partition(".")[0]
        if only is None or (folder.name == step and int(step) in only):
            for path in folder.rglob("*"):
                if path.is_file():
                    found[step, path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _finishes(run: Run, trial, ground: Ground, names: str | None = None) -> None:
    """Resume the run to step 40 and compare it with the straight run."""
    ended = run.train()
    trial.require(run.saved().digest == ground.straight.saved(40).digest, "the run ends elsewhere")
    trial.require(run.windows == ground.straight.windows[:40], "other batches")
    trial.require(names is None or names in ended.text, f"{names} is not named: {ended.text}")


def _rewritten(run: Run, step: int, **changes) -> None:
    path = run.saves / str(step)
    found = verify.read_manifest(path)
    assert found is not None
    text = verify.seal(found.model_copy(update=changes))
    (path / verify.MANIFEST).write_text(text)


def _resealed(text: str, **changes) -> str:
    """A manifest of a format that we do not know, sealed as that one would be."""
    document = json.loads(text)
    document.pop("digest")
    document |= changes
    document["digest"] = verify._hash_text(verify._canonical(document))
    return json.dumps(document)


SAVES = {
    "F1": killed_while_saving,
    "F2": flipped_bits,
    "F3": damaged_files,
    "F4": all_checkpoints_bad,
    "F5": full_disk,
    "F16": one_folder_twice,
    "F17": other_versions,
}
