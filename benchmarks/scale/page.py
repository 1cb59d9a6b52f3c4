"""The tables of docs/scale.md, from the arithmetic and the kept outcomes.

python -m benchmarks.scale.page
"""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages.marked_page import filled
from benchmarks.scale import arithmetic
from benchmarks.scale.cases import BLOCK, LLAMA_8B, SINKS, WINDOW
from benchmarks.scale.compiling import RESULTS
from xsake._io import atomic_write
from xsake.certify.tpu import TARGETS

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
CALIBRATION = RESULTS / "calibration"
BUDGET = 0.25
_TERA, _GIGA = 1e12, 1e9


def context_table() -> str:
    """Cost of a token by context: flops, and chip seconds of a million tokens at peak."""
    rows = [
        "| context | weights | dense | window | plan 25% | dense / window | dense / plan |"
        " v5p dense | v5p plan | v5e dense | v5e plan |",
        "|---" * 11 + "|",
    ]
    for context in arithmetic.CONTEXTS:
        dense = arithmetic.dense_cost(LLAMA_8B, context, BLOCK)
        window = arithmetic.window_cost(LLAMA_8B, context, BLOCK, window=WINDOW, sinks=SINKS)
        plan = arithmetic.planned_cost(LLAMA_8B, context, BLOCK, BUDGET)
        flops = (dense.weights, dense.total, window.total, plan.total)
        cells = [f"{context:,}", *(f"{x / _GIGA:.1f}" for x in flops)]
        cells += [f"{dense.total / other.total:.2f}" for other in (window, plan)]
        for chip in ("v5p", "v5e"):
            peak = TARGETS[chip].peak.bf16_flops_per_second
            least = (arithmetic.least_chip_seconds(one.total, peak) for one in (dense, plan))
            cells += [f"{seconds:,.0f}" for seconds in least]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def outcome_table(paths: Sequence[Path]) -> str:
    """What the compiler said about each case; bytes in units of 10^9."""
    rows = [
        "| case | verdict | needed / limit | arguments | temporaries | collectives: kind x runs, GB"
        " | compile s |",
        "|---" * 7 + "|",
    ]
    for path in paths:
        outcome = json.loads(path.read_text(encoding="utf-8"))
        rows.append("| " + " | ".join(_cells(path.stem, outcome)) + " |")
    return "\n".join(rows) + "\n"


def _cells(name: str, outcome: dict) -> list[str]:
    seconds = f"{outcome['seconds']['compile']:.0f}"
    if outcome["verdict"] != "compiled":
        return [name, outcome["verdict"], "", "", "", "", seconds]
    moved = ", ".join(
        f"{one['kind']} of {one['group'] or 2} x {one['runs']}, {one['bytes'] / _GIGA:.2f}"
        for one in outcome["collectives"]
        if one["bytes"] >= 1e7
    )
    return [name, *_memory_cells(outcome["memory"]), moved, seconds]


def _memory_cells(memory: dict[str, int]) -> list[str]:
    """Whether a program fits, what it needs of what there is, arguments, temporaries."""
    giga = lambda key: f"{memory[key] / _GIGA:.2f}"
    verdict = "fits" if memory["fits"] else "does not fit"
    return [verdict, f"{giga('needed')} / {giga('limit')}", giga("arguments"), giga("temporaries")]


def calibration_table() -> str:
    """What the compiler said about the programs of a streamed calibration."""
    rows = [
        "| chips | program | verdict | needed / limit | arguments | temporaries |",
        "|---" * 6 + "|",
    ]
    for path in sorted(CALIBRATION.glob("*.json")):
        programs = json.loads(path.read_text(encoding="utf-8"))["programs"]
        for name, outcome in programs.items():
            if outcome["verdict"] != "compiled":
                rows.append(f"| {path.stem} | {name} | {outcome['verdict']} | | | |")
                continue
            cells = [path.stem, name, *_memory_cells(outcome["memory"])]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def tables() -> dict[str, str]:
    """All tables of the page, by the name of their mark."""
    outcomes = outcome_table(sorted(RESULTS.glob("*.json")))
    calibration = calibration_table()
    return {"contexts": context_table(), "outcomes": outcomes, "calibration": calibration}


if __name__ == "__main__":
    atomic_write(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables()))
