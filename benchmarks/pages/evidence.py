"""The tables of docs/evidence.md, made of committed rows and of nothing else.

python -m benchmarks.pages.evidence

`tests/test_documentation.py` holds the page against this.
"""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.experiments.common import RESULTS, ROOT
from benchmarks.hads.compare import summarize
from benchmarks.hads.end_to_end import OURS, PUBLISHED, read_rows, select
from benchmarks.pages.headline import newest, ratio
from benchmarks.pages.marked_page import filled
from benchmarks.peers.models import SMOLLM2
from xsake._io import atomic_write
from xsake.hads import SparsityPlan

PAGE = ROOT / "docs" / "evidence.md"
TITLES = {
    OURS: "**hads, policy `effect`**",
    "minference_tokens": "MInference, token columns",
    "flexprefill": "FlexPrefill",
    "xattention_16": "XAttention, stride 16",
    "sparge_top_k": "SpargeAttn, top-k defaults",
    "quest": "Quest's bounds",
    "a_shape": "first block and window",
}
WORKS = (0.15, 0.2, 0.3, 0.4, 0.5)


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Return every table of the page by its mark."""
    return {
        "plans": _plans(results),
        "ladder 4096": _ladder(results, 4096),
        "ladder 8192": _ladder(results, 8192),
    }


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _gap(row: dict, part: str = "") -> str:
    value = row.get(f"perplexity_gap{part}")
    return "{value:+.2%} [{low:.2%}, {high:.2%}]".format(**value) if value else ""


def _plans(results: Path) -> str:
    """Losses of committed plans with their times in the same line."""
    lines = []
    for row in read_rows(results / "hads" / "plan_loss.jsonl"):
        if row["rule"] != "plan":
            continue
        name, context = row["plan"], row["context"]
        plan = SparsityPlan.load(results / "hads" / f"{name}.json")
        timed = {
            "prefill": (newest("prefill", name, results, tokens=context), "xsake"),
            "native": (newest("prefill", f"{name}, native_cpu", results, tokens=context),
                       "xsake, native_cpu"),
            "attention": (newest("hads/speed", name, results, tokens=context), "dense"),
        }  # fmt: skip
        times = [ratio(*timed[each]) or "" for each in timed]
        lines.append([
            f"`{name}`", f"{row['effective']:.0%}", str(row["block"]),
            f"{plan.calibration.context}", str(context), f"{row['documents']} {row['split']}",
            _gap(row), _gap(row, "_last_quarter"), f"{row['kl']['value']:.4f}", *times,
        ])  # fmt: skip
    head = ["plan", "work", "block", "calibrated at", "tokens", "documents", "perplexity, 95%",
            "last quarter of the positions", "next-token KL", "prefill / dense, `xla`",
            "prefill / dense, `native_cpu`", "attention / dense"]  # fmt: skip
    return _table(head, lines)


def _ladder(results: Path, context: int) -> str:
    """Next-token KL of rules at equal work, over the documents that all of them have."""
    rows = select(read_rows(results / "hads" / "end_to_end.jsonl"), model=SMOLLM2, context=context)
    rows = [row for row in rows if row["side"] in TITLES]
    sides = {(row["side"], row["work"]) for row in rows}
    by = {side: select(rows, side=side[0], work=side[1]) for side in sides}
    shared = (
        set.intersection(*({x["document"] for x in each} for each in by.values())) if by else ()
    )
    if not shared:
        return f"{context} tokens: not measured.\n"
    works = [work for work in WORKS if any(side[1] == work for side in sides)]
    lines = []
    for name in (OURS, *PUBLISHED):
        cells = []
        for work in works:
            own = [x for x in by.get((name, work), ()) if x["document"] in shared]
            cells.append(_cell(own) if own else "")
        if any(cells):
            lines.append([TITLES[name], *cells])
    head = [
        f"{context} tokens, {len(shared)} documents",
        *(f"{work:.0%} of the work" for work in works),
    ]
    return _table(head, lines)


def _cell(rows: list[dict]) -> str:
    """KL, KL of the last quarter, perplexity gap, and the work if it differs from the target."""
    mean = summarize([row["losses"] for row in rows])
    work = sum(row["measured_work"] for row in rows) / len(rows)
    kl, last = (mean[name]["value"] for name in ("kl", "kl_last_quarter"))
    text = f"{kl:.4f}, {last:.4f}; {mean['perplexity_gap']['value']:+.1%}"
    return text + (f" (at {work:.1%})" if abs(work - rows[0]["work"]) > 0.0025 else "")


def main() -> None:
    """Write the tables into the page."""
    atomic_write(PAGE, filled(PAGE.read_text(), tables()))


if __name__ == "__main__":
    main()
