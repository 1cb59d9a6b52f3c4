"""Faults of hosts: a write that fails on one, settings that differ, changed data, locks, lines."""

import contextlib
import hashlib
import itertools
import json
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.results import Fault, FaultError
from benchmarks.faults.runs import STEPS, Ground, Run
from benchmarks.faults.watching import kill, wait_until
from xsake.training.processes import COORDINATOR

PACE = {"pace": 0.2}
STALL_SECONDS = 30.0  # training continues within, whatever one process cannot write
REFUSAL_SECONDS = 10.0
LEASE_SECONDS = 3.0
FILE_LIMIT = 2**15  # bytes: less than a checkpoint's largest file


def one_cannot_write(ground: Ground, is_quick: bool) -> Fault:
    """F21: the files of one of two processes cannot grow, for two saves."""
    fault = Fault(
        "F21", "one of two processes cannot write",
        f"training continues within {STALL_SECONDS:g} s and reports the save; later saves work; "
        "same end, bit by bit",
        timed="longest time between two steps",
    )  # fmt: skip
    for rank in (1,) if is_quick else (0, 1):
        run = ground.run(f"f21-{rank}", "mesh.data=2", f"run.steps={STEPS}")
        with fault.trial(f"process {rank}") as trial, run.launched(inject=PACE) as started:
            pid = started.all_ranks(2)[rank]
            started.until(lambda run=run: 20 in run.steps, "step 20 saved")
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            # Rank 0 writes the metrics too: those must still fit.
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
            trial.seconds = _longest_pause(run, lambda s=started: s.text.count("was not saved") > 1)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
            trial.require(trial.seconds <= STALL_SECONDS, f"no step for {trial.seconds:.1f} s")
            started.ended(0)
            trial.require(run.saved().step == STEPS, f"saved {run.steps}")
            is_exact = run.saved(40).digest == ground.straight_pair.saved(40).digest
            trial.require(is_exact, "other bits at step 40")
    return fault


def different_settings(ground: Ground, is_quick: bool) -> Fault:
    """F22: the second of two processes has an old copy of the settings, or of the data."""
    fault = Fault(
        "F22", "hosts with different settings or data",
        f"both refuse with exit code 2 and name what differs, within {REFUSAL_SECONDS:g} s of "
        "their connection; no step is trained",
        timed="from the connection to the end of both",
    )  # fmt: skip
    other = ground.folder / "other-data"
    if not other.exists():
        shutil.copytree(ground.folder / "data", other)
        _change_first_token(other)
    trials = {
        "learning rate": ("optimizer.peak_learning_rate=2e-3", "optimizer.peak_learning_rate"),
        "data": (f"data.folder={json.dumps(str(other))}", "data"),
    }
    for label, (setting, named) in list(trials.items())[: 1 if is_quick else None]:
        run = ground.run(f"f22-{label.split()[0]}", "mesh.data=2")
        with fault.trial(label) as trial:
            with run.pair(second=("--set", setting)) as both:
                both[1].until(lambda both=both: _is_connected(both[1].process.pid), "a connection")
                begin = time.monotonic()
                for one in both:
                    one.ended(2)
                trial.seconds = time.monotonic() - begin
                text = "".join(one.text for one in both)
            trial.require(trial.seconds <= REFUSAL_SECONDS, f"{trial.seconds:.1f} s")
            trial.require(text.count(named) >= 2, f"{named} is not named twice: {text[-800:]}")
            trial.require(run.last_step == -1, f"trained to step {run.last_step}")
    return fault


def changed_tokens(ground: Ground, is_quick: bool) -> Fault:
    """F23: tokens of the training data change on the disk, with the size as it was."""
    fault = Fault(
        "F23", "token files change on the disk",
        "refused with exit code 2 and the name of the file: a new run, and one that resumes",
        timed="until it refuses",
    )  # fmt: skip
    folder = ground.folder / "changed-data"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ground.folder / "data", folder)
    shard = sorted(folder.glob("train-*.bin"))[0]
    setting = f"data.folder={json.dumps(str(folder))}"
    resumed = ground.run("f23-resumed", setting)
    resumed.different("run.steps=10").train()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    shard.write_bytes(data)
    for label, run in (("a new run", ground.run("f23-new", setting)), ("resumed", resumed)):
        with fault.trial(label) as trial:
            begin = time.monotonic()
            ended = run.train(code=2)
            trial.seconds = time.monotonic() - begin
            trial.require(shard.name in ended.text, ended.text[-500:])
    return fault


