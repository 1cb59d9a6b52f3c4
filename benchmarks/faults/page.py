"""The table of docs/faults.md, from the results that `python -m benchmarks.faults` keeps.

python -m benchmarks.faults.page
"""

import json

from benchmarks.experiments.common import RESULTS, ROOT
from benchmarks.pages.marked_page import filled
from xsake._io import atomic_write

PAGE = ROOT / "docs" / "faults.md"
FILE = RESULTS / "faults.json"


def table() -> str:
    """Every fault, its gate and what came of it; a line that says so if nothing was measured."""
    if not FILE.exists():
        return "Not measured yet: `just faults` makes the table.\n"
    document = json.loads(FILE.read_text())
    where, faults = document["environment"], document["faults"]
    met = sum(fault["is_met"] for fault in faults)
    busiest = max(fault["load_average"] for fault in faults)
    missing = sorted({f"F{x}" for x in range(1, 25)} - {x["fault"] for x in faults})
    unmeasured = f" Not measured: {', '.join(missing)}." if missing else ""
    rows = [
        f"{met} of {len(faults)} gates met, in {document['wall_seconds'] / 60:.0f} minutes on "
        f"{where['cores']} cores (load average up to {busiest:.0f}; every row of "
        f"`benchmarks/results/faults.json` has its date and commit).{unmeasured}",
        "",
        "| | fault | survived when | passed | median | 95% | what is timed | also measured |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(fault) for fault in faults),
    ]
    return "\n".join(rows) + "\n"


def _row(fault: dict) -> str:
    passed = f"{fault['passes']}/{fault['n']}"
    seconds = [fault["seconds_p50"], fault["seconds_p95"]]
    cells = [
        fault["fault"], fault["name"], fault["gate"],
        passed if fault["is_met"] else f"**{passed}, not met**",
        *("" if x is None else f"{x:.2f} s" for x in seconds),
        "" if seconds[0] is None else fault["timed"],
        ", ".join(f"{name} {_short(value)}" for name, value in fault["figures"].items()),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _short(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    atomic_write(PAGE, filled(PAGE.read_text(), {"faults": table()}))
