"""Seconds and memory to build the layout of 16 different heads, each time in a fresh process.

python -m benchmarks.experiments.layout_build      # 131,072 tokens
python -m benchmarks.experiments.layout_build --quick
"""

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

from benchmarks.experiments.common import BLOCK, Outcome, Settings, command, plain_row
from benchmarks.peers.client import ROOT
from xsake._format import format_bytes, format_seconds
from xsake.benchmarking import Claim, Shape, Spread, Verdict
from xsake.benchmarking.rows import TimingStats
from xsake.layout import BlockLayout
from xsake.masks import (
    AbstractMask,
    Causal,
    Chunked,
    Longformer,
    PerHead,
    Random,
    Sinks,
    Strided,
    Window,
)

HEADS = 16
SECONDS_LIMIT = 5.0
BYTES_LIMIT = 300_000_000
FLAG = "--build-and-report"


def structured_heads() -> AbstractMask:
    """Sixteen different rules, from a narrow window to everything visible."""
    rules = [
        Causal(),
        *(Window(left=left, right=0) for left in (255, 1023, 4095, 16383)),
        *(
            Sinks(count) | Window(left=left, right=0)
            for count, left in ((4, 511), (64, 2047), (128, 8191))
        ),
        *(Strided(stride, 128) | Window(left=1023, right=0) for stride in (1024, 2048, 8192)),
        *(Chunked(size) for size in (1000, 8192, 32768)),
        Longformer(window=2048, global_tokens=256),
        Random(keep=0.1, seed=1) | Window(left=255, right=0),
    ]
    return PerHead([rule & Causal() for rule in rules])


def measure(settings: Settings) -> Outcome:
    """Median over fresh processes; the memory is the worst of them."""
    (tokens,) = settings.choose([131_072], quick=8192)
    reports = [_in_fresh_process(tokens) for _ in range(3 if settings.is_quick else 5)]
    seconds = Spread.of([report["seconds"] for report in reports])
    peak = max(report["peak_bytes"] for report in reports)
    row = plain_row(
        "layout_build",
        uuid.uuid4().hex[:12],
        Shape.square(tokens, heads=HEADS),
        settings,
        side="from_mask",
        implementation="xsake.layout.BlockLayout.from_mask",
        direction="build",
        dtype="none",
        mask="16 structured heads & Causal()",
        layout="from_mask",
        budget=reports[0]["budget"],
        block_q=BLOCK,
        block_kv=BLOCK,
        seconds=TimingStats(**vars(seconds)),
        repeats=len(reports),
        peak_bytes=peak,
    )
    topic = f"layout of {tokens} tokens x {HEADS} heads"
    is_fast, is_small = max(r["seconds"] for r in reports) <= SECONDS_LIMIT, peak <= BYTES_LIMIT
    return [row], [
        Claim(
            topic,
            f"<= {SECONDS_LIMIT:g} s, every time",
            " .. ".join(
                format_seconds(part) for part in (seconds.q25, seconds.median, seconds.q75)
            ),
            Verdict.PASS if is_fast else Verdict.FAIL,
        ),
        Claim(
            topic,
            f"<= {format_bytes(BYTES_LIMIT)} above the start",
            format_bytes(peak),
            Verdict.PASS if is_small else Verdict.FAIL,
        ),
    ]


def build_and_report(tokens: int) -> dict[str, float]:
    """Build once; the peak is counted from what is resident after the imports.

    The peak may belong to the imports themselves, so the difference is an upper limit.
    """
    heads = structured_heads()
    start_bytes = _memory("VmRSS:")
    start = time.perf_counter()
    layout = BlockLayout.from_mask(heads, q_tokens=tokens, block_q=BLOCK, block_kv=BLOCK)
    seconds = time.perf_counter() - start
    peak_bytes = _memory("VmHWM:") - start_bytes
    visible = HEADS * layout.q_blocks * (layout.q_blocks + 1) // 2
    return {"seconds": seconds, "peak_bytes": peak_bytes, "budget": layout.items / visible}


def _in_fresh_process(tokens: int) -> dict[str, float]:
    call = [sys.executable, "-m", "benchmarks.experiments.layout_build", FLAG, str(tokens)]
    done = subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _memory(field: str) -> int:
    """Bytes by Linux's own account; not `ru_maxrss`, which begins at the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    if sys.argv[1:2] == [FLAG]:
        print(json.dumps(build_and_report(int(sys.argv[2]))))
    else:
        command("layout_build", measure, __doc__)