def locks_across_hosts(ground: Ground, is_quick: bool) -> Fault:
    """F24: containers that share a host name and a folder; a node that died, another takes over."""
    fault = Fault(
        "F24", "locks of other containers and nodes",
        "a living container with the same host name keeps its folder; the folder of a dead node "
        "is taken over after the lease, and the run ends as if nothing had been",
        timed="until it refuses, or takes over",
    )  # fmt: skip
    run = ground.run("f24", f"checkpoint.lease_seconds={LEASE_SECONDS}")
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with fault.trial("two containers, one host name") as trial:
        words = [*container, *run.command(inject=PACE)]
        with run.started(command=words) as first:
            first.until(lambda: run.last_step >= 2, "steps")
            begin = time.monotonic()
            with run.started(command=words) as second:
                second.ended(2)
            trial.seconds = time.monotonic() - begin
            trial.require("holds this folder" in second.text, second.text[-500:])
            before = run.last_step
            first.until(lambda: run.last_step > before, "more steps of the first")
    node = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    on = lambda name, words: [*node, f'hostname {name}; exec "$@"', "sh", *words]
    run = ground.run("f24-node", f"checkpoint.lease_seconds={LEASE_SECONDS}")
    with fault.trial("node-a dies, node-b continues") as trial:
        with run.started(command=on("node-a", run.command(inject=PACE))) as first:
            first.until(lambda: run.steps, "a save")
            kill(first.process.pid)
            first.process.wait()
        trial.require((run.folder / "run.lock").exists(), "no lock was left")
        begin = time.monotonic()
        with run.started(command=on("node-b", run.command())) as second:
            second.until(lambda: "taking over" in second.text, "the lock")
            trial.seconds = time.monotonic() - begin
            second.ended(0)
        is_exact = run.saved().digest == ground.straight.saved(40).digest
        trial.require(is_exact, "another end")
    return fault


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A real file system of a limited size in place of a folder; needs root.

    Args:
        folder: where it is mounted; made.
        options: of tmpfs, such as `size=2m`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FaultError(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled(folder: Path, *, with_files: bool) -> Iterator[None]:
    """Use up all room, or all inodes, of a small disk until the context ends.

    Args:
        folder: on that disk.
        with_files: use up inodes by empty files; otherwise room by one large file.
    """
    place = folder / "filler"
    place.mkdir()
    with contextlib.suppress(OSError):
        if with_files:
            for number in itertools.count():
                (place / str(number)).touch()
        with (place / "room").open("wb", buffering=0) as file:
            while file.write(bytes(2**12)):
                pass
    yield
    shutil.rmtree(place)


def _change_first_token(folder: Path) -> None:
    """Make data of other tokens, with an index that fits them."""
    shard, index = folder / "train-00000.bin", folder / "index.json"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    document = json.loads(index.read_text())
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    document["splits"]["train"]["shards"][0]["blake2b"] = digest
    index.write_text(json.dumps(document))


def _is_connected(pid: int) -> bool:
    """Whether a process has an established connection to the coordinator of its run."""
    words = dict(
        word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if word
    )
    if COORDINATOR not in words:  # still the environment of its parent, before exec
        return False
    port = f":{int(words[COORDINATOR].rpartition(':')[2]):04X}"
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, _, remote, state, *_ = line.split()
            if remote.endswith(port) and state == "01":
                return True
    return False


def _longest_pause(run: Run, is_enough) -> float:
    """Seconds of the longest time between two steps until something is so, and a step after."""
    longest, last, since = 0.0, run.last_step, time.monotonic()
    is_over = False
    while not is_over:
        is_over = bool(is_enough())
        if is_over or run.last_step != last:
            now = time.monotonic()
            longest, last, since = max(longest, now - since), run.last_step, now
        if time.monotonic() - since > 4 * STALL_SECONDS:
            return time.monotonic() - since
        time.sleep(0.02)
    return max(longest, wait_until(lambda: run.last_step > last, "a step"))


HOSTS = {
    "F21": one_cannot_write,
    "F22": different_settings,
    "F23": changed_tokens,
    "F24": locks_across_hosts,
}
