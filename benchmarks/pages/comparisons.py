"""The table of races in docs/benchmarks.md, made of the newest rows and of nothing else.

python -m benchmarks.pages.comparisons
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.experiments import backward, causal, ragged, same_blocks
from benchmarks.experiments.common import RESULTS, ROOT
from benchmarks.pages.headline import format_ratio, newest
from benchmarks.pages.marked_page import filled
from benchmarks.peers.recipes import IMPLEMENTATIONS
from xsake._io import atomic_write
from xsake.benchmarking import BenchmarkRow, Verdict, check_limit

PAGE = ROOT / "docs" / "benchmarks.md"
LENGTHS = (4096, 8192)
WORDS = {Verdict.PASS: "kept", Verdict.FAIL: "missed", Verdict.UNCLEAR: "too close to call"}
Line = tuple[str, BenchmarkRow | None, str, float | None]


def lines(results: Path) -> Iterator[Line]:
    """What was asked, our row, the side that it is compared with, and our limit."""
    for tokens in LENGTHS:
        dense = newest("causal", "xsake", results, tokens=tokens)
        for rival in causal.RIVALS:
            yield f"all blocks, {tokens} tokens", dense, rival, causal.LIMITS.get(rival)
    for tokens in LENGTHS:
        for name, mean in ragged.BUDGETS.items():
            row = newest("ragged", name, results, tokens=tokens)
            limit = None if row is None or row.budget is None else ragged.OVERHEAD * row.budget
            yield f"{mean:.0%} of the blocks, {tokens} tokens", row, ragged.FULL, limit
    for tokens in LENGTHS:
        for name, mean in ragged.BUDGETS.items():
            row = newest("same_blocks", "xsake", results, tokens=tokens, layout=name)
            asked = f"{mean:.0%} of the blocks, {tokens} tokens"
            for peer, speedup in same_blocks.SPEEDUPS.items():
                yield f"{asked}, the same for both", row, peer, 1 / speedup
            limit = 1 / same_blocks.DENSE_SPEEDUP if name == same_blocks.DENSE_AT else None
            yield asked, row, same_blocks.DENSE, limit
    for tokens in LENGTHS:
        row = newest("backward", backward.GRID, results, tokens=tokens)
        for peer, limit in backward.LIMITS.items():
            shared = ", the same for both" if peer in backward.SPARSE else ""
            yield f"with gradients, 25% of the blocks, {tokens} tokens{shared}", row, peer, limit


def table(results: Path = RESULTS) -> str:
    """The table in Markdown."""
    made = ["| workload | compared with | our time | our limit | |", "|---|---|---|---|---|"]
    for asked, row, peer, limit in lines(results):
        known = IMPLEMENTATIONS.get(peer)
        name = f"`{known.title}`" if known else f"our own {peer} call"
        bound = "" if limit is None else f"{limit:.3g}x"
        found = (asked, name, _found(row, peer, results), bound, _verdict(row, peer, limit))
        made.append(f"| {' | '.join(found)} |")
    return "\n".join([*made, ""])


def _found(row: BenchmarkRow | None, peer: str, results: Path) -> str:
    if row is None:
        return "not measured"
    if _has(row, peer):
        return format_ratio(row.ratio_to(peer))
    other = newest(row.experiment, peer, results, run=row.run)
    return f"failed: {other.failure}" if other and other.failure else "not measured"


def _verdict(row: BenchmarkRow | None, peer: str, limit: float | None) -> str:
    if row is None or limit is None or not _has(row, peer):
        return ""
    found = row.ratio_to(peer)
    # A spread may hide how far away the limit is, and still say on which side of it we are.
    return WORDS[Verdict.FAIL if found.q25 > limit else check_limit(found, limit)]


def _has(row: BenchmarkRow, peer: str) -> bool:
    return any(peer == ratio.baseline for ratio in row.ratios)


def main() -> None:
    """Write the table into the page."""
    atomic_write(PAGE, filled(PAGE.read_text(), {"races": table()}))
    print(table())


if __name__ == "__main__":
    main()
