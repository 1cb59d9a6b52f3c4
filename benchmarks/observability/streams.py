"""200 clients of live updates that hardly read: what a run and the server's memory feel of them.

python -m benchmarks.observability.streams
python -m benchmarks.observability.streams --quick    # to see that it works; not kept

One run, one dashboard. Segments with all clients connected and segments without any take turns.
Rows go to results/observability/streams.jsonl; the fault F19 measures the same.
"""

import argparse
import dataclasses
import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.experiments.common import RESULTS
from benchmarks.faults.runs import Ground, prepare
from benchmarks.observability.segments import LARGER, segmented
from benchmarks.observability.serving import Served, served
from benchmarks.observability.slow_clients import SlowClients, wait_for_none
from benchmarks.peers.client import ROOT
from xsake._io import atomic_write
from xsake._provenance import environment

CLIENTS, STEPS, PAIRS, MOST, MOST_GROWTH = 200, 100, 10, 1.05, 64.0
READ_SECONDS = 1.0


def measure(
    ground: Ground, *, clients: int, steps: int, pairs: int, settings: tuple[str, ...] = LARGER
) -> dict[str, Any]:
    """Step times with and without clients, and the server's memory.

    Args:
        ground: where runs live.
        clients: that read a few bytes a second.
        steps: of a segment.
        pairs: segments with them, and as many without.
        settings: of the run.
    """
    name = "streams"
    with (
        segmented(ground, name, settings, steps) as run,
        served(
            ground.folder / name,
            token_folder=ground.folder,
            options=("--max-clients", str(clients)),
        ) as server,
    ):
        run.segment()
        alone, watched, memory = [], [], [server.memory()["VmRSS"]]
        for _ in range(pairs):
            alone.append(run.segment())
            with SlowClients(server, clients, seconds=READ_SECONDS):
                watched.append(run.segment())
                memory.append(server.memory()["VmRSS"])
            wait_for_none(server)
        ratios = sorted(x / y for x, y in zip(watched, alone, strict=True))
        return {
            "clients": clients,
            "pairs": pairs,
            "seconds": [round(statistics.median(x), 6) for x in (watched, alone)],
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "memory_megabytes": memory,
            # The first time includes the buffers of all connections; after that it stays.
            "growth_megabytes": round(max(memory[1:]) - memory[1], 1),
            "dropped_events": _dropped(server),
        }


def _dropped(server: Served) -> int:
    text = server.ask("/metrics")[2].decode()
    found = re.search(r"^xsake_server_dropped_events_total (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def main() -> None:
    """Measure, print, and keep the row of the whole size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    clients, steps, pairs = (20, 10, 2) if given.quick else (CLIENTS, STEPS, PAIRS)
    with tempfile.TemporaryDirectory(prefix="xsake-streams-") as folder:
        found = measure(prepare(Path(folder)), clients=clients, steps=steps, pairs=pairs)
    is_met = found["ratio"] <= MOST and found["growth_megabytes"] <= MOST_GROWTH
    row = {"experiment": "streams", **found, "is_met": is_met}
    row["environment"] = dataclasses.asdict(environment(ROOT))
    print(json.dumps(row, indent=1))
    if not given.quick:
        out = RESULTS / "observability" / "streams.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
