"""Cost of observability: a run with everything on compared with everything off, per segment.

python -m benchmarks.observability.cost
python -m benchmarks.observability.cost --quick    # to see that it works; not kept

On: metrics, probes every 100 steps, W&B (offline) and TensorBoard, and a dashboard with one client
that follows the run. Off: no metrics file, no probe, no tracker, no dashboard. A segment has 100
steps, so that each has its probe. Rows go to results/observability/cost.jsonl.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.experiments.common import RESULTS
from benchmarks.faults.runs import prepare
from benchmarks.observability.segments import ALL_OFF, ALL_ON, LARGER, compared, segmented
from benchmarks.observability.serving import served
from benchmarks.observability.slow_clients import SlowClients
from benchmarks.peers.client import ROOT
from xsake._io import atomic_write
from xsake._provenance import environment

STEPS, PAIRS, MOST = 100, 12, 1.02


def measure(folder: Path, steps: int, pairs: int) -> dict[str, Any]:
    """Both sides in turns.

    Args:
        folder: for the runs.
        steps: of a segment.
        pairs: segments of each side.
    """
    ground = prepare(folder)
    on = (*LARGER, *ALL_ON, f"attention.probe_interval={steps}")
    with (
        segmented(ground, "on", on, steps) as one,
        segmented(ground, "off", (*LARGER, *ALL_OFF), steps, is_bare=True) as other,
        served(folder / "on", token_folder=folder) as server,
        SlowClients(server, 1, seconds=0.0) as clients,
    ):
        found = compared(one, other, pairs)
        found["bytes_that_the_client_read"] = clients.received
        found["probes"] = len(server.json(f"/runs/{server.run()['id']}/heads/entropy")["values"])
    return found


def main() -> None:
    """Measure, print, and keep the row of the whole size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    steps, pairs = (10, 2) if given.quick else (STEPS, PAIRS)
    with tempfile.TemporaryDirectory(prefix="xsake-cost-") as folder:
        found = measure(Path(folder), steps, pairs)
    row = {"experiment": "cost", **found, "is_met": found["ratio"] <= MOST}
    row["environment"] = dataclasses.asdict(environment(ROOT))
    print(json.dumps(row, indent=1))
    if not given.quick:
        out = RESULTS / "observability" / "cost.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
