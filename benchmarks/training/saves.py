"""Seconds that a save takes: training blocked, hashing, and begin to manifest, by processes.

python -m benchmarks.training.saves
python -m benchmarks.training.saves --before OTHER/src    # another version, in turns with this one
python -m benchmarks.training.saves --quick               # to see that it works; not kept

A state of random 32-bit numbers, sharded over 1, 2 and 4 processes on one machine. Rows go to
results/training/saves.jsonl. All processes share the cores and the disk of the machine, so the
figures of several processes are a lower bound of what as many machines would do.
"""

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.experiments.common import RESULTS
from benchmarks.peers.client import ROOT
from xsake._io import atomic_write
from xsake._provenance import environment

MEGABYTES, ROUNDS, PROCESSES = 256, 3, (1, 2, 4)
LEAVES = 8

# XLA's program of a fingerprint on a CPU needs memory as large as the array. Whether malloc gives
# it back to the system each time, 0.1 s of page faults here, depends on what was freed before.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}

SAVES = """
import json, pathlib, sys, time
import jax
folder, address, process, processes, size, saves = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, process)
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from xsake.training import verify as manifests
from xsake.training.checkpointing import CheckpointStore

hashing = [0.0]
name = "hash_share" if hasattr(manifests, "hash_share") else "write"  # 0.1.0 hashes in `write`
work = getattr(manifests, name)
def timed(*arguments):
    began = time.perf_counter()
    try:
        return work(*arguments)
    finally:
        hashing[0] += time.perf_counter() - began
setattr(manifests, name, timed)

place = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
values = np.random.default_rng(process).integers(0, 2**32, (size // 4 // processes,), np.uint32)
tree = {f"leaf{i}": jax.make_array_from_process_local_data(place, values + np.uint32(i))
        for i in range(LEAVES)}
store = CheckpointStore(pathlib.Path(folder), max_to_keep=1)
rows = []
for step in range(saves):
    multihost_utils.sync_global_devices(f"step {step}")  # the first one may still delete old steps
    hashing[0], began = 0.0, time.perf_counter()
    store.save(step, tree, {})
    blocked = time.perf_counter() - began
    store.wait()
    rows.append([blocked, time.perf_counter() - began, hashing[0]])
store.close()
print(json.dumps(rows[1:]))  # the first one compiles the fingerprints
"""


def measure(source: Path, processes: int, size: int, saves: int) -> dict[str, float]:
    """Save a few times with one version and return the medians, of the slowest process.

    Args:
        source: the folder that holds the package.
        processes: their number.
        size: of the state, bytes.
        saves: that are measured; one more comes before them.
    """
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    script = f"LEAVES = {LEAVES}\n" + SAVES
    variables = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="xsake-saves-") as folder:
        pool = [
            subprocess.Popen(
                [sys.executable, "-c", script, folder, address, str(process), str(processes),
                 str(size // LEAVES), str(saves + 1)],
                env=variables, stdout=subprocess.PIPE, text=True,
            )
            for process in range(processes)
        ]  # fmt: skip
        outs = [process.communicate()[0] for process in pool]
    if any(process.returncode for process in pool):
        raise SystemExit("a process failed; see above")
    rounds = zip(*(json.loads(out.splitlines()[-1]) for out in outs), strict=True)
    slowest = [[max(column) for column in zip(*each, strict=True)] for each in rounds]
    names = ("blocked_seconds", "total_seconds", "hashing_seconds")
    columns = zip(names, zip(*slowest, strict=True), strict=True)
    return {name: round(statistics.median(column), 3) for name, column in columns}


def compare(sides: dict[str, Path], processes: int, size: int, rounds: int) -> dict[str, Any]:
    """Measure all sides in turns, and again in the opposite order.

    Args:
        sides: folders of the packages, by name.
        processes: their number.
        size: of the state, bytes.
        rounds: of turns.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in names:
            found[name].append(measure(sides[name], processes, size, 2))
    row: dict[str, Any] = {"experiment": "saves", "processes": processes, "state_bytes": size}
    for name, each in found.items():
        row[name] = {key: statistics.median(one[key] for one in each) for key in each[0]}
        row[name]["rounds"] = each
    return row


def main() -> None:
    """Measure, print, and keep the rows of the whole size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--before", type=Path, help="the src folder of another version")
    given = parser.parse_args()
    sides = {"now": ROOT / "src"} | ({"before": given.before} if given.before else {})
    size, rounds = (2**22, 1) if given.quick else (MEGABYTES * 2**20, ROUNDS)
    rows = []
    for processes in PROCESSES[:2] if given.quick else PROCESSES:
        row = compare(sides, processes, size, rounds)
        row["environment"] = dataclasses.asdict(environment(ROOT))
        print(json.dumps({name: row[name] for name in row if name != "environment"}), flush=True)
        rows.append(json.dumps(row) + "\n")
    if not given.quick:
        atomic_write(RESULTS / "training" / "saves.jsonl", "".join(rows))


if __name__ == "__main__":
    main()
